"""The backend `numba`: compiled loops where NumPy needs several passes over memory; products use BLAS."""

from __future__ import annotations

from cupynet.backend.cpu import conv_pool
from cupynet.backend.cpu.conv import NumbaConv
from cupynet.backend.cpu.device import NumbaDevice
from cupynet.backend.cpu.dropout import NumbaDropout
from cupynet.backend.cpu.norm import NumbaNorm
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.cpu.pool import NumbaPool
from cupynet.backend.cpu.update import NumbaUpdate
from cupynet.backend.fusion import Convolution, FusedPair
from cupynet.backend.window import Window


class Numba16Backend(NumbaUpdate, NumpyBackend):
    """NumPy arrays in 16 bits, which numba cannot compute: only updates and fused pairs (on copies) are compiled."""

    name = "numba"

    def fused_pair(self, first: Convolution, pool: Window) -> FusedPair | None:
        return conv_pool.fuse(self, first, pool)


class NumbaBackend(NumbaDevice, NumbaConv, NumbaPool, NumbaNorm, NumbaDropout, Numba16Backend):
    """NumPy arrays in float or double."""
