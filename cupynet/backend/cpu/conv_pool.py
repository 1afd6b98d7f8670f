"""Fused convolution and max pooling on the CPU.

`kernels/rows.py` skips zero gradients. Unlike separate operations, it therefore never computes 0 · NaN or 0 · infinity.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.cpu.kernels import outer, rows, windows
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.cpu.kernels.patches import Block, Passed, Patches
from cupynet.backend.fusion import Convolution, FusedPair, Weights
from cupynet.backend.window import Window

CACHE_LINE = 64  # bytes
SHORT_ROW = 16  # values in a row of a patch; shorter rows do not fill a vector
MAX_PIXELS = 9  # maximum number of pixels in a pooling window; their sums are held in registers


def fuse(backend: Backend, first: Convolution, pool: Window) -> FusedPair | None:
    """Return the fused pair, or None if the kernels do not support it, for example if pooling windows overlap."""
    if first.window.dilates or first.groups > 1 or pool.pads:
        return None  # kernels require rows of adjacent pixels, and pooling without padding
    disjoint = all(stride >= size for stride, size in zip(pool.stride, pool.kernel, strict=True))
    return ConvPool(backend, first, pool) if disjoint and 1 < pool.size <= MAX_PIXELS else None


class ConvPool(FusedPair):
    """Fused convolution and pooling for one image size."""

    def __init__(self, backend: Backend, first: Convolution, pool: Window) -> None:
        self.backend, self.conv, self.pool, self.filters = backend, first, pool, first.filters
        self.dtype = backend.policy.compute
        height, width, self.channels = first.image
        self.size = (*first.window.padded(height, width), self.channels)  # size of a padded image
        self.pooled = self.pool.output(*first.window.output(height, width))  # (H', W')

    @cached_property
    def patches(self) -> Patches:
        """Offsets of patches in an image. Computed on first use, because the tables are large for large images."""
        window, pool, step = self.conv.window, self.pool, self.size[1] * self.channels
        pool_stride = (window.stride[0] * pool.stride[0], window.stride[1] * pool.stride[1])
        corners, places = self._corners(self.pooled, pool_stride, step), self._corners(pool.kernel, window.stride, step)
        return Patches(corners, places, window.kernel[0], window.kernel[1] * self.channels, step)

    @cached_property
    def table(self) -> Array:
        """Offset of each value of a patch from its corner, (K_h·K_w·C,) int32."""
        start = np.arange(self.patches.height)[:, None] * self.patches.step
        return (start + np.arange(self.patches.row)).reshape(-1).astype(np.int32)

    def _corners(self, count: tuple[int, int], apart: tuple[int, int], step: int) -> Array:
        """Return the offsets of a grid of `count` patches, `apart` pixels apart. step: values per image row."""
        row, col = np.arange(count[0])[:, None] * apart[0] * step, np.arange(count[1]) * apart[1] * self.channels
        return (row + col).reshape(-1).astype(np.int32)

    def _padded(self, x: Array) -> Array:
        return self.backend._surrounded(x, self.conv.window, 0)

    # forward ---------------------------------------------------------------------------------------------------------

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """(N, H, W, C) -> (N, H', W', O). Saves the indices of the maxima, and the images if they are padded."""
        weight, bias = weights
        images, factors = self._padded(x), self.backend._widened(weight)
        offset = np.zeros(self.filters, self.dtype) if bias is None else bias.astype(self.dtype, copy=False)
        y, indices = self._pool(images, factors, offset)
        return y, (indices,) if images is x else (indices, images)

    def _pool(self, images: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
        """Return the pooled outputs (N, H', W', O) for padded images, and the indices of the maxima."""
        backend, n, pixels = self.backend, len(images), self.pool.size
        y = backend.borrow((n, *self.pooled, self.filters))
        indices = backend.borrow(y.shape, self.pool.index_dtype)
        blocks = windows.blocks(pixels, self.filters, self.dtype.itemsize)
        images, weight = images.reshape(n, self.size[0] * self.patches.step), weight.reshape(-1, self.filters)
        flat_y, flat_indices = (a.reshape(n, -1) for a in (bits(y), indices))
        for nan in (0, 1):  # the second kernel is compiled and run only if there may be a NaN
            forward = windows.conv_pool(pixels, *blocks, nan)
            if forward(bits(images), self.patches, self.table, weight, bias, flat_y, flat_indices):
                break
        return y, indices

    # backward --------------------------------------------------------------------------------------------------------

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        weight, (weight_grad, bias_grad), window = weights[0], grads, self.conv.window
        by_window = len(x), len(self.patches.corners), self.filters
        passed = Passed(bits(dy.reshape(by_window)), saved[0].reshape(by_window))
        images = saved[1] if len(saved) > 1 else x
        images = images.reshape(len(x), self.size[0] * self.patches.step)
        if self.patches.row < SHORT_ROW:
            wide = self.backend._widened(dy).reshape(by_window)
            self._short_rows(self.backend._widened(images), Passed(wide, passed.indices), weight_grad)
        else:
            self._add_weight_gradient(bits(images), passed, weight_grad)
        if bias_grad is not None:
            self.backend._add_column_sums(bias_grad, dy.reshape(-1, self.filters))
        if not need_dx:
            return None
        padded = self._input_gradient(passed, self.backend._widened(weight))
        return self.backend._within(padded, x.shape, window)

    def _add_weight_gradient(self, images: Array, passed: Passed, weight_grad: Array) -> None:
        """Add the gradient to weight_grad (K_h, K_w, C, O). images: (N, F), padded and flattened."""
        patches = self.patches
        grad = self.backend.borrow((self.filters * patches.height, patches.row), self.dtype)
        grad[...] = 0
        gradient = rows.weight_gradient(*rows.blocks(patches.row, grad.itemsize))
        gradient(images, patches, passed, grad)
        weight_grad += grad.reshape(self.filters, -1).T.reshape(weight_grad.shape)

    def _short_rows(self, images: Array, passed: Passed, weight_grad: Array) -> None:
        """Like `_add_weight_gradient`, but vectorized over the filters, for rows shorter than a vector."""
        grad = weight_grad.reshape(-1, self.filters)
        pixels, patch_height, row = self.pool.size, self.patches.height, self.patches.row
        for filter_at, filters, length, height in outer.blocks(self.filters, row, grad.itemsize):
            for value in range(0, row, length):
                values, rest = min(length, row - value), patch_height % height
                for line, lines, max_lines in ((0, patch_height - rest, height), (patch_height - rest, rest, rest)):
                    if lines:
                        block = Block(line, lines, value, filter_at)
                        gradient = outer.weight_gradient(pixels, max_lines, values, filters)
                        gradient(images, self.patches, passed, block, grad)

    def _input_gradient(self, passed: Passed, weight: Array) -> Array:
        backend, patches, n = self.backend, self.patches, passed.dy.shape[0]
        per_line = CACHE_LINE // weight.itemsize
        by_row = backend.borrow((patches.height, self.filters, -(-patches.row // per_line) * per_line), self.dtype)
        by_row[:, :, : patches.row] = weight.reshape(patches.height, patches.row, self.filters).transpose(0, 2, 1)
        dx = backend.borrow((n, *self.size))
        gradient = rows.input_gradient(*rows.blocks(patches.row, weight.itemsize))
        gradient(by_row, patches, passed, bits(dx.reshape(n, self.size[0] * patches.step)))
        return dx
