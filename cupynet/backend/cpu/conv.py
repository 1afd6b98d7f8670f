"""Convolutions on the CPU: direct (`kernels/tiles.py`), with Winograd's algorithm, on AMX units, and depthwise."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.amx_products import AmxProducts
from cupynet.backend.cpu.direct_conv import Passes, passes
from cupynet.backend.cpu.kernels import depthwise, tiles
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.cpu.kernels.tiles import Frame, Sums
from cupynet.backend.cpu.winograd_conv import saves_products
from cupynet.backend.fusion import Convolution
from cupynet.backend.window import Window


class NumbaConv(AmxProducts):
    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, window: Window, *, groups: int = 1, relu: bool = False
    ) -> tuple[Array, Array]:
        window.check_weight(x.shape, weight.shape, groups)
        sums = passes(x.shape[1:], weight.shape[3], window, self.policy.compute.itemsize) if groups == 1 else None
        if sums is None:
            return super().conv2d(x, weight, bias, window, groups=groups, relu=relu)
        y = self.borrow((len(x), *window.output(*x.shape[1:3]), weight.shape[3]))
        if self._has_tiles(x, weight, window):
            self._multiply_tiles(x, weight, bias, window, y)
        else:
            self._convolve(sums.frame, sums.forward, x, weight.reshape(-1, weight.shape[3]), bias, y)
        return self.relu(y) if relu else y, None

    def saved_values(self, conv: Convolution) -> int:
        return 0

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool, groups: int = 1, relu_y: Array | None = None,
    ) -> Array | None:  # fmt: skip
        sums = passes(x.shape[1:], weight.shape[3], window, self.policy.compute.itemsize) if groups == 1 else None
        if sums is None or columns is not None:
            arguments = dy, columns, x, weight, weight_grad, bias_grad, window
            return super().conv2d_backward(*arguments, need_dx=need_dx, groups=groups, relu_y=relu_y)
        self._relu_and_bias_backward(dy, relu_y, bias_grad)
        tiled = self._has_tiles(x, weight, window)
        if tiled:
            self._add_tiles_gradient(dy, x, weight_grad, window)
        else:
            self._add_products(sums.frame, sums.weight_gradient, x, dy, weight_grad.reshape(-1)[:0], weight_grad[None])
        if not need_dx:
            return None
        size = x.shape[1:3]
        if tiled and saves_products(size, tuple(map(min, size, dy.shape[1:3]))):  # without padding dx is larger than dy
            return self._tiles_gradient(dy, x, weight, window)
        return self._input_gradient(sums, dy, x, weight)

    def _input_gradient(self, sums: Passes, dy: Array, x: Array, weight: Array) -> Array:
        places, (channels, filters) = sums.places, weight.shape[2:]
        transposed = self.borrow((len(places), filters, channels))
        for i, place in enumerate(places):
            transposed[i] = weight.reshape(-1, channels, filters)[place].T
        dx = self.borrow(x.shape)
        frame = sums.frame._replace(size=0)
        self._convolve(frame, sums.input_gradient, dy, transposed.reshape(-1, channels), None, dx)
        return dx

    def _convolve(self, frame: Frame, sums: Sums, x: Array, factors: Array, bias: Array | None, y: Array) -> None:
        """Compute sums of products of x and `factors` (rows, columns), which has one row per entry of `sums.table`."""
        columns = factors.shape[1]
        compute = self.policy.compute
        packed, start = self.borrow((factors.size,), compute), self.borrow((columns,), compute)
        _, width, _ = tiles.tile(columns, compute.itemsize)
        tiles.pack(bits(factors), sums.parts, width, packed)
        start[...] = 0 if bias is None else bias
        self._add_products(frame, sums, x, packed.reshape(1, 1, -1), start, y)

    def _add_products(self, frame: Frame, sums: Sums, x: Array, factors: Array, start: Array, y: Array) -> None:
        columns = y.shape[-1]
        compute = self.policy.compute
        zeros = self.borrow((frame.size,), compute) if frame.size else start[:0]
        zeros[...] = 0
        products = tiles.products(*tiles.tile(columns, compute.itemsize))
        factors = factors.reshape(len(factors), -1, factors.shape[-1])
        y = y.reshape(len(y), -1, columns)
        products(bits(x.reshape(len(x), -1)), zeros, frame, sums, bits(factors), start, bits(y))

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> Array:
        if weight.shape[2] > 1:
            return super()._grouped(x, weight, window, groups)
        filters, images = bits(weight.reshape(*window.kernel, -1)), bits(_each_filters(x, weight))
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), filters.shape[2]))
        depthwise.forward(images, filters, bits(y), *window_numbers(window)[1:], window.dilation)
        return y

    def _grouped_backward(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *, need_dx: bool
    ) -> Array | None:
        if weight.shape[2] > 1:
            return super()._grouped_backward(dy, x, weight, weight_grad, window, groups, need_dx=need_dx)
        filters, grad = (bits(a.reshape(*window.kernel, -1)) for a in (weight, weight_grad))
        gradients = bits(dy)
        geometry = (*window_numbers(window)[1:], window.dilation)
        depthwise.weight_gradient(bits(_each_filters(x, weight)), gradients, grad, *geometry)
        if not need_dx:
            return None
        multiplied = weight.shape[3] > x.shape[3]
        dx = self.borrow((*x.shape[:3], weight.shape[3]), self.policy.compute if multiplied else None)
        depthwise.input_gradient(gradients, filters, bits(dx), *geometry)
        if not multiplied:
            return dx
        summed = self.borrow(x.shape, self.policy.compute)
        dx.reshape(*x.shape, -1).sum(axis=4, out=summed)
        return self._stored_copy(summed)


def _each_filters(x: Array, weight: Array) -> Array:
    """Repeat each channel once per filter in a depthwise convolution: (N, H, W, C) -> (N, H, W, O)."""
    repeats = weight.shape[3] // x.shape[3]
    return x if repeats == 1 else x.repeat(repeats, axis=3)


def window_numbers(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the arguments that describe a window to compiled kernels: kernel size, stride, padding (top, left)."""
    (above, _), (left, _) = window.padding
    return window.kernel, window.stride, (above, left)
