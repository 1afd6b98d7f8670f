"""Convolution and the max-pool behind it as one operation on the CPU.

Forward: one pooling window after the other, its pixels computed in registers and only the largest written
(`kernels/windows.py`). The bias is added after the pool: the largest of x + b is the largest of x, plus b. Backward:
through the pool's winners only (`kernels/rows.py`; `kernels/outer.py` for patches with short rows). There are no im2col
rows, and the convolution itself never exists in memory.

Where an image holds NaN or infinity one thing differs from the two operations: `rows` leaves out gradients that are
zero, so that zero times NaN is not added to the gradient of a filter. (`outer` multiplies by zero, as they do.)
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.cpu.kernels import dense as dense_kernels
from cupynet.backend.cpu.kernels import outer, rows, windows
from cupynet.backend.cpu.kernels.patches import Block, Passed, Patches
from cupynet.backend.fusion import Convolution, FusedPair, MaxPool, Weights
from cupynet.core.errors import ConfigError

CACHE_LINE = 64  # bytes
SHORT_ROW = 16  # values: a patch's row below this fills no vector
MOST_PIXELS = 9  # of a pooling window: their sums are in registers at the same time


def fuse(backend: Backend, first: Convolution, second: MaxPool) -> FusedPair | None:
    """The two as one, if the pool's windows are small and do not overlap: then each pixel is computed once."""
    pool, (height, width, channels) = second.window, first.image
    if math.prod(first.window.padded(height, width)) * channels >= 1 << 31:
        return None  # the kernels number the values of an image in 32 bits
    if first.window.dilates or first.groups > 1 or pool.pads:
        return None  # they read rows of neighbours, all channels of them, and nothing around what is pooled
    apart = all(stride >= size for stride, size in zip(pool.stride, pool.kernel, strict=True))
    return ConvPool(backend, first, second) if apart and 1 < pool.places <= MOST_PIXELS else None


