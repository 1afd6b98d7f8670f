"""Dropout on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend import philox
from cupynet.backend.array import Array
from cupynet.backend.cuda.device import CudaDevice
from cupynet.backend.reference.dropout import DropoutOps


class CudaDropout(CudaDevice, DropoutOps):
    """See `DropoutOps`."""

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        out = self.borrow(x.shape) if out is None else out
        size = x.size // max(len(x), 1)
        when = self.asarray(np.full(1, epoch, np.int64)) if isinstance(epoch, int) else epoch
        draw = key & philox.MASK, key >> 32, philox.dropped_below(rate), 1 / (1 - rate)
        arguments = x, out, self.asarray(samples), when, *draw, len(x), size
        self.kernels.images(f"dropout_{self._kind}", len(x), -(-size // 4), *arguments)
        return out
