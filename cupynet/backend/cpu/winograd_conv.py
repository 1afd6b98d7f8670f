"""Convolutions with 3x3 filters and stride 1 on the CPU, using Winograd's algorithm (`kernels/winograd.py`)."""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import vectors, winograd
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.reference.conv import ConvOps
from cupynet.backend.window import Window


class WinogradConv(ConvOps):
    def _has_tiles(self, x: Array, weight: Array, window: Window) -> bool:
        """Return True for 3x3 filters with stride 1, if channels and filters fill vectors and tiles pay off."""
        lanes = vectors.lanes(self.policy.compute.itemsize)
        simple = (window.kernel, window.stride, window.dilation) == ((3, 3), (1, 1), (1, 1))
        if not simple or max(map(max, window.padding)) > 2 or any(count % lanes for count in weight.shape[2:]):
            return False
        output = window.output(*x.shape[1:3])
        return saves_products(output, output)

    def _multiply_tiles(self, x: Array, weight: Array, bias: Array | None, window: Window, y: Array) -> None:
        """Write the convolution to y. The weight may have any strides."""
        compute, (channels, filters) = self.policy.compute, weight.shape[2:]
        u, filters_by_pixel = (self.borrow((places, channels * filters), compute) for places in (winograd.VALUES, 9))
        filters_by_pixel.reshape(weight.shape)[...] = weight
        self._gemm(winograd.FILTER.astype(compute), filters_by_pixel, u)
        offset = np.array([] if bias is None else bias, compute)
        convolution, buffers = winograd.convolution(vectors.lanes(compute.itemsize)), self._memory(x, filters, window)
        convolution(_rows(x), u, offset, *buffers, _rows(y))

    def _rotates(self, dy: Array, x: Array) -> bool:
        """Return True if dx takes no more tiles than dy. Otherwise, as without padding, `Tiling.backward` is faster."""
        return tiles_of(x.shape[1:3]) <= tiles_of(dy.shape[1:3])

    def _tiles_gradient(self, dy: Array, x: Array, weight: Array, window: Window) -> Array:
        """Return dx (N, H, W, C): the convolution of dy (N, H', W', O) with the rotated filters."""
        (top, below), (left, right) = window.padding
        full_padding = Window(window.kernel, padding=((2 - top, 2 - below), (2 - left, 2 - right)))
        dx = self.borrow(x.shape)
        self._multiply_tiles(dy, weight[::-1, ::-1].transpose(0, 1, 3, 2), None, full_padding, dx)
        return dx

    def _add_tiles_gradient(self, dy: Array, x: Array, weight_grad: Array, window: Window) -> None:
        compute, (channels, filters) = self.policy.compute, weight_grad.shape[2:]
        du = self.borrow((winograd.VALUES, channels * filters), compute)
        du[...] = 0
        gradient, buffers = winograd.weight_gradient(vectors.lanes(compute.itemsize)), self._memory(x, filters, window)
        gradient(_rows(x), _rows(dy), *buffers, du)
        self._add_product(weight_grad.reshape(9, -1), winograd.FILTER.astype(compute), du)

    def _memory(self, x: Array, filters: int, window: Window) -> tuple[int, int, Array, Array, Array, Array]:
        columns, channels, compute = -(-window.output(*x.shape[1:3])[1] // 4) * 4, x.shape[3], self.policy.compute
        strip, out = self.borrow((6, columns + 2, channels), compute), self.borrow((6, columns, filters), compute)
        v, m = (self.borrow((winograd.VALUES * winograd.PITCH * count,), compute) for count in (channels, filters))
        strip[...] = out[...] = 0
        return window.padding[0][0], window.padding[1][0], strip, out, v, m


def saves_products(size: tuple[int, int], direct: tuple[int, int]) -> bool:
    """Return True if tiles for `size` outputs need at most 2/3 of the products of 3x3 windows at `direct` positions."""
    return 36 * tiles_of(size) <= 6 * direct[0] * direct[1]


def tiles_of(size: tuple[int, ...]) -> int:
    return -(-size[0] // 4) * -(-size[1] // 4)


def _rows(images: Array) -> Array:
    return bits(images.reshape(*images.shape[:2], -1))
