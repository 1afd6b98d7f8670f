"""Products by cuBLAS, biases and sums over rows by kernels."""

from __future__ import annotations

from typing import Any

from cupynet.backend.array import Array
from cupynet.backend.cuda.cublas import Cublas
from cupynet.backend.cuda.device import SIXTEEN, CudaDevice
from cupynet.backend.cuda.launch import first_use, power_of_two
from cupynet.backend.reference.dense import DenseOps

ACROSS = 32  # columns that a block adds up side by side
MOST_PARTS = 256  # sums of parts that are added up in a second pass
FEW_ROWS = 128  # in one part at least


class CudaDense(CudaDevice, DenseOps):
    """See `DenseOps`."""

    def _gemm(self, left: Array, right: Array, out: Array, beta: float = 0.0) -> None:
        """See `Backend._gemm`; beta · out is added. The first one on a stream allocates memory."""
        with self.here():
            if self._cublas is None or self._cublas.stream != self.xp.cuda.get_current_stream().ptr:
                self._cublas = None  # the next one takes over its handle
                with first_use:
                    self._cublas = Cublas(self.xp, tf32=self.options["tf32"])
            self._cublas.gemm(left, right, out, beta=beta)

    def _operand(self, a: Array) -> tuple[Array, bool]:
        """See `Backend._operand`. cuBLAS takes no array with gaps, neither as it stands nor transposed."""
        if a.flags.c_contiguous or a.flags.f_contiguous:
            return super()._operand(a)
        copy = self.borrow(a.shape, self.policy.compute)
        copy[...] = a
        return copy, True

    def _add_product(self, grad: Array, a: Array, dy: Array) -> None:
        """See `Backend._add_product`. The sums are made in the gradient's precision, and nothing is rounded before."""
        if not self._updates(grad) or not self._stores(a, dy):
            return super()._add_product(grad, a, dy)
        self._gemm(a.T, dy, grad, beta=1.0)

    def _add_bias(self, y: Array, bias: Array) -> None:
        if not self._stores(y, bias) or y.shape[1:] != bias.shape:
            return super()._add_bias(y, bias)
        rows, columns = y.shape
        at_once = SIXTEEN // y.dtype.itemsize
        if columns % at_once:
            at_once = 1
        self.kernels.flat(f"add_bias_{self._kind}", y.size, y, bias, rows, columns, 0, at_once=at_once)

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        """See `Backend._add_column_sums`. Parts of the rows first, then their sums: always in the same order."""
        if not self._stores(dy) or not self._updates(grad) or grad.shape != dy.shape[1:]:
            return super()._add_column_sums(grad, dy)
        rows, columns = dy.shape
        length = max(FEW_ROWS, -(-rows // MOST_PARTS))
        parts = -(-rows // length)
        if parts <= 1:
            return self._column_sums(self._kind, dy, grad, length, 1, add=True)
        sums = self.borrow((parts, columns), self.policy.accumulate)
        self._column_sums(self._kind, dy, sums, length, parts, add=False)
        self._column_sums(self._wide, sums, grad, parts, 1, add=True)
        self.give_back(sums)

    def _column_sums(self, kind: str, values: Array, sums: Array, length: int, parts: int, *, add: bool) -> None:
        """`parts` sums of `length` rows each."""
        rows, columns = values.shape
        if not rows or not columns:
            return
        most, threads = self.kernels.blocks, self.kernels.threads
        across = min(ACROSS, threads, power_of_two(columns))
        down = min(parts, most)
        grid = (min(-(-columns // across), max(1, most // down)), down)
        block = (across, threads // across)
        self.kernels.launch(f"column_sums_{kind}", grid, block, values, sums, rows, columns, length, parts, int(add))

    def _chunks(self, rows: int) -> tuple[int, int]:
        """How many rows are added up together first, and how many such parts there are."""
        length = max(FEW_ROWS, -(-rows // MOST_PARTS))
        return length, -(-rows // length)

    def _by_chunks(self, name: str, rows: int, columns: int, *arguments: Any) -> None:
        """Launch a kernel that makes sums of parts of the columns; these sizes are its last arguments."""
        length, parts = self._chunks(rows)
        most, threads = self.kernels.blocks, self.kernels.threads
        across, down = min(ACROSS, threads, power_of_two(columns)), min(parts, most)
        grid = (min(-(-columns // across), max(1, most // down)), down)
        self.kernels.launch(name, grid, (across, threads // across), *arguments, rows, columns, length, parts)

    def _parts(self, rows: int, columns: int) -> Array:
        return self.borrow((self._chunks(rows)[1], 2 * columns), self.policy.accumulate)

    def _added(self, parts: Array, columns: int) -> Array:
        """Two sums of each column, of sums of parts; (2, C)."""
        sums = self.borrow((2, columns), self.policy.accumulate)
        self._column_sums(self._wide, parts, sums, len(parts), 1, add=False)
        self.give_back(parts)
        return sums
