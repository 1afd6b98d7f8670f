"""Dropout on the CPU, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend import philox
from cupynet.backend.array import Array
from cupynet.backend.cpu.device import flat
from cupynet.backend.cpu.kernels import dropout as dropout_kernels
from cupynet.backend.reference.dropout import DropoutOps


class NumbaDropout(DropoutOps):
    """See `DropoutOps`."""

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        out = self.borrow(x.shape) if out is None else out
        rows, samples = (len(x), -1), np.ascontiguousarray(samples, np.int64)
        if not flat(x, out) or samples.shape != x.shape[:1]:
            return super().dropout(x, samples, epoch, key, rate, out)
        draw = (
            int(np.reshape(epoch, -1)[0]),
            key & philox.MASK,
            key >> 32,
            philox.dropped_below(rate),
            x.dtype.type(1 / (1 - rate)),
        )
        dropout_kernels.dropout(x.reshape(rows), out.reshape(rows), samples, *draw)
        return out
