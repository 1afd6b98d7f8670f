"""Dropout on the CPU, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend import philox, shapes
from cupynet.backend.array import Array
from cupynet.backend.cpu.device import NumbaDevice
from cupynet.backend.cpu.kernels import dropout as dropout_kernels
from cupynet.backend.reference.dropout import DropoutOps


class NumbaDropout(NumbaDevice, DropoutOps):
    """See `DropoutOps`."""

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        if not self._stores(x) or not x.size or (out is not None and not self._stores(out)):
            return super().dropout(x, samples, epoch, key, rate, out)
        out = self.borrow(x.shape) if out is None else out
        shapes.alike("dropout", x, out)
        shapes.shape_of("dropout", "samples", samples, x.shape[:1])
        flat, samples = (len(x), -1), np.ascontiguousarray(samples, np.int64)
        draw = (
            int(np.reshape(epoch, -1)[0]),
            key & philox.MASK,
            key >> 32,
            philox.dropped_below(rate),
            x.dtype.type(1 / (1 - rate)),
        )
        dropout_kernels.dropout(x.reshape(flat), out.reshape(flat), samples, *draw)
        return out
