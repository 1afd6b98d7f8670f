"""Reference implementation of losses.

Elementwise losses map (xp, outputs, targets, parameter) to values and derivatives, for arrays (N, O). Labels are class
indices (N,) int64, or targets (N, O) float32, or (N, O + 1) with sample weights in the last column.
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
    """Compute -t · log s - (1 - t) · log(1 - s) with s = 1 / (1 + exp(-z)), without overflow."""
    e = xp.exp(-abs(z))
    return xp.maximum(z, 0) - z * t + xp.log1p(e), xp.where(z >= 0, 1 / (1 + e), e / (1 + e)) - t


def _hinge(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    sign = 2 * t - 1
    margin = 1 - sign * z
    return xp.maximum(margin, 0), xp.where(margin > 0, -sign, xp.zeros_like(sign))


def _huber(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    error = z - t
    magnitude = abs(error)
    value = xp.where(magnitude <= parameter, error * error / 2, parameter * (magnitude - parameter / 2))
    return value, xp.clip(error, -parameter, parameter)


TARGET_LOSSES: dict[str, Callable[[ModuleType, Array, Array, float], tuple[Array, Array]]] = {
    "squared": _squared,
    "logistic": _logistic,
    "hinge": _hinge,
    "huber": _huber,
}


def has_weights(labels: Array, outputs: int) -> bool:
    """Return True if labels are (N, O + 1). Raise ConfigError if their shape does not match the outputs."""
    if labels.shape[1] not in (outputs, outputs + 1):
        raise ConfigError(f"targets {labels.shape}: must be (N, {outputs}), or one column wider with sample weights")
    return bool(labels.shape[1] > outputs)


class LossOps(Device):
    def hits(self, scores: Array, labels: Array) -> Array:
        """Return the number of rows (N, C) whose argmax (the first on ties) is the label (N,), or the target's argmax.

        The result is a number, or a 0-d device array that the next call overwrites. Rows with NaN may or may not count.
        """
        classes = labels if labels.ndim == 1 else labels[:, : scores.shape[1]].argmax(axis=1)
        return (scores.argmax(axis=1) == classes).sum()

    def binary_hits(self, logits: Array, targets: Array) -> Array:
        """Return the number of logits (N, T) with the correct sign: positive if the target is above 1/2. See `hits`."""
        n, outputs = logits.shape
        scores = self.borrow((n, outputs, 2), logits.dtype)
        expected = self.borrow((n, outputs, 2), np.float32)
        scores[..., 0], scores[..., 1] = 0, logits
        expected[..., 0], expected[..., 1] = 0.5, targets[:, :outputs]  # excluding sample weights
        return self.hits(scores.reshape(-1, 2), expected.reshape(-1, 2))

    def softmax_cross_entropy(
        self, logits: Array, labels: Array, smoothing: float = 0.0, weights: tuple[float, ...] | None = None
    ) -> tuple[Array, Array]:
        """Return -sum_c t_c · log softmax(logits)_c (N,), and the gradient of the mean (N, O) times the loss scale.

        The target t is (1 - smoothing) · weight at the label, plus smoothing / O · weight at every class. If labels are
        (N, O) probabilities p, t is ((1 - smoothing) · p + smoothing / O) · weight. The next call may overwrite the
        losses.
        """
        xp, (n, classes), accumulate = self.xp, logits.shape, self.policy.accumulate
        shifted = logits.astype(accumulate)
        shifted -= shifted.max(axis=1, keepdims=True)  # (N, O)
        exponentials = xp.exp(shifted)
        sums = exponentials.sum(axis=1, keepdims=True)  # (N, 1)
        rows = xp.arange(n)
        class_weights = None if weights is None else self._constants(weights)  # (O,)
        if labels.ndim == 2:
            target, factor = self._targets(labels, classes)
            target = (
                ((1 - smoothing) * target + smoothing / classes)
                * (1 if class_weights is None else class_weights)
                * factor
            )
            losses = (target * (xp.log(sums) - shifted)).sum(axis=1)
            exponentials *= target.sum(axis=1, keepdims=True) / sums
            exponentials -= target
            return losses, self._scaled(exponentials, n)
        losses = xp.log(sums[:, 0]) - shifted[rows, labels]
        exponentials /= sums
        if weights is None and not smoothing:
            exponentials[rows, labels] -= 1
        else:
            class_weights = xp.ones(classes, accumulate) if class_weights is None else class_weights
            at_label = (1 - smoothing) * class_weights[labels]  # (N,)
            at_every_class = smoothing / classes * class_weights  # (O,)
            losses *= at_label
            if smoothing:
                losses += ((xp.log(sums) - shifted) * at_every_class).sum(axis=1)
            exponentials *= (at_label + at_every_class.sum())[:, None]
            exponentials -= at_every_class
            exponentials[rows, labels] -= at_label
        return losses, self._scaled(exponentials, n)

    def _scaled(self, slopes: Array, count: int) -> Array:
        """Return the gradient (N, O) of the mean of `count` values, times the loss scale, borrowed."""
        gradient = self.borrow(slopes.shape)
        gradient[...] = slopes * self.policy.accumulate.type(self.loss_scale / count)
        return gradient

    def _targets(self, labels: Array, outputs: int) -> tuple[Array, Array | int]:
        """Return targets (N, O), and sample weights (N, 1) or 1."""
        if labels.ndim == 1:
            target = self.xp.zeros((len(labels), outputs), self.policy.accumulate)
            target[self.xp.arange(len(labels)), labels] = 1
            return target, 1
        weighted, wide = has_weights(labels, outputs), labels.astype(self.policy.accumulate)
        return wide[:, :outputs], wide[:, outputs:] if weighted else 1

    def target_loss(self, kind: str, prediction: Array, labels: Array, parameter: float = 0.0) -> tuple[Array, Array]:
        """Return each sample's mean elementwise loss (N,), and the gradient (N, O) of their mean times the loss scale.

        kind: a name in `TARGET_LOSSES`. Class indices are one-hot encoded. The next call may overwrite the losses.
        """
        n, outputs = prediction.shape
        wide = prediction.astype(self.policy.accumulate)
        target, factor = self._targets(labels, outputs)
        values, slopes = TARGET_LOSSES[kind](self.xp, wide, target, parameter)
        return (values * factor).mean(axis=1), self._scaled(slopes * factor, n * outputs)
