"""The backend `cupy`: CuPy arrays, cuBLAS products, and the kernels of this package for everything else."""

from __future__ import annotations

from cupynet.backend.backend import Backend
from cupynet.backend.cuda.conv import CudaConv
from cupynet.backend.cuda.conv_pool import ConvPool
from cupynet.backend.cuda.dropout import CudaDropout
from cupynet.backend.cuda.loss import CudaLoss
from cupynet.backend.cuda.norm import CudaNorm
from cupynet.backend.cuda.pool import CudaPool
from cupynet.backend.cuda.update import CudaUpdate
from cupynet.backend.fusion import Convolution, FusedPair
from cupynet.backend.window import Window


class CupyBackend(CudaConv, CudaPool, CudaNorm, CudaDropout, CudaLoss, CudaUpdate, Backend):
    """Every operation on one GPU, see `CudaDevice`."""

    def fused_pair(self, first: Convolution, pool: Window) -> FusedPair | None:
        return ConvPool(self, first, pool) if first.groups == 1 else None
