from __future__ import annotations

from typing import Any

from cupynet.backend.array import Array
from cupynet.backend.cuda.cublas import Cublas
from cupynet.backend.cuda.device import SIXTEEN, CudaDevice
from cupynet.backend.cuda.launch import first_use, power_of_two
from cupynet.backend.reference.dense import DenseOps

ACROSS = 32  # columns that a block sums in parallel
FEW_ACROSS = 8  # the same for few rows, so that more threads share a column
MAX_PARTS = 256  # maximum number of partial sums
MIN_ROWS = 128  # minimum number of rows in a partial sum


class CudaDense(CudaDevice, DenseOps):
    """See `DenseOps`. Sums over rows have a fixed order: first within parts, then over the parts."""

    def _gemm(self, left: Array, right: Array, out: Array, beta: float = 0.0) -> None:
        """Compute out = left @ right + beta · out. The first product on a stream allocates memory."""
        with self.activated():
            if self._cublas is None or self._cublas.stream != self.xp.cuda.get_current_stream().ptr:
                self._cublas = None  # releases the handle, which the next object reuses
                with first_use:
                    self._cublas = Cublas(self.xp, tf32=self.options["tf32"])
            self._cublas.gemm(left, right, out, beta=beta)

    def _operand(self, a: Array) -> Array:
        if a.flags.c_contiguous or a.flags.f_contiguous:
            return super()._operand(a)
        copy = self.borrow(a.shape, self.policy.compute)
        copy[...] = a
        return copy

    def _add_product(self, grad: Array, a: Array, dy: Array) -> None:
        self._gemm(a.T, dy, grad, beta=1.0)

    def _add_bias(self, y: Array, bias: Array | None, *, relu: bool) -> None:
        if bias is None:
            return super()._add_bias(y, bias, relu=relu)
        rows, columns = y.shape
        at_once = SIXTEEN // y.dtype.itemsize
        if columns % at_once:
            at_once = 1
        self.kernels.flat(f"add_bias_{self._kind}", y.size, y, bias, rows, columns, int(relu), at_once=at_once)

    def _relu_and_bias_backward(self, dy: Array, relu_y: Array | None, bias_grad: Array | None) -> None:
        if bias_grad is None:
            return super()._relu_and_bias_backward(dy, relu_y, None)
        length, parts = self._chunks(dy.size // max(bias_grad.size, 1))
        if parts <= 1:
            return self._column_sums(self._kind, dy, bias_grad, length, 1, add=True, relu_y=relu_y)
        sums = self.borrow((parts, bias_grad.size), self.policy.accumulate)
        self._column_sums(self._kind, dy, sums, length, parts, add=False, relu_y=relu_y)
        self._column_sums(self._wide, sums, bias_grad, parts, 1, add=True)

    def _column_sums(
        self, kind: str, values: Array, sums: Array, length: int, parts: int, *, add: bool, relu_y: Array | None = None
    ) -> None:
        columns = values.shape[-1]
        rows = values.size // max(columns, 1)
        if rows and columns:
            sizes = rows, columns, length, parts, int(add)
            self._columns(f"column_sums_{kind}", columns, parts, values, relu_y, sums, *sizes)

    def _chunks(self, rows: int) -> tuple[int, int]:
        """Return the number of rows in each partial sum, and the number of partial sums."""
        length = max(MIN_ROWS, -(-rows // MAX_PARTS))
        return length, -(-rows // length)

    def _by_chunks(self, name: str, rows: int, columns: int, *arguments: Any) -> None:
        """Launch a kernel that computes partial sums of columns. The sizes are its last arguments."""
        length, parts = self._chunks(rows)
        self._columns(name, columns, parts, *arguments, rows, columns, length, parts)

    def _columns(self, name: str, columns: int, parts: int, *arguments: Any) -> None:
        """Launch a kernel with columns along x and partial sums along y."""
        max_blocks, threads = self.kernels.blocks, self.kernels.threads
        columns_per_block = ACROSS if parts > 1 else FEW_ACROSS
        across, down = min(columns_per_block, threads, power_of_two(columns)), min(parts, max_blocks)
        grid = (min(-(-columns // across), max(1, max_blocks // down)), down)
        self.kernels.launch(name, grid, (across, threads // across), *arguments)

    def _parts(self, rows: int, columns: int) -> Array:
        return self.borrow((self._chunks(rows)[1], 2 * columns), self.policy.accumulate)

    def _added(self, parts: Array, columns: int) -> Array:
        sums = self.borrow((2, columns), self.policy.accumulate)
        self._column_sums(self._wide, parts, sums, len(parts), 1, add=False)
        return sums
