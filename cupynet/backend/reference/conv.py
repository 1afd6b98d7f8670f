"""Convolutions as matrix products of im2col rows: the reference."""

from __future__ import annotations

import numpy as np

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.reference.dense import DenseOps
from cupynet.backend.window import Window


class ConvOps(DenseOps):
    """2-D cross-correlation, in groups or not, and its derivative."""

    def im2col(self, x: Array, window: Window) -> Array:
        """Return the windows of x as rows, in the compute precision: (N, H, W, C) -> (N·H'·W', K_h·K_w·C).

        Chellapilla et al. 2006.
        """
        shapes.windows("im2col", x.shape, window)
        n, height, width, channels = x.shape
        output, padded = window.output(height, width), self._surrounded(x, window, 0)
        columns = self.borrow((n * output[0] * output[1], window.places * channels), self.policy.compute)
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            windows[:, :, :, ky, kx] = padded[window.seen(ky, kx, output)]
        if padded is not x:
            self.give_back(padded)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Return the transpose of im2col, windows added back to their places: (N·H'·W', K_h·K_w·C) -> (N, H, W, C)."""
        shapes.windows("col2im", shape, window)
        n, height, width, channels = shape
        output = window.output(height, width)
        shapes.shape_of("col2im", "columns", columns, (n * output[0] * output[1], window.places * channels))
        padded = self.borrow((n, *window.padded(height, width), channels), self.policy.accumulate)
        padded[...] = 0
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            padded[window.seen(ky, kx, output)] += windows[:, :, :, ky, kx]
        return self._within(padded, shape, window)

    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, window: Window, *, groups: int = 1
    ) -> tuple[Array, Array]:
        """Cross-correlation: (N, H, W, C), (K_h, K_w, C, O), (O,) -> (N, H', W', O), and what the backward pass needs.

        With `groups`, channels and filters are divided into as many equal parts, and a filter sees the channels of its
        part only: the weight is (K_h, K_w, C / groups, O).

        Raises:
            ConfigError: the images have no room for a window, or other channels than the weight.
        """
        shapes.convolution("conv2d", x.shape, weight, window, groups)
        outputs = weight.shape[3]
        if groups > 1:
            y, kept = self._grouped(x, weight, window, groups)
            if bias is not None:
                self._add_bias(y.reshape(-1, outputs), bias)
            return y, kept
        columns = self.im2col(x, window)
        y = self.matmul(columns, weight.reshape(-1, outputs))  # (N·H'·W', O)
        if bias is not None:
            self._add_bias(y, bias)
        return y.reshape(x.shape[0], *window.output(*x.shape[1:3]), outputs), columns

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool, groups: int = 1,
    ) -> Array | None:  # fmt: skip
        """Add the gradients of weight and bias, return dx (N, H, W, C) or None.

        columns: the second result of `conv2d`.
        """
        shapes.convolution("conv2d_backward", x.shape, weight, window, groups)
        outputs = weight.shape[3]
        shapes.shape_of("conv2d_backward", "dy", dy, (x.shape[0], *window.output(*x.shape[1:3]), outputs))
        if groups > 1:
            shapes.alike("conv2d_backward", weight, weight_grad)
            if bias_grad is not None:
                self._add_column_sums(bias_grad, dy.reshape(-1, outputs))
            return self._grouped_backward(dy, columns, x, weight, weight_grad, window, groups, need_dx=need_dx)
        dy = dy.reshape(-1, outputs)  # (N·H'·W', O)
        self._add_product(weight_grad.reshape(-1, outputs), columns, dy)
        if bias_grad is not None:
            self._add_column_sums(bias_grad, dy)
        if not need_dx:
            return None
        dcolumns = self._product(dy, weight.reshape(-1, outputs), transpose_b=True)
        dx = self.col2im(dcolumns, x.shape, window)
        self.give_back(dcolumns)
        return dx

    # One product for each group: the channels of a group become images of their own, so that im2col gives a group
    # contiguous rows.

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> tuple[Array, Array]:
        """`conv2d` in groups, without a bias."""
        columns = self._columns_apart(x, window, groups)
        rows, each = len(columns) // groups, weight.shape[3] // groups
        parts = self.borrow((groups, rows, each))
        for g in range(groups):
            product = self.matmul(columns[g * rows : (g + 1) * rows], self._group(weight, g, each))
            parts[g] = product
            self.give_back(product)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), weight.shape[3]))
        y.reshape(rows, groups, each)[...] = parts.transpose(1, 0, 2)
        self.give_back(parts)
        return y, columns

    def _grouped_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *,
        need_dx: bool,
    ) -> Array | None:  # fmt: skip
        """`conv2d_backward` in groups, without a bias; columns: None if the forward pass made none."""
        made = None if columns is not None else self._columns_apart(x, window, groups)
        columns = columns if made is None else made
        rows, each = len(columns) // groups, weight.shape[3] // groups
        parts = self._apart(dy, groups)  # (G·N, H', W', O / G)
        of_group = parts.reshape(groups, rows, each)
        grad = self.borrow((columns.shape[1], each), self.policy.accumulate)  # the gradient of a group has gaps
        dcolumns = self.borrow(columns.shape, self.policy.compute) if need_dx else None
        for g in range(groups):
            own = slice(g * rows, (g + 1) * rows)
            grad[...] = 0
            self._add_product(grad, columns[own], of_group[g])
            self._group(weight_grad, g, each)[...] += grad
            if dcolumns is not None:
                product = self._product(of_group[g], self._group(weight, g, each), transpose_b=True)
                dcolumns[own] = product
                self.give_back(product)
        self.give_back(grad, parts, made)
        if dcolumns is None:
            return None
        n, height, width, channels = x.shape
        apart = self.col2im(dcolumns, (groups * n, height, width, channels // groups), window)
        dx = self.borrow(x.shape)
        places = n * height * width
        dx.reshape(places, groups, -1)[...] = apart.reshape(groups, places, -1).transpose(1, 0, 2)
        self.give_back(dcolumns, apart)
        return dx

    def _columns_apart(self, x: Array, window: Window, groups: int) -> Array:
        """Return the im2col rows of each group, one group after the other: (G·N·H'·W', K_h·K_w·C / G)."""
        apart = self._apart(x, groups)
        columns = self.im2col(apart, window)
        self.give_back(apart)
        return columns

    def _apart(self, x: Array, groups: int) -> Array:
        """Return the channels of each group as images of their own, borrowed: (N, H, W, C) -> (G·N, H, W, C / G)."""
        n, height, width, channels = x.shape
        apart, places = self.borrow((groups * n, height, width, channels // groups)), n * height * width
        apart.reshape(groups, places, -1)[...] = x.reshape(places, groups, -1).transpose(1, 0, 2)
        return apart

    @staticmethod
    def _group(weight: Array, group: int, filters: int) -> Array:
        """Return a group's part of a weight (K_h, K_w, C / G, O) as a strided matrix view: (K_h·K_w·C / G, O / G)."""
        return weight.reshape(-1, weight.shape[3])[:, group * filters : (group + 1) * filters]
