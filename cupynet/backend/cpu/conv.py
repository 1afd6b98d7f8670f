"""Convolutions on the CPU: direct (`kernels/tiles.py`), with Winograd's algorithm, and on AMX units."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.amx_products import AmxProducts
from cupynet.backend.cpu.direct_conv import Passes, passes
from cupynet.backend.cpu.kernels import tiles, vectors
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.cpu.kernels.tiles import Frame, Sums
from cupynet.backend.cpu.tiling import tiling_of
from cupynet.backend.window import Window

WIDE = 2  # minimum vectors of channels per group; with fewer, copying groups costs more than Winograd's algorithm saves


class NumbaConv(AmxProducts):
    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, window: Window, *, groups: int = 1, relu: bool = False
    ) -> tuple[Array, Array]:
        window.check_weight(x.shape, weight.shape, groups)
        if _repeats(x, weight, groups):
            x, groups = self._repeated(x, weight), weight.shape[3]
        sums = self._passes(x, weight, window, groups)
        if sums is None:
            return super().conv2d(x, weight, bias, window, groups=groups, relu=relu)
        y = self.borrow((len(x), *window.output(*x.shape[1:3]), weight.shape[3]))
        if groups == 1 and self._convolves_in_amx(x, weight, window):
            self._convolve_in_amx(x, weight, bias, window, y)
        elif not (groups == 1 and self._transformed(x, weight, bias, window, y)):
            factors = weight if sums.forward.by_column else _by_group(weight, groups)
            self._convolve(sums.frame, sums.forward, x, factors, bias, y)
        return self.relu(y) if relu else y, None

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool, groups: int = 1, relu_y: Array | None = None,
    ) -> Array | None:  # fmt: skip
        arguments = weight, weight_grad, bias_grad, window
        if _repeats(x, weight, groups):
            options = {"need_dx": need_dx, "groups": weight.shape[3], "relu_y": relu_y}
            dx = self.conv2d_backward(dy, columns, self._repeated(x, weight), *arguments, **options)
            return None if dx is None else self._summed(dx, x.shape)
        sums = self._passes(x, weight, window, groups)
        if sums is None or columns is not None:
            return super().conv2d_backward(dy, columns, x, *arguments, need_dx=need_dx, groups=groups, relu_y=relu_y)
        self._relu_and_bias_backward(dy, relu_y, bias_grad)
        if groups == 1 and self._convolves_in_amx(x, weight, window):
            return self._gradients_in_amx(dy, x, weight, weight_grad, window, need_dx=need_dx)
        if groups == 1:
            dx = self._transformed_backward(dy, x, weight, weight_grad, window, need_dx=need_dx)
            if dx is not None:
                return dx if need_dx else None
        self._add_products(sums.frame, sums.weight_gradient, x, dy, weight_grad.reshape(-1)[:0], weight_grad[None])
        if not need_dx:
            return None
        return self._input_gradient(sums, dy, x, weight, groups)

    def _transformed(self, x: Array, weight: Array, bias: Array | None, window: Window, y: Array) -> bool:
        """Write the convolution to y with Winograd's algorithm. Return False if direct sums are faster or required."""
        tiling = tiling_of(x.shape[1:], weight.shape[3], window, self.policy.compute.itemsize)
        return tiling is not None and tiling.forward(self, x, self._widened(weight), bias, y)

    def _transformed_backward(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, window: Window, *, need_dx: bool
    ) -> Array | None:
        """Like `_transformed`. Return dx, which is empty unless `need_dx`, or None if direct sums are to be used."""
        tiling = tiling_of(x.shape[1:], weight.shape[3], window, self.policy.compute.itemsize)
        if tiling is None:
            return None
        dx = self.borrow(x.shape if need_dx else (0, *x.shape[1:]))
        return dx if tiling.backward(self, dy, x, self._widened(weight), weight_grad, dx) else None

    def _passes(self, x: Array, weight: Array, window: Window, groups: int) -> Passes | None:
        """Return the passes, or None if no window covers a pixel or it is faster to convolve each group separately."""
        itemsize, filters = self.policy.compute.itemsize, weight.shape[3] // groups
        if groups > 1 and weight.shape[2] >= WIDE * vectors.lanes(itemsize):
            image = *x.shape[1:3], weight.shape[2]
            if self._convolves_in_amx(x, weight[..., :filters], window) or tiling_of(image, filters, window, itemsize):
                return None
        return passes(x.shape[1:], weight.shape[3], window, itemsize, groups)

    def _input_gradient(self, sums: Passes, dy: Array, x: Array, weight: Array, groups: int) -> Array:
        dx, frame = self.borrow(x.shape), sums.frame._replace(size=0)
        if sums.forward.by_column:
            factors = weight.reshape(-1, weight.shape[3])[sums.places]
        else:
            by_group = _by_group(weight, groups)
            factors = self.borrow((len(sums.places), groups, by_group.shape[3], by_group.shape[2]))
            for i, place in enumerate(sums.places):
                factors[i] = by_group[:, place].transpose(0, 2, 1)
        self._convolve(frame, sums.input_gradient, dy, factors, None, dx)
        return dx

    def _convolve(self, frame: Frame, sums: Sums, x: Array, factors: Array, bias: Array | None, y: Array) -> None:
        """Compute sums of products of x and `factors`: for each part of `sums`, a row per entry of `sums.table`."""
        compute = self.policy.compute
        packed, start = self.borrow((factors.size,), compute), self.borrow(y.shape[-1:], compute)
        _, width, _ = tiles.tile(sums.columns, compute.itemsize)
        tiles.pack(bits(factors.reshape(-1, sums.columns)), len(sums.parts), width, packed)
        start[...] = 0 if bias is None else bias
        self._add_products(frame, sums, x, packed.reshape(1, 1, -1), start, y)

    def _add_products(self, frame: Frame, sums: Sums, x: Array, factors: Array, start: Array, y: Array) -> None:
        compute = self.policy.compute
        zeros = self.borrow((frame.size,), compute) if frame.size else start[:0]
        zeros[...] = 0
        products = tiles.products(*tiles.tile(sums.columns, compute.itemsize), int(sums.by_column))
        factors, y = (each.reshape(len(each), -1, each.shape[-1]) for each in (factors, y))
        products(bits(x.reshape(len(x), -1)), zeros, frame, sums, bits(factors), start, bits(y))

    def _repeated(self, x: Array, weight: Array) -> Array:
        """Repeat each channel once per filter: (N, H, W, C) -> (N, H, W, O)."""
        images = self.borrow((*x.shape[:3], weight.shape[3]))
        images.reshape(*x.shape, -1)[...] = x[..., None]
        return images

    def _summed(self, dx: Array, shape: tuple[int, ...]) -> Array:
        total = self.borrow(shape, self.policy.compute)
        parts = dx.reshape(*shape, -1)
        total[...] = parts[..., 0]
        for i in range(1, parts.shape[4]):  # faster than NumPy's sum over a short axis
            total += parts[..., i]
        return self._stored_copy(total)


def _by_group(weight: Array, groups: int) -> Array:
    """Return the filters of each group, a view of shape (groups, K_h·K_w, C / groups, O / groups)."""
    filters = weight.shape[3] // groups
    return weight.reshape(-1, weight.shape[2], groups, filters).transpose(2, 0, 1, 3)


def _repeats(x: Array, weight: Array, groups: int) -> bool:
    """Return True for a depthwise convolution with several filters per channel, which repeats the channels."""
    return bool(1 < groups == x.shape[3] < weight.shape[3])


def window_numbers(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the arguments that describe a window to compiled kernels: kernel size, stride, padding (top, left)."""
    (above, _), (left, _) = window.padding
    return window.kernel, window.stride, (above, left)
