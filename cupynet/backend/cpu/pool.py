"""Pooling on the CPU, compiled."""

from __future__ import annotations

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.cpu.device import NumbaDevice, window_numbers
from cupynet.backend.cpu.kernels import pool as pool_kernels
from cupynet.backend.reference.pool import PoolOps
from cupynet.backend.window import Window


class NumbaPool(NumbaDevice, PoolOps):
    """See `PoolOps`."""

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        if not self._stores(x):
            return super().max_pool2d(x, window)
        shapes.windows("max_pool2d", x.shape, window, pool=True)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        winners = self.borrow(y.shape, window.place_dtype)
        pool_kernels.max_pool(x, y, winners, *window_numbers(window))
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        if not self._stores(dy) or not winners.flags.c_contiguous:
            return super().max_pool2d_backward(dy, winners, shape, window)
        shapes.windows("max_pool2d_backward", shape, window, pool=True)
        shapes.shape_of("max_pool2d_backward", "dy", dy, (shape[0], *window.output(*shape[1:3]), shape[3]))
        shapes.alike("max_pool2d_backward", dy, winners)
        dx = self.borrow(shape)
        pool_kernels.max_pool_backward(dy, winners, dx, *window_numbers(window))
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        if not self._stores(x):
            return super().avg_pool2d(x, window)
        shapes.windows("avg_pool2d", x.shape, window, pool=True)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        pool_kernels.avg_pool(x, y, *window_numbers(window))
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        if not self._stores(dy):
            return super().avg_pool2d_backward(dy, shape, window)
        shapes.windows("avg_pool2d_backward", shape, window, pool=True)
        shapes.shape_of("avg_pool2d_backward", "dy", dy, (shape[0], *window.output(*shape[1:3]), shape[3]))
        dx = self.borrow(shape)
        pool_kernels.avg_pool_backward(dy, dx, *window_numbers(window))
        return dx
