"""Fused convolution and 2x2 max pooling with Winograd's minimal filtering (`kernels/winograd.py`).

`ConvPool` is used instead if values are NaN or could overflow. The backward pass also uses it if a ReLU has zeroed so
many gradients that `ConvPool`, which skips zeros, is faster. Rounding may therefore differ between batches.
"""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.cpu import conv_pool
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.cpu.tiling import Tiling, tiling_of
from cupynet.backend.fusion import Convolution, FusedPair, Weights
from cupynet.backend.window import Window

SPARSE = 1.3  # usual time per product of `ConvPool`, relative to Winograd's algorithm including transforms


def fuse(backend: Backend, first: Convolution, pool: Window) -> FusedPair | None:
    """Return the fastest fused pair for these layers, or None if they cannot be fused."""
    pair = conv_pool.fuse(backend, first, pool)
    if pair is None or not pool.kernel == pool.stride == (2, 2):
        return pair
    (height, width, channels), window = first.image, first.window
    padded, itemsize = (*window.padded(height, width), channels), backend.policy.compute.itemsize
    tiling = tiling_of(padded, first.filters, Window(window.kernel, window.stride), itemsize, pools=True)
    return pair if tiling is None else WinogradPool(backend, first, pool, tiling)


class WinogradPool(conv_pool.ConvPool):
    """Like `ConvPool`. If pixels of a window are equal, rounding may decide which one is the maximum."""

    def __init__(self, backend: Backend, first: Convolution, pool: Window, tiling: Tiling) -> None:
        super().__init__(backend, first, pool)
        self.tiling = tiling

    def _pool(self, images: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
        y = self.backend.borrow((len(images), *self.pooled, self.filters))
        indices = self.backend.borrow(y.shape, self.pool.index_dtype)
        finite = self.tiling.forward(self.backend, images, weight, bias, y, indices)
        return (y, indices) if finite else super()._pool(images, weight, bias)

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        nonzero = np.count_nonzero(bits(dy) != 0) if self.conv.activation == "relu" else dy.size
        # `ConvPool` computes a product for each nonzero gradient; without pooling there would be four times as many
        if SPARSE * nonzero <= 4 * self.tiling.products * dy.size:
            direct = super().backward(dy, saved, x, weights, grads, need_dx=need_dx)
            if nonzero:
                return direct
            # also use Winograd's algorithm if all are zero, as during warm-up, so that both algorithms are compiled
        images, weight, (weight_grad, bias_grad) = saved[-1] if len(saved) > 1 else x, weights[0], grads
        dx = self.backend.borrow(images.shape if need_dx else (0, *images.shape[1:]))
        arrays = images, self.backend._widened(weight), weight_grad, dx, saved[0]
        if not self.tiling.backward(self.backend, dy, *arrays):
            return super().backward(dy, saved, x, weights, grads, need_dx=need_dx)
        if bias_grad is not None:
            self.backend._add_column_sums(bias_grad, dy.reshape(-1, self.filters))
        return self.backend._within(dx, x.shape, self.conv.window) if need_dx else None
