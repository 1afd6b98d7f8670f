"""Convolution and the max-pool behind it as one operation on the CPU.

Forward: a few images at a time, so that their im2col rows and their convolution stay in the processor's L2 cache; only
    the pooled
result leaves it. The bias is added after the pool: the largest of x + b is the largest of x, plus b. Backward: through
the pool's winners only (`rows.py`). Neither the rows nor the convolution are kept in between: rows are cheaper to make
again than to fetch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from cupynet.backend.base import Backend, Pad, out_size

Array: TypeAlias = Any

L2_BYTES = 640 * 1024  # of the L2 cache for the rows of a chunk; it has 1 MB and more on current processors
SHORT_ROW = 32  # values: below, a patch's rows are too short for vectors, and im2col makes one long row of them


class ConvPool:
    """The geometry of one convolution and its pool, for one size of image; `NumbaBackend` keeps one for each.

    Args:
        backend: lends the buffers; stores and computes in the same precision.
        image: (H, W) of x.
        weight_shape: (K, K, C, O).
        stride, pad: of the convolution.
        pool, pool_stride: of the pool.
    """

    def __init__(
        self,
        backend: Backend,
        image: tuple[int, int],
        weight_shape: tuple[int, ...],
        stride: int,
        pad: Pad,
        pool: int,
        pool_stride: int,
    ) -> None:
        from cupynet.backend import kernels, rows  # numba is imported only where it is used

        self.kernels, self.gradients = kernels, rows
        self.backend, self.stride, self.pad, self.pool, self.pool_stride = backend, stride, pad, pool, pool_stride
        self.kernel, self.channels, self.filters = weight_shape[0], weight_shape[2], weight_shape[3]
        self.height, self.width = image[0] + pad[0] + pad[1], image[1] + pad[2] + pad[3]
        self.rows = out_size(self.height, self.kernel, stride, 0, 0)  # H' and W' of the convolution
        self.cols = out_size(self.width, self.kernel, stride, 0, 0)
        self.pooled_rows = out_size(self.rows, pool, pool_stride, 0, 0)
        self.pooled_cols = out_size(self.cols, pool, pool_stride, 0, 0)
        self.patch = self.kernel * self.kernel * self.channels
        itemsize = backend.policy.storage.itemsize
        per_image = self.rows * self.cols * (self.patch + self.filters) * itemsize
        self.chunk = max(1, L2_BYTES // per_image)
        corner = np.arange(self.pooled_rows)[:, None] * self.cols + np.arange(self.pooled_cols)  # in convolution pixels
        place = np.arange(pool)[:, None] * self.cols + np.arange(pool)
        self._corners, self._places = (corner * pool_stride).reshape(-1), place.reshape(-1)

    def offsets(self, pixels: Array) -> Array:
        """Where in an image the patches of convolution pixels begin, int32."""
        row, col = np.divmod(pixels, self.cols)
        return ((row * self.width + col) * self.stride * self.channels).astype(np.int32)

    def padded(self, x: Array) -> Array:
        """x with its zeros around it, borrowed; x itself where there are none."""
        if not any(self.pad):
            return x
        top, _, left, _ = self.pad
        wide = self.backend.borrow((len(x), self.height, self.width, self.channels))
        wide[...] = 0
        wide[:, top : top + x.shape[1], left : left + x.shape[2]] = x
        return wide

    def forward(self, x: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
        """(N, H, W, C) padded -> pooled (N, P, P', O) and winners."""
        backend, n, chunk = self.backend, len(x), min(self.chunk, len(x))
        y = backend.borrow((n, self.pooled_rows, self.pooled_cols, self.filters))
        winners = backend.borrow(y.shape, backend.winner_dtype(self.pool))
        columns = backend.borrow((chunk * self.rows * self.cols, self.patch))
        z = backend.borrow((chunk * self.rows * self.cols, self.filters))
        filters = weight.reshape(self.patch, self.filters)
        lines = x.reshape(n, self.height, self.width * self.channels)
        for start in range(0, n, chunk):
            count = min(chunk, n - start)
            pixels = count * self.rows * self.cols
            self._im2col(lines[start : start + count], columns[:pixels])
            np.matmul(columns[:pixels], filters, out=z[:pixels])
            image = z[:pixels].reshape(count, self.rows, self.cols, self.filters)
            part = slice(start, start + count)
            self.kernels.max_pool(image, y[part], winners[part], self.pool, self.pool_stride)
        backend.give_back(columns, z)
        if bias is not None:
            y += bias
        return y, winners

    def _im2col(self, lines: Array, columns: Array) -> None:
        windows = columns.reshape(-1, self.cols, self.kernel, self.kernel * self.channels)
        self.kernels.im2col(lines, windows, self.rows, self.stride, self.channels)

    def weight_gradient(self, dy: Array, winners: Array, x: Array, weight_grad: Array) -> None:
        """Adds to weight_grad (K, K, C, O); dy and winners (N, P, O), x padded."""
        row, height, n = self.kernel * self.channels, self.kernel, len(x)
        long_rows = row < SHORT_ROW
        if long_rows:
            row, height = self.patch, 1
        grad = self.backend.borrow((self.filters * height, row))
        grad[...] = 0
        blocks = self.gradients.blocks(row, grad.itemsize)
        if long_rows:
            self._from_columns(self.gradients.weight_gradient(*blocks), dy, winners, x, grad)
        else:
            corners, places = self.offsets(self._corners), self.offsets(self._places)
            step = self.width * self.channels
            self.gradients.weight_gradient(*blocks)(dy, winners, corners, places, x.reshape(n, -1), height, step, grad)
        weight_grad += grad.reshape(self.filters, -1).T.reshape(weight_grad.shape)
        self.backend.give_back(grad)

    def _from_columns(self, gradient: Any, dy: Array, winners: Array, x: Array, grad: Array) -> None:
        """The same from im2col rows, made again a chunk at a time."""
        n, chunk, pixels = len(x), min(self.chunk, len(x)), self.rows * self.cols
        columns = self.backend.borrow((chunk, pixels * self.patch))
        corners, places = ((p * self.patch).astype(np.int32) for p in (self._corners, self._places))
        lines = x.reshape(n, self.height, self.width * self.channels)
        for start in range(0, n, chunk):
            part = slice(start, min(start + chunk, n))
            some = columns[: part.stop - start]
            self._im2col(lines[part], some)
            gradient(dy[part], winners[part], corners, places, some, 1, 0, grad)
        self.backend.give_back(columns)

    def input_gradient(self, dy: Array, winners: Array, weight: Array, shape: tuple[int, ...]) -> Array:
        """dx (N, H, W, C); dy and winners (N, P, O)."""
        backend, row = self.backend, self.kernel * self.channels
        per_line = self.gradients.CACHE_LINE // weight.itemsize
        by_row = backend.borrow((self.kernel, self.filters, -(-row // per_line) * per_line))
        by_row[:, :, :row] = weight.reshape(self.kernel, row, self.filters).transpose(0, 2, 1)
        dx = backend.borrow((shape[0], self.height, self.width, self.channels))
        corners, places = self.offsets(self._corners), self.offsets(self._places)
        gradient = self.gradients.input_gradient(*self.gradients.blocks(row, weight.itemsize))
        step = self.width * self.channels
        gradient(dy, winners, corners, places, by_row, self.kernel, step, dx.reshape(shape[0], -1))
        backend.give_back(by_row)
        if not any(self.pad):
            return dx
        top, _, left, _ = self.pad
        inner = backend.borrow(shape)
        inner[...] = dx[:, top : top + shape[1], left : left + shape[2]]
        backend.give_back(dx)
        return inner
