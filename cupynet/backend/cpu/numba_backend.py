"""The backend `numba`: compiled loops where NumPy needs several passes over memory; products use BLAS."""

from __future__ import annotations

from cupynet.backend.cpu import conv_pool
from cupynet.backend.cpu.conv import NumbaConv
from cupynet.backend.cpu.dropout import NumbaDropout
from cupynet.backend.cpu.norm import NumbaNorm
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.cpu.pool import NumbaPool
from cupynet.backend.cpu.update import NumbaUpdate
from cupynet.backend.fusion import Convolution, FusedPair, MaxPool, Operation


class NumbaBackend(NumbaConv, NumbaPool, NumbaNorm, NumbaDropout, NumbaUpdate, NumpyBackend):
    """NumPy arrays; operations fall back to the reference for arrays that the kernels do not take."""

    name = "numba"

    def fused_pair(self, first: Operation, second: Operation) -> FusedPair | None:
        if isinstance(first, Convolution) and isinstance(second, MaxPool):
            return conv_pool.fuse(self, first, second)
        return None
