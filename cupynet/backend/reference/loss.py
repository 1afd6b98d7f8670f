"""Reference implementation of losses.

Elementwise losses map (xp, outputs, targets, parameter) to (values, slopes), all (N, O). Labels are class numbers (N,)
int64; or targets (N, O) float32; or (N, O + 1) with the weight of each example in the last column.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.device import Device
from cupynet.core.errors import ConfigError


def _squared(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    return (z - t) ** 2, 2 * (z - t)


def _logistic(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    """-t · log s - (1 - t) · log(1 - s) with s = 1 / (1 + exp(-z)), without overflow."""
    e = xp.exp(-abs(z))
    return xp.maximum(z, 0) - z * t + xp.log1p(e), xp.where(z >= 0, 1 / (1 + e), e / (1 + e)) - t


def _hinge(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    sign = 2 * t - 1
    margin = 1 - sign * z
    return xp.maximum(margin, 0), xp.where(margin > 0, -sign, xp.zeros_like(sign))


def _huber(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    off = z - t
    size = abs(off)
    value = xp.where(size <= parameter, off * off / 2, parameter * (size - parameter / 2))
    return value, xp.clip(off, -parameter, parameter)


TARGET_LOSSES: dict[str, Callable[[ModuleType, Array, Array, float], tuple[Array, Array]]] = {
    "squared": _squared,
    "logistic": _logistic,
    "hinge": _hinge,
    "huber": _huber,
}


def has_weights(labels: Array, outputs: int) -> bool:
    """Return True if labels are (N, O + 1). Raise ConfigError if they do not fit the outputs."""
    if labels.shape[1] not in (outputs, outputs + 1):
        raise ConfigError(
            f"targets {labels.shape}: must be (N, {outputs}), one column per output, or with a column of weights"
        )
    return bool(labels.shape[1] > outputs)


class LossOps(Device):
    """Per-example losses, the gradient of the mean loss, and the number of hits."""

    def hits(self, scores: Array, labels: Array) -> Array:
        """Return the number of rows (N, C) whose argmax (the first on ties) is the label (N,).

        The label of a row of targets is its argmax. The result is a number, or a 0-d device array that the next call
        overwrites. Rows with NaN may count or not.
        """
        own = labels if labels.ndim == 1 else labels[:, : scores.shape[1]].argmax(axis=1)
        return (scores.argmax(axis=1) == own).sum()

    def binary_hits(self, logits: Array, targets: Array) -> Array:
        """Return the number of logits (N, T) that are positive if and only if the target is above 1/2. See `hits`."""
        n, outputs = logits.shape
        scores = self.borrow((n, outputs, 2), logits.dtype)
        wanted = self.borrow((n, outputs, 2), np.float32)
        scores[..., 0], scores[..., 1] = 0, logits
        wanted[..., 0], wanted[..., 1] = 0.5, targets[:, :outputs]  # without the weights of examples
        return self.hits(scores.reshape(-1, 2), wanted.reshape(-1, 2))

    def softmax_cross_entropy(
        self, logits: Array, labels: Array, smoothing: float = 0.0, weights: tuple[float, ...] | None = None
    ) -> tuple[Array, Array]:
        """-sum_c t_c · log softmax(logits)_c of each example (N,); gradient of the mean (N, O), times the loss scale.

        The target t is (1 - smoothing) · weight at the label, plus smoothing / O · weight at every class. If labels are
        (N, O) probabilities p, t is ((1 - smoothing) · p + smoothing / O) · weight. Read the losses before the next
        call, which may overwrite them.
        """
        xp, (n, classes), accumulate = self.xp, logits.shape, self.policy.accumulate
        shifted = logits.astype(accumulate)
        shifted -= shifted.max(axis=1, keepdims=True)  # (N, O)
        exponentials = xp.exp(shifted)
        sums = exponentials.sum(axis=1, keepdims=True)  # (N, 1)
        rows = xp.arange(n)
        own = None if weights is None else self._constants(weights)  # (O,)
        if labels.ndim == 2:
            target, factor = self._targets(labels, classes)
            target = ((1 - smoothing) * target + smoothing / classes) * (1 if own is None else own) * factor
            losses = (target * (xp.log(sums) - shifted)).sum(axis=1)
            exponentials *= target.sum(axis=1, keepdims=True) / sums
            exponentials -= target
            return losses, self._scaled(exponentials, n)
        losses = xp.log(sums[:, 0]) - shifted[rows, labels]
        exponentials /= sums
        if weights is None and not smoothing:
            exponentials[rows, labels] -= 1
        else:
            own = xp.ones(classes, accumulate) if own is None else own
            at_label, even = (1 - smoothing) * own[labels], smoothing / classes * own  # (N,), (O,)
            losses *= at_label
            if smoothing:
                losses += ((xp.log(sums) - shifted) * even).sum(axis=1)
            exponentials *= (at_label + even.sum())[:, None]
            exponentials -= even
            exponentials[rows, labels] -= at_label
        return losses, self._scaled(exponentials, n)

    def _scaled(self, slopes: Array, count: int) -> Array:
        """Return the gradient (N, O), borrowed, of the mean of `count` values: slopes times the loss scale."""
        gradient = self.borrow(slopes.shape)
        gradient[...] = slopes * self.policy.accumulate.type(self.loss_scale / count)
        return gradient

    def _targets(self, labels: Array, outputs: int) -> tuple[Array, Array | int]:
        """Return the targets (N, O) of labels, and the factors (N, 1) of the losses, or 1."""
        if labels.ndim == 1:
            target = self.xp.zeros((len(labels), outputs), self.policy.accumulate)
            target[self.xp.arange(len(labels)), labels] = 1
            return target, 1
        weighted, wide = has_weights(labels, outputs), labels.astype(self.policy.accumulate)
        return wide[:, :outputs], wide[:, outputs:] if weighted else 1

    def target_loss(self, kind: str, prediction: Array, labels: Array, parameter: float = 0.0) -> tuple[Array, Array]:
        """Return the mean elementwise loss of each example; class numbers are one-hot encoded.

        (N, O), (N, ...) -> (N,), and the gradient of their mean (N, O), times the loss scale. `kind` is `squared`,
        `logistic`, `hinge` or `huber`. Read the losses before the next call, which may overwrite them.
        """
        n, outputs = prediction.shape
        wide = prediction.astype(self.policy.accumulate)
        target, factor = self._targets(labels, outputs)
        values, slopes = TARGET_LOSSES[kind](self.xp, wide, target, parameter)
        return (values * factor).mean(axis=1), self._scaled(slopes * factor, n * outputs)
