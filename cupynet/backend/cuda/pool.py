from __future__ import annotations

import math

from cupynet.backend.array import Array
from cupynet.backend.cuda.device import CudaDevice
from cupynet.backend.reference.pool import PoolOps
from cupynet.backend.window import Window


class CudaPool(CudaDevice, PoolOps):
    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        window.check(x.shape)
        return self._pool(x, None, window, relu=False)

    def _pool(self, x: Array, bias: Array | None, window: Window, *, relu: bool) -> tuple[Array, Array]:
        y = self.borrow((len(x), *window.output(*x.shape[1:3]), x.shape[3]))
        indices = self.borrow(y.shape, window.index_dtype)
        name, sizes = f"max_pool_{self._kind}_{indices.dtype.name}", self._geometry(x.shape, window)
        threads = math.prod(y.shape[1:]) // self._channels_at_once(x.shape[3], 4)
        self.kernels.images(name, len(x), threads, x, bias, y, indices, *sizes, int(relu))
        return y, indices

    def max_pool2d_backward(self, dy: Array, indices: Array, shape: tuple[int, ...], window: Window) -> Array:
        n, channels = shape[0], shape[3]
        dx, name = self.borrow(shape), f"max_pool_backward_{self._kind}_{indices.dtype.name}"
        threads = math.prod(shape[1:]) // self._channels_at_once(channels, 4)
        self.kernels.images(name, n, threads, dy, indices, dx, *self._geometry(shape, window))
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        window.check(x.shape)
        y = self.borrow((len(x), *window.output(*x.shape[1:3]), x.shape[3]))
        sizes = self._geometry(x.shape, window)
        self.kernels.images(f"avg_pool_{self._kind}", len(x), math.prod(y.shape[1:]), x, y, *sizes)
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        n, height, width, channels = shape
        dx, name = self.borrow(shape), f"avg_pool_backward_{self._kind}"
        self.kernels.images(name, n, math.prod(shape[1:]), dy, dx, *self._geometry(shape, window))
        return dx
