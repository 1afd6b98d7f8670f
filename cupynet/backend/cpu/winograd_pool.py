"""Fused convolution and 2x2 max pooling with Winograd's minimal filtering (`kernels/winograd_pool.py`).

`ConvPool` is used instead if values are NaN or could overflow. The backward pass also uses it if a ReLU has zeroed at
least half of the gradients, because `ConvPool` skips zeros. Rounding may therefore differ between batches.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.cpu import conv_pool
from cupynet.backend.cpu.kernels import winograd_pool as winograd
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.cpu.kernels.vectors import registers
from cupynet.backend.fusion import Convolution, FusedPair, Weights
from cupynet.backend.window import Window

MIN_CHANNELS = 16  # minimum number of channels and of filters; fewer do not fill vectors
MAX_PRODUCTS = 0.5  # maximum number of products, relative to direct sums, for which transforms pay off
TILES = 16  # number of tiles computed together; their products stay in the L2 cache
LARGEST = 1e32  # sums of |x| |w| below this do not overflow in float: transforms scale them by less than 1e5


def fuse(backend: Backend, first: Convolution, pool: Window) -> FusedPair | None:
    """Return the fastest fused pair for these layers, or None if they cannot be fused."""
    direct, window = conv_pool.fuse(backend, first, pool), first.window
    supported = window.kernel in ((3, 3), (5, 5)) and window.stride == (1, 1) and pool.kernel == pool.stride == (2, 2)
    if direct is None or not supported or min(first.image[2], first.filters) < MIN_CHANNELS:
        return direct
    pair = WinogradPool(backend, first, pool)
    return pair if pair.products <= MAX_PRODUCTS else direct


class WinogradPool(conv_pool.ConvPool):
    """Like `ConvPool`. If pixels of a window are equal, rounding may decide which one is the maximum.

    If tiles do not divide the outputs evenly, only the forward pass uses Winograd's algorithm.
    """

    @cached_property
    def tiles(self) -> tuple[int, int]:
        """The number of tiles that cover the outputs of an image, vertically and horizontally."""
        down, across = (-(-side // 2) for side in self.pooled)
        return down, across

    @property
    def products(self) -> float:
        """The number of products, relative to direct sums."""
        size, (down, across) = self.conv.window.kernel[0], self.tiles
        outputs = 4 * self.pooled[0] * self.pooled[1]
        return (size + winograd.SIDE - 1) ** 2 * down * across / (size**2 * outputs) if outputs else 1.0

    @cached_property
    def divides(self) -> bool:
        return not any(side % winograd.SIDE for side in self.conv.window.output(*self.conv.image[:2]))

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        return [winograd.block(count, self.dtype.itemsize) for count in (self.channels, self.filters)]

    @cached_property
    def padded(self) -> list[int]:
        """C and O, each rounded up to a multiple of its block width."""
        counts = self.channels, self.filters
        return [-(-count // width) * width for count, (_, width) in zip(counts, self.blocks, strict=True)]

    @property
    def lanes(self) -> int:
        return registers()[0] // self.dtype.itemsize

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        size, lanes, (c, o) = self.conv.window.kernel[0], self.lanes, self.padded
        n, across = size + winograd.SIDE - 1, self.tiles[1]
        tall = -(-max(TILES, across) // 8) * 8  # `block` has at most 8 rows
        wide, rows = across * winograd.SIDE + size - 1, -(-self.channels // 8) * 8
        images = [(n, wide * self.channels + 2 * lanes), (n * self.size[1], c), (winograd.SIDE**2, o)]
        weights = [(n * n, rows, o), (n * n, self.filters, c)]
        return [*images, *weights, (tall, n * n * c + lanes), (tall, n * n * o + lanes)]

    def _tiles(self) -> winograd.Tiles:
        down, across = self.tiles
        memory = [self.backend.borrow(shape, self.dtype) for shape in self.shapes]
        return winograd.Tiles(down, across, max(1, TILES // across), self.lanes, *memory)

    def _filters(self, weight: Array, columns: int) -> Array:
        """Pad and flatten filters: (K, K, A, B) -> (K · K, A · columns)."""
        padded = self.backend.borrow((*weight.shape[:3], columns), self.dtype)
        padded[..., weight.shape[3] :] = 0
        padded[..., : weight.shape[3]] = weight
        return padded.reshape(len(weight) ** 2, -1)

    def _large(self, weight: Array) -> Array:
        """Return the bound for the sum of |x| below which nothing overflows, or NaN if a weight is NaN."""
        return self.dtype.type(LARGEST) / np.maximum(np.abs(weight).sum(), 1)

    def _pool(self, images: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
        y = self.backend.borrow((len(images), *self.pooled, self.filters))
        indices = self.backend.borrow(y.shape, self.pool.index_dtype)
        forward = winograd.forward(self.conv.window.kernel[0], *self.blocks[1])
        filters = self._filters(weight, self.padded[1])
        finite = forward(bits(images), self._large(weight), filters, bias, self._tiles(), bits(y), indices)
        return (y, indices) if finite else super()._pool(images, weight, bias)

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        nonzero = np.count_nonzero(bits(dy) != 0) if self.conv.activation == "relu" else dy.size
        if not self.divides or 2 * nonzero <= dy.size:
            direct = super().backward(dy, saved, x, weights, grads, need_dx=need_dx)
            if nonzero or not self.divides:
                return direct
            # also use Winograd's algorithm if all are zero, as during warm-up, so that both algorithms are compiled
        images, weight = saved[1] if len(saved) > 1 else x, self.backend._widened(weights[0])
        transposed = self._filters(weight.transpose(0, 1, 3, 2), self.padded[0])
        tiles, (weight_grad, bias_grad) = self._tiles(), grads
        grad = self.backend.borrow((len(transposed), tiles.weights.shape[1] * self.padded[1]), self.dtype)
        dx = self.backend.borrow(images.shape if need_dx else (0, *images.shape[1:]))
        backward = winograd.backward(self.conv.window.kernel[0], *self.blocks[1], *self.blocks[0])
        windows = len(images) * tiles.down, 2, tiles.across, 2, self.filters
        arrays = bits(dy.reshape(windows)), saved[0].reshape(windows), transposed, tiles, grad, bits(dx)
        if not backward(bits(images), self._large(weight), *arrays):
            return super().backward(dy, saved, x, weights, grads, need_dx=need_dx)
        grad = grad.reshape(*weight.shape[:2], *tiles.weights.shape[1:])
        weight_grad += grad[:, :, : self.channels, : self.filters]
        if bias_grad is not None:
            self.backend._add_column_sums(bias_grad, dy.reshape(-1, self.filters))
        return self.backend._within(dx, x.shape, self.conv.window) if need_dx else None
