"""Pooling on the GPU."""

from __future__ import annotations

from typing import Any

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.cuda.windows import CudaWindows
from cupynet.backend.reference.pool import PoolOps
from cupynet.backend.window import Window


class CudaPool(CudaWindows, PoolOps):
    """See `PoolOps`."""

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        if not self._stores(x) or x.ndim != 4 or self._values(x.shape, window) is None:
            return super().max_pool2d(x, window)
        shapes.windows("max_pool2d", x.shape, window, pool=True)
        return self._pool(x, None, window, self.winner_dtype(window), relu=False)

    def _pool(self, x: Array, bias: Array | None, window: Window, numbers: Any, *, relu: bool) -> tuple[Array, Array]:
        """The pool of x + bias behind a ReLU or not, and its winners in the integers `numbers`; see pool.cu."""
        n, _, _, channels = x.shape
        y = self.borrow((n, *window.output(*x.shape[1:3]), channels))
        winners = self.borrow(y.shape, numbers)
        name, geometry = f"max_pool_{self._kind}_{winners.dtype.name}", self._geometry(x.shape, window)
        values = y.size // max(n, 1)
        self.kernels.images(name, n, values, x, bias, y, winners, n, *geometry, int(relu))
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        shapes.windows("max_pool2d_backward", shape, window, pool=True)
        if not self._stores(dy) or not self._contiguous(winners) or self._values(shape, window) is None:
            return super().max_pool2d_backward(dy, winners, shape, window)
        n, height, width, channels = shape
        shapes.shape_of("max_pool2d_backward", "dy", dy, (n, *window.output(height, width), channels))
        shapes.alike("max_pool2d_backward", dy, winners)
        dx = self.borrow(shape)
        name, geometry = f"max_pool_backward_{self._kind}_{winners.dtype.name}", self._geometry(shape, window)
        self.kernels.images(name, n, height * width * channels, dy, winners, dx, n, *geometry)
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        shapes.windows("avg_pool2d", x.shape, window, pool=True)
        if not self._stores(x) or self._values(x.shape, window) is None:
            return super().avg_pool2d(x, window)
        n, height, width, channels = x.shape
        y = self.borrow((n, *window.output(height, width), channels))
        values = y.size // max(n, 1)
        self.kernels.images(f"avg_pool_{self._kind}", n, values, x, y, n, *self._geometry(x.shape, window))
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        shapes.windows("avg_pool2d_backward", shape, window, pool=True)
        if not self._stores(dy) or self._values(shape, window) is None:
            return super().avg_pool2d_backward(dy, shape, window)
        n, height, width, channels = shape
        shapes.shape_of("avg_pool2d_backward", "dy", dy, (n, *window.output(height, width), channels))
        dx, name = self.borrow(shape), f"avg_pool_backward_{self._kind}"
        self.kernels.images(name, n, height * width * channels, dy, dx, n, *self._geometry(shape, window))
        return dx
