"""Convolutions on the CPU: without im2col if a kernel takes them."""

from __future__ import annotations

import numpy as np

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.cpu.dense import NumbaDense
from cupynet.backend.cpu.device import window_numbers
from cupynet.backend.cpu.direct_conv import DirectConvolution, passes
from cupynet.backend.cpu.kernels import depthwise
from cupynet.backend.reference.conv import ConvOps
from cupynet.backend.window import Window
from cupynet.core.errors import ConfigError


class NumbaConv(NumbaDense, ConvOps):
    """See `ConvOps`."""

    def _direct(self, x: Array, weight: Array, window: Window) -> DirectConvolution | None:
        """Return the convolution without im2col; None if the reference must compute it."""
        if x.ndim != 4 or weight.ndim != 4 or not self._stores(x, weight):
            return None
        known = passes((x.shape[1], x.shape[2], x.shape[3]), weight.shape[3], window, x.itemsize)
        return None if known is None else DirectConvolution(self, known)

    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, window: Window, *, groups: int = 1
    ) -> tuple[Array, Array]:
        shapes.convolution("conv2d", x.shape, weight, window, groups)
        convolution = self._direct(x, weight, window) if groups == 1 else None
        if convolution is None:
            return super().conv2d(x, weight, bias, window, groups=groups)
        if bias is not None:
            shapes.shape_of("conv2d", "the bias", bias, weight.shape[3:])
        y = self.borrow((len(x), *window.output(*x.shape[1:3]), weight.shape[3]))
        convolution.forward(x, weight, bias, y)
        return y, None

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool, groups: int = 1,
    ) -> Array | None:  # fmt: skip
        shapes.convolution("conv2d_backward", x.shape, weight, window, groups)
        convolution = self._direct(x, weight, window) if groups == 1 and columns is None else None
        if convolution is None:
            given = dy, columns, x, weight, weight_grad, bias_grad, window
            return super().conv2d_backward(*given, need_dx=need_dx, groups=groups)
        filters = weight.shape[3]
        shapes.shape_of("conv2d_backward", "dy", dy, (len(x), *window.output(*x.shape[1:3]), filters))
        shapes.alike("conv2d_backward", weight, weight_grad)
        if not self._compiles(weight, weight_grad):
            raise ConfigError(f"conv2d_backward: the weight's gradient must be contiguous, in {weight.dtype}")
        dy = np.ascontiguousarray(dy, x.dtype)
        convolution.add_weight_gradient(x, dy, weight_grad)
        if bias_grad is not None:
            self._add_column_sums(bias_grad, dy.reshape(-1, filters))
        if not need_dx:
            return None
        dx = self.borrow(x.shape)
        convolution.input_gradient(dy, weight, dx)
        return dx

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> Array:
        if weight.shape[2] > 1 or not self._stores(x, weight):
            return super()._grouped(x, weight, window, groups)
        filters = weight.reshape(*window.kernel, -1)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), filters.shape[2]))
        depthwise.forward(x, filters, y, *window_numbers(window)[1:], window.dilation, filters.shape[2] // groups)
        return y

    def _grouped_backward(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *, need_dx: bool
    ) -> Array | None:
        if weight.shape[2] > 1 or not self._stores(dy, x, weight) or not self._compiles(dy, weight_grad):
            return super()._grouped_backward(dy, x, weight, weight_grad, window, groups, need_dx=need_dx)
        filters, grad = (a.reshape(*window.kernel, -1) for a in (weight, weight_grad))
        moves = (*window_numbers(window)[1:], window.dilation, filters.shape[2] // groups)
        depthwise.weight_gradient(x, dy, grad, *moves)
        if not need_dx:
            return None
        dx = self.borrow(x.shape)
        depthwise.input_gradient(dy, filters, dx, *moves)
        return dx
