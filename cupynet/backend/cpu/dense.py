"""Dense layers on the CPU: products by BLAS, sums over rows by numba."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import dense as dense_kernels
from cupynet.backend.reference.dense import DenseOps


class NumbaDense(DenseOps):
    """See `DenseOps`."""

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        dense_kernels.add_column_sums(dy, grad)
