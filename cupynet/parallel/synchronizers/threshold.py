"""Threshold encoding of updates: values are accumulated until they reach a threshold.

As in Deeplearning4j's SHARED_GRADIENTS (after Strom 2015, "Scalable distributed DNN training using commodity GPU cloud
computing"), each worker adds its updates to a residual. When the residual of a weight reaches the threshold t, the
worker sends +t or -t and subtracts it from the residual.

A message is an int32 vector. Its header contains the threshold (the bits of a float32), the number of samples, and 1 if
the update is finite. Its body contains i + 1 to increase weight i by t, and -(i + 1) to decrease it by t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupynet.core.checks import instance, integer, number, object_named
from cupynet.core.errors import ConfigError
from cupynet.parallel.synchronizers.replica_view import is_finite

HEADER = 3  # int32 values
DECAY = 0.5 ** (1 / 20)  # halves the threshold in 20 steps
INITIAL = 1e-3  # Deeplearning4j starts at 1e-4, which takes 66 iterations to grow to this value
EPSILON = 1e-30  # smallest threshold, so that residuals of 0 are never sent


class Message(NamedTuple):
    """A worker's encoded update. The format of `body` is described above."""

    samples: int
    finite: bool
    threshold: float
    body: NDArray[np.int32]

    @classmethod
    def of(cls, vector: NDArray[np.int32]) -> Message:
        bits, samples, finite = vector[:HEADER].tolist()
        return cls(samples, bool(finite), float(np.int32(bits).view(np.float32)), vector[HEADER:])

    def vector(self) -> NDArray[np.int32]:
        bits = int(np.float32(self.threshold).view(np.int32))
        return np.concatenate([np.array([bits, self.samples, self.finite], np.int32), self.body])

    def add_to(self, weights: NDArray[Any], factor: float) -> None:
        """Add the updates, times `factor`, to weights (P,)."""
        step = weights.dtype.type(self.threshold * factor)
        weights[abs(self.body) - 1] += np.where(self.body > 0, step, -step)


class Threshold:
    """Base class of threshold rules, one per worker. `threshold` is the threshold of the next message."""

    def __init__(self, initial: float, argument: str = "initial") -> None:
        self.initial = number(f"{type(self).__name__} {argument}", initial, minimum=EPSILON, below=1e30)
        self.threshold = self.initial

    def sent(self, share: float) -> None:
        """Choose the next threshold. `share` is the fraction of the weights in the last message."""

    def state(self) -> dict[str, Any]:
        return {"threshold": self.threshold}

    def restore(self, state: dict[str, Any]) -> None:
        self.threshold = state["threshold"]

    def _scale(self, factor: float) -> None:
        self.threshold = min(max(self.threshold * factor, EPSILON), 1e30)


class FixedThreshold(Threshold):
    """A constant threshold, best about the size of several accumulated updates and much smaller than the weights."""

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold, "threshold")

    def __str__(self) -> str:
        return f"a threshold of {self.initial:g}"


class TargetSparsity(Threshold):
    """Multiplies the threshold by `decay` if the fraction of weights sent is below `target`, otherwise divides it."""

    def __init__(self, target: float = 1e-3, initial: float = INITIAL, decay: float = DECAY) -> None:
        super().__init__(initial)
        self.target = number("TargetSparsity target", target, above=0, below=1)
        self.decay = number("TargetSparsity decay", decay, above=0, below=1)

    def __str__(self) -> str:
        return f"about {self.target:.2g} of the weights sent"

    def sent(self, share: float) -> None:
        self._scale(self.decay if share < self.target else 1 / self.decay)


