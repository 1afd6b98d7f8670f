"""Convolutions on the GPU: im2col rows and products of cuBLAS; depthwise ones in kernels of their own."""

from __future__ import annotations

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.cuda.dense import MOST_PARTS, CudaDense
from cupynet.backend.cuda.windows import CudaWindows
from cupynet.backend.reference.conv import ConvOps
from cupynet.backend.window import Window


class CudaConv(CudaDense, CudaWindows, ConvOps):
    """See `ConvOps`."""

    def im2col(self, x: Array, window: Window) -> Array:
        shapes.windows("im2col", x.shape, window)
        n, _, _, channels = x.shape
        geometry, values = self._geometry(x.shape, window), self._values(x.shape, window)
        if values is None or not self._stores(x) or self.policy.compute != self.policy.storage:
            return super().im2col(x, window)
        rows, cols = window.output(*x.shape[1:3])
        columns = self.borrow((n * rows * cols, window.places * channels))
        at_once = 4 if channels % 4 == 0 else 1
        self.kernels.images(f"im2col_{self._kind}", n, values // at_once, x, columns, n, *geometry, *window.dilation)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        shapes.windows("col2im", shape, window)
        n, height, width, channels = shape
        geometry, values = self._geometry(shape, window), self._values(shape, window)
        if values is None or not self._stores(columns):
            return super().col2im(columns, shape, window)
        rows, cols = window.output(height, width)
        shapes.shape_of("col2im", "columns", columns, (n * rows * cols, window.places * channels))
        x = self.borrow(shape)
        self.kernels.images(
            f"col2im_{self._kind}", n, height * width * channels, columns, x, n, *geometry, *window.dilation
        )
        return x

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> tuple[Array, Array]:
        n, filters = len(x), weight.shape[3]
        if weight.shape[2] > 1 or not self._stores(x, weight) or self._values((*x.shape[:3], filters), window) is None:
            return super()._grouped(x, weight, window, groups)
        y = self.borrow((n, *window.output(*x.shape[1:3]), filters))
        sizes = (n, *self._geometry(x.shape, window), *window.dilation, filters // groups)
        self.kernels.images(f"depthwise_{self._kind}", n, y.size // max(n, 1), x, weight, y, *sizes)
        return y, None

    def _grouped_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *,
        need_dx: bool,
    ) -> Array | None:  # fmt: skip
        """See `Backend._grouped_backward`. Depthwise, parts of the sums first, then their sums: always in one order."""
        if columns is not None or not self._stores(dy, x, weight) or not self._updates(weight_grad):
            given = dy, columns, x, weight, weight_grad, window, groups
            return super()._grouped_backward(*given, need_dx=need_dx)
        n, height, width, channels = x.shape
        sizes = (n, *self._geometry(x.shape, window), *window.dilation, weight.shape[3] // groups)
        parts = max(1, min(n * window.output(height, width)[0], MOST_PARTS))
        sums = self.borrow((parts, weight.size), self.policy.accumulate)
        self.kernels.images(f"depthwise_weight_{self._kind}", parts, weight.size, x, dy, sums, *sizes, parts)
        self._column_sums(self._wide, sums, weight_grad.reshape(-1), parts, 1, add=True)
        self.give_back(sums)
        if not need_dx:
            return None
        dx, values = self.borrow(x.shape), height * width * channels
        self.kernels.images(f"depthwise_input_{self._kind}", n, values, dy, weight, dx, *sizes)
        return dx
