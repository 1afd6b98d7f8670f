from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.fusion import Convolution, FusedPair
from cupynet.backend.reference.dense import DenseOps
from cupynet.backend.window import Window


class ConvOps(DenseOps):
    """2-D cross-correlation and its gradients, as matrix products of im2col rows."""

    def im2col(self, x: Array, window: Window) -> Array:
        """Return windows as rows in compute precision (Chellapilla 2006): (N, H, W, C) -> (N·H'·W', K_h·K_w·C)."""
        n, height, width, channels = x.shape
        output, padded = window.output(height, width), self._surrounded(x, window, 0)
        columns = self.borrow((n * output[0] * output[1], window.size * channels), self.policy.compute)
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            windows[:, :, :, ky, kx] = padded[window.slices(ky, kx, output)]
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Add windows to images, the transpose of im2col: (N·H'·W', K_h·K_w·C) -> (N, H, W, C)."""
        n, height, width, channels = shape
        output = window.output(height, width)
        padded = self.borrow((n, *window.padded(height, width), channels), self.policy.accumulate)
        padded[...] = 0
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            padded[window.slices(ky, kx, output)] += windows[:, :, :, ky, kx]
        return self._within(padded, shape, window)

    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, window: Window, *, groups: int = 1, relu: bool = False
    ) -> tuple[Array, Array]:
        """Cross-correlate: (N, H, W, C), (K_h, K_w, C, O), (O,) -> (N, H', W', O), and saved im2col rows or None.

        With `relu`, a ReLU follows. With `groups`, a filter uses only the channels of its group, and the weight is
        (K_h, K_w, C / groups, O).
        """
        window.check_weight(x.shape, weight.shape, groups)
        outputs = weight.shape[3]
        if groups > 1:
            y = self._grouped(x, weight, window, groups)
            self._add_bias(y.reshape(-1, outputs), bias, relu=relu)
            return y, None
        columns = self.im2col(x, window)
        y = self.matmul(columns, weight.reshape(-1, outputs))  # (N·H'·W', O)
        self._add_bias(y, bias, relu=relu)
        return y.reshape(x.shape[0], *window.output(*x.shape[1:3]), outputs), columns

    def fused_pair(self, first: Convolution, pool: Window) -> FusedPair | None:
        """Return a convolution fused with the max pooling that follows it, or None if they cannot be fused."""
        return None

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool, groups: int = 1, relu_y: Array | None = None,
    ) -> Array | None:  # fmt: skip
        """Add the gradients of weight and bias. Return dx (N, H, W, C) or None.

        columns: from `conv2d`, or None to recompute them. relu_y: see `dense_backward`.
        """
        outputs = weight.shape[3]
        self._relu_and_bias_backward(dy, relu_y, bias_grad)
        if groups > 1:
            return self._grouped_backward(dy, x, weight, weight_grad, window, groups, need_dx=need_dx)
        rows = self.im2col(x, window) if columns is None else columns
        dy = dy.reshape(-1, outputs)  # (N·H'·W', O)
        self._add_product(weight_grad.reshape(-1, outputs), rows, dy)
        del rows
        return self._images_gradient(dy, x.shape, weight, window) if need_dx else None

    def _images_gradient(self, dy: Array, shape: tuple[int, ...], weight: Array, window: Window) -> Array:
        dcolumns = self._product(dy, weight.reshape(-1, weight.shape[3]), transpose_b=True)
        return self.col2im(dcolumns, shape, window)

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> Array:
        y = self.borrow((len(x), *window.output(*x.shape[1:3]), weight.shape[3]))
        for channels, filters in _parts(x, weight, groups):
            images, group_weight = self._copy(x[..., channels]), self._copy(weight[..., filters])
            y[..., filters] = self.conv2d(images, group_weight, None, window)[0]
            del images, group_weight
        return y

    def _grouped_backward(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *, need_dx: bool
    ) -> Array | None:
        dx = self.borrow(x.shape) if need_dx else None
        for channels, filters in _parts(x, weight, groups):
            gradient, images, group_weight = (
                self._copy(a) for a in (dy[..., filters], x[..., channels], weight[..., filters])
            )
            grad = self.borrow(group_weight.shape, self.policy.accumulate)
            grad[...] = 0
            group_dx = self.conv2d_backward(gradient, None, images, group_weight, grad, None, window, need_dx=need_dx)
            weight_grad[..., filters] += grad
            if dx is not None:
                dx[..., channels] = group_dx
            del gradient, images, group_weight, grad, group_dx
        return dx

    def _copy(self, view: Array) -> Array:
        copy = self.borrow(view.shape, view.dtype)
        copy[...] = view
        return copy


def _parts(x: Array, weight: Array, groups: int) -> list[tuple[slice, slice]]:
    channels, filters = x.shape[3] // groups, weight.shape[3] // groups
    return [(slice(g * channels, (g + 1) * channels), slice(g * filters, (g + 1) * filters)) for g in range(groups)]
