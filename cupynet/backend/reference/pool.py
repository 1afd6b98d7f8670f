from __future__ import annotations

import math

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.device import Device
from cupynet.backend.window import Window


class PoolOps(Device):
    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """Return the maximum of each window and its index ky·K_w + kx: (N, H, W, C) -> 2 x (N, H', W', C).

        The first of equal values wins, and the first NaN wins over all values. Padding never wins.
        """
        window.check(x.shape)
        output = window.output(*x.shape[1:3])
        y = self.borrow((x.shape[0], *output, x.shape[3]), x.dtype)
        indices = self.borrow(y.shape, window.index_dtype)
        padded = self._surrounded(x, window, -math.inf)
        y[...] = padded[window.slices(0, 0, output)]
        indices[...] = 0
        for place, (ky, kx) in enumerate(np.ndindex(*window.kernel)):
            if place > 0:
                candidate = padded[window.slices(ky, kx, output)]
                with np.errstate(invalid="ignore"):  # ml_dtypes warns about NaN
                    better = ~(candidate <= y)  # larger, or one of them is NaN
                better &= y == y  # the first NaN stays
                self.xp.copyto(indices, indices.dtype.type(place), where=better)
                self.xp.copyto(y, candidate, where=better)
        return y, indices

    def max_pool2d_backward(self, dy: Array, indices: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Add the gradient of each window to the pixel of its maximum: (N, H', W', C) -> (N, H, W, C)."""
        n, height, width, channels = shape
        output = window.output(height, width)
        dx = self.borrow((n, *window.padded(height, width), channels), dy.dtype)
        dx[...] = 0
        for place, (ky, kx) in enumerate(np.ndindex(*window.kernel)):
            target = dx[window.slices(ky, kx, output)]
            target += self.xp.where(indices == place, dy, dy.dtype.type(0))  # not a product, because 0 times NaN is NaN
        return self._within(dx, shape, window)

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        """Return the mean of each window, excluding padding: (N, H, W, C) -> (N, H', W', C)."""
        window.check(x.shape)
        n, height, width, channels = x.shape
        output, padded = window.output(height, width), self._surrounded(x, window, 0)
        total = self.borrow((n, *output, channels), self.policy.accumulate)
        total[...] = 0
        for ky, kx in np.ndindex(*window.kernel):
            total += padded[window.slices(ky, kx, output)]
        total *= self._shares(window, height, width)
        del padded
        return self._stored_copy(total)

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Distribute the gradient of each window equally over its pixels: (N, H', W', C) -> (N, H, W, C)."""
        n, height, width, channels = shape
        output = window.output(height, width)
        dx = self.borrow((n, *window.padded(height, width), channels), self.policy.accumulate)
        dx[...] = 0
        shared = dy * self._shares(window, height, width)
        for ky, kx in np.ndindex(*window.kernel):
            dx[window.slices(ky, kx, output)] += shared
        return self._within(dx, shape, window)

    def _shares(self, window: Window, height: int, width: int) -> Array:
        image, output = np.zeros((1, *window.padded(height, width), 1)), window.output(height, width)
        image[window.inside(height, width)] = 1
        counts = sum(image[0][window.slices(ky, kx, output)[1:]] for ky, kx in np.ndindex(*window.kernel))
        return self.asarray((1 / counts).astype(self.policy.accumulate))