class ConvPool(FusedPair):
    """One convolution and its pool, for one size of image; P: its pooling windows.

    Args:
        backend: lends the buffers. Kernels compute in its compute precision, on copies where it stores another.
        first, second: the two operations; windows of the pool do not overlap.
    """

    def __init__(self, backend: Backend, first: Convolution, second: MaxPool) -> None:
        self.backend, self.conv, self.pool, self.filters = backend, first, second.window, first.filters
        self.dtype = backend.policy.compute
        height, width, self.channels = first.image
        self.size = (*first.window.padded(height, width), self.channels)  # of a padded image
        self.pooled = self.pool.output(*first.window.output(height, width))  # (H', W')

    @cached_property
    def patches(self) -> Patches:
        """Where patches lie in an image; made when it is first needed, as it is large where images are."""
        window, pool, step = self.conv.window, self.pool, self.size[1] * self.channels
        apart = (window.stride[0] * pool.stride[0], window.stride[1] * pool.stride[1])
        corners, places = self._corners(self.pooled, apart, step), self._corners(pool.kernel, window.stride, step)
        return Patches(corners, places, window.kernel[0], window.kernel[1] * self.channels, step)

    @cached_property
    def table(self) -> Array:
        """Where the values of a patch lie from its corner on, (K_h·K_w·C,) int32."""
        start = np.arange(self.patches.height)[:, None] * self.patches.step
        return (start + np.arange(self.patches.row)).reshape(-1).astype(np.int32)

    def _corners(self, count: tuple[int, int], apart: tuple[int, int], step: int) -> Array:
        """Where `count` patches (down, across), `apart` pixels apart, begin in an image of `step` values a row."""
        row, col = np.arange(count[0])[:, None] * apart[0] * step, np.arange(count[1]) * apart[1] * self.channels
        return (row + col).reshape(-1).astype(np.int32)

    # what compiled code may be given ---------------------------------------------------------------------------------

    def _check(self, x: Array, weight: Array, bias: Array | None) -> None:
        """Refuse arrays that the kernels would read beyond the end of."""
        name = "conv2d and max_pool2d"
        shapes.shape_of(name, "the batch of images", x, (len(x), *self.conv.image))
        shapes.shape_of(name, "the weight", weight, (*self.conv.window.kernel, self.channels, self.filters))
        if bias is not None:
            shapes.shape_of(name, "the bias", bias, (self.filters,))

    def _read(self, a: Array) -> Array:
        """`a` as kernels read it, contiguous and in their precision: itself, or a borrowed copy."""
        if a.dtype == self.dtype and a.flags.c_contiguous:
            return a
        copy = self.backend.borrow(a.shape, self.dtype)
        copy[...] = a
        return copy

    def _drop(self, read: Array, original: Array) -> None:
        """Give back what `_read` copied."""
        if read is not original:
            self.backend.give_back(read)

    def _stored(self, a: Array) -> Array:
        """The borrowed `a` in the storage precision, borrowed."""
        storage = self.backend.policy.storage
        if a.dtype == storage:
            return a
        stored = self.backend.borrow(a.shape, storage)
        stored[...] = a
        self.backend.give_back(a)
        return stored

    def _padded(self, x: Array) -> Array:
        """x with its zeros around it, as kernels read it."""
        window = self.conv.window
        if not window.pads:
            return self._read(x)
        padded = self.backend.borrow((len(x), *self.size), self.dtype)
        padded[...] = 0
        padded[window.inside(*self.conv.image[:2])] = x
        return padded

    # forward ---------------------------------------------------------------------------------------------------------

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """(N, H, W, C) -> (N, H', W', O); saved are the winners, and the images where they are not x itself."""
        weight, bias = weights
        self._check(x, weight, bias)
        images, factors = self._padded(x), self._read(weight)
        offset = self._zeros() if bias is None else self._read(bias)
        y, winners = self._pool(images, factors, offset)
        self._drop(factors, weight)
        self._drop(offset, bias)
        return self._stored(y), (winners,) if images is x else (winners, images)

    def _zeros(self) -> Array:
        zeros = self.backend.borrow((self.filters,), self.dtype)
        zeros[...] = 0
        return zeros

    def _pool(self, images: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
        """Padded images -> pooled (N, H', W', O) and winners."""
        backend, n, pixels = self.backend, len(images), self.pool.places
        y = backend.borrow((n, *self.pooled, self.filters), self.dtype)
        winners = backend.borrow(y.shape, backend.winner_dtype(self.pool))
        blocks, by_window = (
            windows.blocks(pixels, self.filters, y.itemsize),
            (n, len(self.patches.corners), self.filters),
        )
        images, weight = images.reshape(n, self.size[0] * self.patches.step), weight.reshape(-1, self.filters)
        for nan in (0, 1):  # the second is compiled and run only where the first has seen that there may be a NaN
            forward = windows.conv_pool(pixels, *blocks, nan)
            if forward(
                images, self.patches, self.table, weight, bias, y.reshape(by_window), winners.reshape(by_window)
            ):
                break
        return y, winners

    # backward --------------------------------------------------------------------------------------------------------

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        (weight, bias), (weight_grad, bias_grad) = weights, grads
        self._check(x, weight, bias)
        shapes.shape_of("conv2d and max_pool2d", "dy", dy, (len(x), *self.pooled, self.filters))
        shapes.alike("conv2d and max_pool2d", dy, saved[0])
        wide, by_window = self._read(dy), (len(x), len(self.patches.corners), self.filters)
        passed = Passed(wide.reshape(by_window), saved[0].reshape(by_window))
        images = saved[1] if len(saved) > 1 else x
        self._add_weight_gradient(images.reshape(len(x), self.size[0] * self.patches.step), passed, weight, weight_grad)
        if bias_grad is not None:
            shapes.shape_of("conv2d and max_pool2d", "the bias's gradient", bias_grad, (self.filters,))
            dense_kernels.add_column_sums(wide.reshape(-1, self.filters), bias_grad)
        dx = None
        if need_dx:
            factors = self._read(weight)
            dx = self._stored(self._input_gradient(passed, factors))
            self._drop(factors, weight)
        self._drop(wide, dy)
        return dx

    def _add_weight_gradient(self, images: Array, passed: Passed, weight: Array, weight_grad: Array | None) -> None:
        """Adds to weight_grad (K_h, K_w, C, O); images padded, (N, F)."""
        if weight_grad is None or weight_grad.dtype != self.dtype or not weight_grad.flags.c_contiguous:
            raise ConfigError(f"conv2d and max_pool2d: the weight's gradient must be contiguous, in {self.dtype}")
        shapes.alike("conv2d and max_pool2d", weight, weight_grad)
        patches = self.patches
        if patches.row < SHORT_ROW:
            self._short_rows(images, passed, weight_grad.reshape(-1, self.filters))
            return
        grad = self.backend.borrow((self.filters * patches.height, patches.row), self.dtype)
        grad[...] = 0
        gradient = rows.weight_gradient(*rows.blocks(patches.row, grad.itemsize))
        gradient(images, patches, passed, grad)
        weight_grad += grad.reshape(self.filters, -1).T.reshape(weight_grad.shape)
        self.backend.give_back(grad)

    def _short_rows(self, images: Array, passed: Passed, grad: Array) -> None:
        """The same where rows are shorter than a vector: the vectors lie along the filters. grad (K_h·K_w·C, O)."""
        pixels, tall, row = self.pool.places, self.patches.height, self.patches.row
        for filter_at, filters, length, height in outer.blocks(self.filters, row, grad.itemsize):
            for value in range(0, row, length):
                values, rest = min(length, row - value), tall % height
                for line, lines, most in ((0, tall - rest, height), (tall - rest, rest, rest)):
                    if lines:
                        block = Block(line, lines, value, filter_at)
                        gradient = outer.weight_gradient(pixels, most, values, filters)
                        gradient(images, self.patches, passed, block, grad)

    def _input_gradient(self, passed: Passed, weight: Array) -> Array:
        """dx (N, H, W, C), borrowed."""
        backend, patches, n = self.backend, self.patches, passed.dy.shape[0]
        per_line = CACHE_LINE // weight.itemsize
        by_row = backend.borrow((patches.height, self.filters, -(-patches.row // per_line) * per_line), self.dtype)
        by_row[:, :, : patches.row] = weight.reshape(patches.height, patches.row, self.filters).transpose(0, 2, 1)
        dx = backend.borrow((n, *self.size), self.dtype)
        gradient = rows.input_gradient(*rows.blocks(patches.row, weight.itemsize))
        gradient(by_row, patches, passed, dx.reshape(n, self.size[0] * patches.step))
        backend.give_back(by_row)
        if not self.conv.window.pads:
            return dx
        inner = backend.borrow((n, *self.conv.image), self.dtype)
        inner[...] = dx[self.conv.window.inside(*self.conv.image[:2])]
        backend.give_back(dx)
        return inner
