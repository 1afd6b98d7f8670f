from __future__ import annotations

from typing import Any

from cupynet.backend import philox
from cupynet.backend.array import Array
from cupynet.backend.device import Device


class DropoutOps(Device):
    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        """Return x (N, ...) in `out`, with values set to 0 with probability `rate`, and otherwise divided by 1 - rate.

        The zeros depend only on the key, the epoch, the sample and the position within the sample (see philox.py).
        samples: (N,) int64. epoch: a number, or a device array of one element. key: 64 bits. out: may be x; borrowed by
        default.
        """
        out = self.borrow(x.shape) if out is None else out
        rows = x.reshape(len(x), -1)
        random = philox.of_examples(self.xp, samples, epoch, key, rows.shape[1])
        scaled = rows.astype(self.policy.accumulate) * self.policy.accumulate.type(1 / (1 - rate))
        zero = self.policy.accumulate.type(0)  # not a product, because 0 times NaN is NaN
        out.reshape(len(x), -1)[...] = self.xp.where(random >= philox.dropped_below(rate), scaled, zero)
        return out
