"""Dense layers and convolutions with 3x3 filters in bfloat16 on AMX units, if the processor has them."""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import amx, amx_conv
from cupynet.backend.cpu.kernels.narrow import bits, is_bfloat16
from cupynet.backend.reference.conv import ConvOps
from cupynet.backend.window import Window

FRAME_PIXELS = 700  # images are convolved in groups of about this many pixels, which stay in the L2 cache


class AmxProducts(ConvOps):
    def _operand(self, a: Array) -> Array:
        return a if _in_amx(a) else super()._operand(a)

    def _gemm(self, left: Array, right: Array, out: Array) -> None:
        if not _in_amx(left, right):
            return super()._gemm(self._widened(left), self._widened(right), out)
        depth, width = _up(left.shape[1], amx.DEPTH), _up(right.shape[1], amx.SIDE)
        rows, factors = self.borrow((_up(len(left), amx.ROWS), depth)), self.borrow((depth, width))
        pairs, sums = self.borrow((depth // 2, width), np.int32), self.borrow((amx.ROWS, width), np.float32)
        for matrix, padded in ((left, rows), (right, factors)):
            amx.pad_rows(bits(matrix), bits(padded))
        amx.pair_rows(bits(factors), pairs)
        amx.product(bits(rows), pairs, sums, out)

    def _convolves_in_amx(self, x: Array, weight: Array, window: Window) -> bool:
        """Return True for bfloat16 images and 3x3 filters with stride 1, if channels and filters fill tiles."""
        simple = (window.kernel, window.stride, window.dilation) == ((3, 3), (1, 1), (1, 1))
        if not (_in_amx(x, weight) and simple) or max(map(max, window.padding)) > 2:
            return False
        outputs = window.output(*x.shape[1:3])  # the frames of smaller images are mostly padding
        return min(outputs) >= 3 and not any(count % amx.SIDE for count in weight.shape[2:])

    def _convolve_in_amx(self, x: Array, weight: Array, bias: Array | None, window: Window, y: Array) -> None:
        """Write the convolution to y. The weight may have any strides."""
        (channels, filters), group = weight.shape[2:], _group(x, window)
        layout, values, pixels = self._frame(x, window, group)
        starts, factors = self._steps(weight)
        steps = (np.arange(3)[:, None] * layout.row + starts).reshape(-1)
        pairs, sums = self.borrow((len(factors) // 2, filters), np.int32), self.borrow((pixels, filters), np.float32)
        amx.pair_rows(bits(factors), pairs)
        start = np.tile(np.zeros(filters, np.float32) if bias is None else bias.astype(np.float32), y.shape[2])
        arrays = values, steps, pairs, start, sums, channels
        amx_conv.convolve(_grouped(x, group), layout, *arrays, _grouped(y, group))

    def _gradients_in_amx(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, window: Window, *, need_dx: bool
    ) -> Array | None:
        """Add the gradient of the weight. Return dx (N, H, W, C), or None unless `need_dx`. dy and x are bfloat16."""
        self._add_gradient_in_amx(dy, x, weight_grad, window)
        if not need_dx:
            return None
        (top, below), (left, right) = window.padding
        full_padding = Window(window.kernel, padding=((2 - top, 2 - below), (2 - left, 2 - right)))
        dx = self.borrow(x.shape)
        self._convolve_in_amx(dy, weight[::-1, ::-1].transpose(0, 1, 3, 2), None, full_padding, dx)
        return dx

    def _steps(self, weight: Array) -> tuple[Array, Array]:
        """Return the starts of steps in a row of 3 C values, and the factors of the three rows, (96 · steps, O)."""
        length, filters = 3 * weight.shape[2], weight.shape[3]
        # the last step overlaps the previous one with zero factors; beyond the window, it might multiply NaN by zero
        starts, rest = np.minimum(np.arange(0, length, amx.DEPTH), length - amx.DEPTH), length % amx.DEPTH
        factors = self.borrow((3, len(starts) * amx.DEPTH, filters))
        rows = weight.reshape(3, length, filters)
        factors[:, : length - rest] = rows[:, : length - rest]
        factors[:, length - rest :] = 0
        if rest:
            factors[:, -rest:] = rows[:, -rest:]
        return starts, factors.reshape(-1, filters)

    def _add_gradient_in_amx(self, dy: Array, x: Array, weight_grad: Array, window: Window) -> None:
        (channels, filters), group = weight_grad.shape[2:], _group(x, window)
        layout, values, pixels = self._frame(x, window, group)
        width = layout.row // channels
        length = _up(pixels + 2 * width + 2, amx.SIDE)
        places = (np.arange(3)[:, None] * width + np.arange(3)).reshape(-1)
        starts = (places[:, None] + np.arange(0, channels, amx.SIDE) * length).reshape(-1)
        starts = np.pad(starts, (0, -starts.size % amx.TILES), "edge").reshape(-1, amx.TILES)
        columns, gradients = self.borrow((channels, length)), self.borrow((pixels, filters))
        pairs = self.borrow((pixels // 2, filters), np.int32)
        sums = self.borrow((starts.size * amx.SIDE, filters), np.float32)
        gradients[...] = sums[...] = 0
        arrays = values, bits(columns), starts, _grouped(dy, group), bits(gradients), pairs
        amx_conv.weight_gradient(_grouped(x, group), layout, *arrays, sums)
        weight_grad += sums[: 9 * channels].reshape(weight_grad.shape)

    def _frame(self, x: Array, window: Window, group: int) -> tuple[amx_conv.Layout, Array, int]:
        """Return the layout of a frame, a frame of zeros, and its number of pixels, rounded up to a multiple of 64."""
        (height, width), channels = window.padded(*x.shape[1:3]), x.shape[3]
        (top, _), (left, _) = window.padding
        layout = amx_conv.Layout((top * width + left) * channels, width * channels, height * width * channels)
        pixels = _up(group * height * width, amx.ROWS)
        beyond = 2 * width + 2 + amx.DEPTH  # pixels after the frame that the last tiles load
        values = self.borrow(((pixels + beyond) * channels,))
        values[...] = 0
        return layout, bits(values), pixels


def _in_amx(*operands: Array) -> bool:
    return all(map(is_bfloat16, operands)) and amx.available()


def _group(x: Array, window: Window) -> int:
    """Return the number of images in a frame, a divisor of the batch size."""
    height, width = window.padded(*x.shape[1:3])
    largest = max(FRAME_PIXELS // (height * width), 1)
    return max(count for count in range(1, largest + 1) if len(x) % count == 0)


def _grouped(images: Array, group: int) -> Array:
    n, height, width, channels = images.shape
    return bits(images.reshape(n // group, group, height, width * channels))


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
