from __future__ import annotations

from typing import Any

from cupynet.backend import philox
from cupynet.backend.array import Array
from cupynet.backend.device import Device


class DropoutOps(Device):
    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        """Each value of x is 0 with probability `rate`, else x / (1 - rate): (N, ...), (N,) int64.

        The zeros depend only on the 64-bit key, epoch, sample and place in the example, see philox.py. `epoch` may be
        an array of one element on the device. `out` may be x; by default it is borrowed.
        """
        out = self.borrow(x.shape) if out is None else out
        rows = x.reshape(len(x), -1)
        drawn = philox.of_examples(self.xp, samples, epoch, key, rows.shape[1])
        kept = rows.astype(self.policy.accumulate) * self.policy.accumulate.type(1 / (1 - rate))
        zero = self.policy.accumulate.type(0)  # no product: 0 times NaN is NaN
        out.reshape(len(x), -1)[...] = self.xp.where(drawn >= philox.dropped_below(rate), kept, zero)
        return out
