"""The backend `numba`: compiled loops where NumPy needs several passes over memory; products stay with BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupynet.backend.backend import Backend
from cupynet.backend.cpu import conv_pool
from cupynet.backend.cpu.conv import NumbaConv
from cupynet.backend.cpu.dropout import NumbaDropout
from cupynet.backend.cpu.norm import NumbaNorm
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.cpu.pool import NumbaPool
from cupynet.backend.cpu.update import NumbaUpdate
from cupynet.backend.fusion import Convolution, FusedPair, MaxPool, Operation


class NumbaBackend(NumbaConv, NumbaPool, NumbaNorm, NumbaDropout, NumbaUpdate, NumpyBackend):
    """NumPy's arrays; each family of operations falls back to the reference for arrays that its kernels do not take."""

    name = "numba"

    def fused_pair(self, first: Operation, second: Operation) -> FusedPair | None:
        fuse = FUSED.get((type(first), type(second)))
        return None if fuse is None else fuse(self, first, second)


# Pairs of operations that are faster as one, by the types of the first and the second.
FUSED: dict[tuple[type, type], Callable[[Backend, Any, Any], FusedPair | None]] = {
    (Convolution, MaxPool): conv_pool.fuse,
}