class AdaptiveThreshold(Threshold):
    """Multiplies the threshold by `decay` if too few weights are sent, and divides it by `decay` if too many are.

    min_fraction, max_fraction: fractions of the weights between which the threshold does not change.
    """

    def __init__(
        self, initial: float = INITIAL, min_fraction: float = 1e-4, max_fraction: float = 1e-2, decay: float = DECAY
    ) -> None:
        super().__init__(initial)
        self.min_fraction = number("AdaptiveThreshold min_fraction", min_fraction, minimum=0, below=1)
        self.max_fraction = number("AdaptiveThreshold max_fraction", max_fraction, above=0, below=1)
        self.decay = number("AdaptiveThreshold decay", decay, above=0, below=1)
        if self.min_fraction > self.max_fraction:
            raise ConfigError(
                f"must be at most `max_fraction`, which is {max_fraction:g}",
                "AdaptiveThreshold min_fraction",
                f"{min_fraction:g}",
            )

    def __str__(self) -> str:
        return f"{self.min_fraction:.2g} to {self.max_fraction:.2g} of the weights sent"

    def sent(self, share: float) -> None:
        if not self.min_fraction <= share <= self.max_fraction:
            self._scale(self.decay if share < self.min_fraction else 1 / self.decay)


class ThresholdEncoding:
    """Encodes a worker's updates as messages, and accumulates the residual.

    Args:
        algorithm: rule for the threshold; `AdaptiveThreshold()` by default.
        clip_residual_every: iterations between clippings of the residual, so that stale updates do not persist; 0 to
            disable clipping.
        clip_residual: maximum magnitude of residuals after clipping, as a multiple of the threshold.

    Attributes:
        residual: unsent updates, (P,), on the host; exists after `start`.
    """

    def __init__(
        self, algorithm: Threshold | None = None, clip_residual_every: int = 5, clip_residual: float = 5.0
    ) -> None:
        chosen = AdaptiveThreshold() if algorithm is None else algorithm
        self.algorithm = instance("algorithm", chosen, Threshold, "AdaptiveThreshold()")
        self.clip_residual_every = integer("clip_residual_every", clip_residual_every, 0)
        self.clip_residual = number("clip_residual", clip_residual, minimum=1)
        self._encoded = 0

    def __str__(self) -> str:
        return str(self.algorithm)

    def start(self, length: int, weights: int, dtype: Any) -> None:
        """Allocate the residual for `length` values (less than 2^31), `weights` weights followed by padding."""
        self.residual: NDArray[Any] = np.zeros(length, dtype)
        self._weights = weights

    def encode(self, update: NDArray[Any], samples: int) -> Message:
        """Add an update (P,) to the residual and return a message. If `samples` is 0, only return an empty message."""
        if not samples:
            return Message(0, True, 0.0, np.empty(0, np.int32))
        residual, finite = self.residual, is_finite(update)
        residual += update
        threshold = float(np.float32(self.algorithm.threshold))  # as the receivers decode it
        body = _take(residual, residual.dtype.type(threshold))
        self._encoded += 1
        if self.clip_residual_every and self._encoded % self.clip_residual_every == 0:
            limit = residual.dtype.type(self.clip_residual * threshold)
            np.clip(residual, -limit, limit, out=residual)
        if self._weights:  # a stage of a pipeline may have none
            self.algorithm.sent(len(body) / self._weights)
        return Message(samples, finite, threshold, body)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, except `residual`: numbers by name."""
        return {"encoded": self._encoded, "algorithm": self.algorithm.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._encoded = state["encoded"]
        self.algorithm.restore(state["algorithm"])


def _take(residual: NDArray[Any], step: Any) -> NDArray[np.int32]:
    """Move each residual of at least one step toward zero by one step. Return the body of the message."""
    indices = np.flatnonzero(abs(residual) >= step)
    values = residual[indices]
    positive = values > 0
    residual[indices] = values - np.where(positive, step, -step)
    return np.where(positive, indices + 1, -indices - 1).astype(np.int32)


def encoding_of(value: str | ThresholdEncoding | None) -> ThresholdEncoding | None:
    names, example = {"threshold": ThresholdEncoding}, "ThresholdEncoding(), or None"
    return None if value is None else object_named("encoding", value, names, ThresholdEncoding, example)
