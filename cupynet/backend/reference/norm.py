from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.reference.activation import ActivationOps


class NormOps(ActivationOps):
    def channel_moments(self, x: Array) -> Array:
        """Return the mean and biased variance of each channel: (..., C) -> (2, C), in accumulation precision."""
        rows = x.reshape(-1, x.shape[-1]).astype("float64")
        moments = self.borrow((2, x.shape[-1]), self.policy.accumulate)
        mean = rows.mean(axis=0)
        rows -= mean
        rows *= rows
        moments[0], moments[1] = mean, rows.mean(axis=0)
        return moments

    def track_moments(self, mean: Array, variance: Array, moments: Array, momentum: float, unbiased: float) -> None:
        """Set running = momentum · running + (1 - momentum) · moment in place. unbiased: factor for the variance."""
        for running, moment, factor in ((mean, moments[0], 1.0), (variance, moments[1], unbiased)):
            running *= momentum
            running += (1 - momentum) * factor * moment

    def normalize(
        self, x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float, *, relu: bool,
        around: Array | None = None,
    ) -> Array:  # fmt: skip
        """Compute (x - mean) / sqrt(variance + epsilon) · scale + shift by channel of x (..., C), then ReLU if `relu`.

        mean, variance: (C,) in accumulation precision. scale, shift: (C,) with the dtype of x. around: added before
        the ReLU; same shape and dtype as x.
        """
        wide = x.astype(self.policy.accumulate)
        wide -= mean
        wide *= scale.astype(self.policy.accumulate) / self.xp.sqrt(variance + epsilon)
        wide += shift.astype(self.policy.accumulate)
        if around is not None:
            wide += around.astype(self.policy.accumulate)
        y = self.borrow(x.shape)
        y[...] = self.xp.maximum(wide, 0) if relu else wide
        return y

    def normalize_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, variance: Array, epsilon: float
    ) -> Array:
        """Return the sums of dy and dy · x̂ by channel, (2, C). With y (of a ReLU), first set dy to 0 where y <= 0."""
        if y is not None:
            dy = self.relu_backward(dy, y)
        wide = x.astype("float64")
        wide -= mean
        wide /= self.xp.sqrt(variance + epsilon)
        wide *= dy
        sums = self.borrow((2, x.shape[-1]), self.policy.accumulate)
        sums[0] = dy.reshape(-1, x.shape[-1]).sum(axis=0, dtype="float64")
        sums[1] = wide.reshape(-1, x.shape[-1]).sum(axis=0)
        return sums

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float,
        epsilon: float, out: Array | None = None,
    ) -> Array:  # fmt: skip
        """Return dx = scale / σ · (dy - sums[0] / count - x̂ · sums[1] / count), (..., C), written to `out` or dy."""
        out = dy if out is None else out
        accumulate = self.policy.accumulate
        inverse = 1 / self.xp.sqrt(variance + epsilon)
        wide = x.astype(accumulate)
        wide -= mean
        wide *= inverse * sums[1] * (-1 / count)
        wide += dy.astype(accumulate)
        wide -= sums[0] * (1 / count)
        wide *= scale.astype(accumulate) * inverse
        out[...] = wide
        return out

    def normalize_rows(self, x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array]:
        """Return (x - mean) · r · scale + shift with r = 1 / sqrt(variance + epsilon) for each row, and (mean, r).

        (N, F), (F,), (F,) -> (N, F), (N, 2) in accumulation precision.
        """
        accumulate = self.policy.accumulate
        wide = x.astype(accumulate)
        moments = self.borrow((len(x), 2), accumulate)
        moments[:, 0] = wide.mean(axis=1, dtype=np.float64)  # sums of long rows are inexact in float32
        wide -= moments[:, :1]
        moments[:, 1] = 1 / self.xp.sqrt((wide * wide).mean(axis=1) + epsilon)
        wide *= moments[:, 1:]
        wide *= scale.astype(accumulate)
        wide += shift.astype(accumulate)
        y = self.borrow(x.shape)
        y[...] = wide
        return y, moments

    def normalize_rows_backward(
        self, dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, *, need_dx: bool
    ) -> Array | None:
        """Add the gradients of scale and shift (F,). Return dx (N, F), in place in dy, or None. moments: (N, 2)."""
        accumulate = self.policy.accumulate
        wide, normal = dy.astype(accumulate), x.astype(accumulate)
        normal -= moments[:, :1]
        normal *= moments[:, 1:]
        scale_grad += (wide * normal).sum(axis=0)
        shift_grad += wide.sum(axis=0)
        if not need_dx:
            return None
        wide *= scale.astype(accumulate)
        normal *= (wide * normal).mean(axis=1, keepdims=True)
        normal += wide.mean(axis=1, keepdims=True)
        wide -= normal
        wide *= moments[:, 1:]
        dy[...] = wide
        return dy
