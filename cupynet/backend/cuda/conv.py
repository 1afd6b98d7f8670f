"""Convolutions on the GPU: im2col with cuBLAS, and depthwise kernels."""

from __future__ import annotations

import math

from cupynet.backend.array import Array
from cupynet.backend.cuda.dense import MAX_PARTS, CudaDense
from cupynet.backend.reference.conv import ConvOps
from cupynet.backend.window import Window


class CudaConv(CudaDense, ConvOps):
    def im2col(self, x: Array, window: Window) -> Array:
        n, height, width, channels = x.shape
        output = window.output(height, width)
        columns = self.borrow((n * output[0] * output[1], window.size * channels))
        threads = math.prod(output) * window.kernel[1] * channels // self._channels_at_once(channels)
        sizes = (*self._geometry(x.shape, window), *window.dilation)
        self.kernels.images(f"im2col_{self._kind}", n, threads, x, columns, *sizes)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        n, height, width, channels = shape
        x = self.borrow(shape)
        sizes = (*self._geometry(shape, window), *window.dilation)
        dense = window.stride == window.dilation == (1, 1)
        threads = height * width * channels // (self._channels_at_once(channels, 4) if dense else 1)
        self.kernels.images(f"col2im_{self._kind}", n, threads, columns, x, *sizes)
        return x

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> Array:
        if weight.shape[2] > 1:
            return super()._grouped(x, weight, window, groups)
        n, filters = len(x), weight.shape[3]
        y = self.borrow((n, *window.output(*x.shape[1:3]), filters))
        sizes = (*self._geometry(x.shape, window), *window.dilation, filters // groups)
        self.kernels.images(f"depthwise_{self._kind}", n, y.size // max(n, 1), x, weight, y, *sizes)
        return y

    def _grouped_backward(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *, need_dx: bool
    ) -> Array | None:
        if weight.shape[2] > 1:
            return super()._grouped_backward(dy, x, weight, weight_grad, window, groups, need_dx=need_dx)
        n, height, width, channels = x.shape
        sizes = (*self._geometry(x.shape, window), *window.dilation, weight.shape[3] // groups)
        parts = max(1, min(n * window.output(height, width)[0], MAX_PARTS))
        sums = self.borrow((parts, weight.size), self.policy.accumulate)
        self.kernels.images(f"depthwise_weight_{self._kind}", parts, weight.size, x, dy, sums, *sizes, parts)
        self._column_sums(self._wide, sums, weight_grad.reshape(-1), parts, 1, add=True)
        del sums
        if not need_dx:
            return None
        dx, values = self.borrow(x.shape), height * width * channels
        self.kernels.images(f"depthwise_input_{self._kind}", n, values, dy, weight, dx, *sizes)
        return dx
