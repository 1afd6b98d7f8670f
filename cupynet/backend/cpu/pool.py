"""Pooling on the CPU, compiled."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.device import window_numbers
from cupynet.backend.cpu.kernels import pool as pool_kernels
from cupynet.backend.reference.pool import PoolOps
from cupynet.backend.window import Window


class NumbaPool(PoolOps):
    """See `PoolOps`."""

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        window.check(x.shape)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        winners = self.borrow(y.shape, window.place_dtype)
        pool_kernels.max_pool(x, y, winners, *window_numbers(window))
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        dx = self.borrow(shape)
        pool_kernels.max_pool_backward(dy, winners, dx, *window_numbers(window))
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        window.check(x.shape)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        pool_kernels.avg_pool(x, y, *window_numbers(window))
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        dx = self.borrow(shape)
        pool_kernels.avg_pool_backward(dy, dx, *window_numbers(window))
        return dx
