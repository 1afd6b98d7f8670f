"""The backend `cupy`: arrays are CuPy's, products are cuBLAS's, everything else is a kernel of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupynet.backend.backend import Backend
from cupynet.backend.cuda.conv import CudaConv
from cupynet.backend.cuda.conv_pool import ConvPool
from cupynet.backend.cuda.dropout import CudaDropout
from cupynet.backend.cuda.loss import CudaLoss
from cupynet.backend.cuda.norm import CudaNorm
from cupynet.backend.cuda.pool import CudaPool
from cupynet.backend.cuda.update import CudaUpdate
from cupynet.backend.fusion import Convolution, FusedPair, MaxPool, Operation


class CupyBackend(CudaConv, CudaPool, CudaNorm, CudaDropout, CudaLoss, CudaUpdate, Backend):
    """Every operation on one GPU, see `CudaDevice`."""

    def fused_pair(self, first: Operation, second: Operation) -> FusedPair | None:
        fuse = FUSED.get((type(first), type(second)))
        return None if fuse is None else fuse(self, first, second)


def _convolution_and_max_pool(backend: CupyBackend, first: Convolution, second: MaxPool) -> FusedPair | None:
    if first.groups > 1:
        return None  # not one product
    return ConvPool(backend, backend._pool, first, second)


# What is faster as one operation here, by what the first and the second are.
FUSED: dict[tuple[type, type], Callable[[Any, Any, Any], FusedPair | None]] = {
    (Convolution, MaxPool): _convolution_and_max_pool,
}
