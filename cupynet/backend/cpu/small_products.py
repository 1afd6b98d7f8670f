"""Products of small batches with the weights of dense layers, for which BLAS libraries are slow."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.conv import NumbaConv
from cupynet.backend.cpu.kernels import dense, vectors

MIN_LENGTH = 64  # of a row of outputs or gradients


class SmallProducts(NumbaConv):
    """Uses compiled kernels for batches of at most half a vector, where they were faster than OpenBLAS on a Xeon."""

    def _add_product(self, grad: Array, a: Array, dy: Array) -> None:
        a, dy = self._operand(a), self._operand(dy)
        small = 2 * len(a) <= vectors.lanes(grad.itemsize) and grad.shape[1] >= MIN_LENGTH
        if not small or not _plain(grad, a, dy):
            return super()._add_product(grad, a, dy)
        dense.add_outer_products(a, dy, grad)

    def _gemm(self, left: Array, right: Array, out: Array) -> None:
        small = 1 < len(left) <= vectors.lanes(out.itemsize) // 2 and len(right) >= MIN_LENGTH
        if not small or not _plain(left, right.T, out):
            return super()._gemm(left, right, out)
        dense.dot_products(left, right.T, out)


def _plain(*matrices: Array) -> bool:
    """Return True if the matrices are C-contiguous and have the same dtype."""
    return all(matrix.flags.c_contiguous and matrix.dtype == matrices[0].dtype for matrix in matrices)
