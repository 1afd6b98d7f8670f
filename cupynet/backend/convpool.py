"""Convolution and the max-pool behind it as one operation on the CPU.

Forward: one pooling window after the other, its pixels computed in registers and only the largest written
(`kernels/windows.py`). The bias is added after the pool: the largest of x + b is the largest of x, plus b. Backward:
through the pool's winners only (`kernels/rows.py`; `kernels/outer.py` for patches with short rows). There are no im2col
rows, and the convolution itself never exists in memory.
"""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.base import Backend, Pad, out_size

CACHE_LINE = 64  # bytes
SHORT_ROW = 16  # values: a patch's row that fills no vector


class ConvPool:
    """The geometry of one convolution and its pool, for one size of image; `NumbaBackend` keeps one for each.

    Windows of the pool do not overlap. P is their number in an image.

    Args:
        backend: lends the buffers; all arrays are in its compute precision.
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
        from cupynet.backend.kernels import outer, rows, windows  # numba is imported only where it is used

        self.outer, self.rows, self.windows = outer, rows, windows
        self.backend, self.pad, self.pool = backend, pad, pool
        self.dtype = backend.policy.compute
        self.kernel, self.channels, self.filters = weight_shape[0], weight_shape[2], weight_shape[3]
        self.height, self.width = image[0] + pad[0] + pad[1], image[1] + pad[2] + pad[3]
        convolved = (out_size(side, self.kernel, stride, 0, 0) for side in (self.height, self.width))
        self.pooled: tuple[int, ...] = tuple(out_size(side, pool, pool_stride, 0, 0) for side in convolved)  # (H', W')
        self.row = self.kernel * self.channels  # values in a row of a patch
        self.row_step = self.width * self.channels
        self.corners = self._places(self.pooled, stride * pool_stride)
        self.places = self._places((pool, pool), stride)
        start = np.arange(self.kernel)[:, None] * self.row_step
        self.table = (start + np.arange(self.row)).reshape(-1).astype(np.int32)

    def _places(self, size: tuple[int, ...], step: int) -> Array:
        """Where patches begin in an image, for pixels `step` apart, int32."""
        row, col = np.arange(size[0])[:, None] * self.row_step, np.arange(size[1]) * self.channels
        return ((row + col) * step).reshape(-1).astype(np.int32)

    def padded(self, x: Array) -> Array:
        """x with its zeros around it, borrowed; x itself where there are none."""
        if not any(self.pad):
            return x
        top, _, left, _ = self.pad
        wide = self.backend.borrow((len(x), self.height, self.width, self.channels), self.dtype)
        wide[...] = 0
        wide[:, top : top + x.shape[1], left : left + x.shape[2]] = x
        return wide

    def forward(self, x: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
        """Padded x -> pooled (N, H', W', O) and winners."""
        backend, n = self.backend, len(x)
        y = backend.borrow((n, *self.pooled, self.filters), self.dtype)
        winners = backend.borrow(y.shape, backend.winner_dtype(self.pool))
        offset = bias
        if offset is None:
            offset = backend.borrow((self.filters,), self.dtype)
            offset[...] = 0
        blocks = self.windows.blocks(len(self.places), self.filters, y.itemsize)
        forward = self.windows.conv_pool(len(self.places), *blocks)
        images, filters = x.reshape(n, -1), weight.reshape(-1, self.filters)
        by_window = (y.reshape(n, -1, self.filters), winners.reshape(n, -1, self.filters))
        forward(images, self.corners, self.places, self.table, filters, offset, *by_window)
        backend.give_back(None if offset is bias else offset)
        return y, winners

    def weight_gradient(self, dy: Array, winners: Array, x: Array, weight_grad: Array) -> None:
        """Adds to weight_grad (K, K, C, O); dy and winners (N, P, O), x padded."""
        images = x.reshape(len(x), -1)
        if self.row < SHORT_ROW:
            self._short_rows(dy, winners, images, weight_grad.reshape(-1, self.filters))
            return
        grad = self.backend.borrow((self.filters * self.kernel, self.row), self.dtype)
        grad[...] = 0
        gradient = self.rows.weight_gradient(*self.rows.blocks(self.row, grad.itemsize))
        gradient(dy, winners, self.corners, self.places, images, self.kernel, self.row_step, grad)
        weight_grad += grad.reshape(self.filters, -1).T.reshape(weight_grad.shape)
        self.backend.give_back(grad)

    def _short_rows(self, dy: Array, winners: Array, images: Array, grad: Array) -> None:
        """The same where rows are shorter than a vector: the vectors lie along the filters. grad (K·K·C, O)."""
        pixels = len(self.places)
        for filter_at, filters, length, height in self.outer.blocks(self.filters, self.row, grad.itemsize):
            for ky in range(0, self.kernel, height):
                lines = min(height, self.kernel - ky)
                for i in range(0, self.row, length):
                    values = min(length, self.row - i)
                    gradient = self.outer.weight_gradient(pixels, lines, values, filters)
                    gradient(
                        images,
                        ky * self.row_step + i,
                        self.row_step,
                        self.corners,
                        self.places,
                        dy,
                        winners,
                        filter_at,
                        grad,
                        ky * self.row + i,
                        self.row,
                    )

    def input_gradient(self, dy: Array, winners: Array, weight: Array, shape: tuple[int, ...]) -> Array:
        """dx (N, H, W, C); dy and winners (N, P, O)."""
        backend = self.backend
        per_line = CACHE_LINE // weight.itemsize
        by_row = backend.borrow((self.kernel, self.filters, -(-self.row // per_line) * per_line), self.dtype)
        by_row[:, :, : self.row] = weight.reshape(self.kernel, self.row, self.filters).transpose(0, 2, 1)
        dx = backend.borrow((shape[0], self.height, self.width, self.channels), self.dtype)
        gradient = self.rows.input_gradient(*self.rows.blocks(self.row, weight.itemsize))
        images = dx.reshape(shape[0], -1)
        gradient(dy, winners, self.corners, self.places, by_row, self.kernel, self.row_step, images)
        backend.give_back(by_row)
        if not any(self.pad):
            return dx
        top, _, left, _ = self.pad
        inner = backend.borrow(shape, self.dtype)
        inner[...] = dx[:, top : top + shape[1], left : left + shape[2]]
        backend.give_back(dx)
        return inner
