"""Updates in few bytes: what is too small to be sent waits until it has added up.

As in Deeplearning4j's SHARED_GRADIENTS (after Strom 2015, "Scalable distributed DNN training using commodity GPU cloud
computing"): a worker's updates are added to its residual; each weight whose residual has reached the threshold t is
sent as +t or -t, and that is subtracted; the rest stays.

A message is a vector of int32: how it is written, the threshold (the bits of a float32), how many samples it is worth,
whether the sender is finite, and the body. A sparse body lists i + 1 for a weight i that grows by t, -(i + 1) for one
that shrinks. Where more than a sixteenth of the weights would be listed it is two bitmaps, of those that grow and of
those that shrink: a sixteenth of the weights in words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupynet.core.checks import guess, instance, integer, number, refusal, shown
from cupynet.core.errors import ConfigError
from cupynet.parallel.synchronizers.base import is_finite

SPARSE, BITMAP = 0, 1
HEADER = 4  # words
DECAY = 0.5 ** (1 / 20)  # twenty steps halve a threshold
EPSILON = 1e-30  # no threshold falls below it: residuals of exactly nothing are not news


class Message(NamedTuple):
    """What a worker sent.

    Attributes:
        samples: how many samples the update is of.
        finite: whether it is finite.
        threshold: t.
        body: of one of the two forms.
        sparse: which of them.
    """

    samples: int
    finite: bool
    threshold: float
    body: NDArray[np.int32]
    sparse: bool

    @classmethod
    def of(cls, vector: NDArray[np.int32]) -> Message:
        """What a vector that `encode` made says."""
        kind, bits, samples, finite = vector[:HEADER].tolist()
        threshold = float(np.int32(bits).view(np.float32))
        return cls(samples, bool(finite), threshold, vector[HEADER:], kind == SPARSE)

    def vector(self) -> NDArray[np.int32]:
        """As it travels."""
        bits = int(np.float32(self.threshold).view(np.int32))
        kind = SPARSE if self.sparse else BITMAP
        return np.concatenate([np.array([kind, bits, self.samples, self.finite], np.int32), self.body])

    def add_to(self, weights: NDArray[Any], factor: float) -> None:
        """Make its steps, times `factor`, in (P,) weights."""
        step = weights.dtype.type(self.threshold * factor)
        if self.sparse:
            weights[abs(self.body) - 1] += np.where(self.body > 0, step, -step)
            return
        grows, shrinks = np.unpackbits(self.body.view(np.uint8)).view(np.int8).reshape(2, -1)[:, : len(weights)]
        weights += (grows - shrinks) * step


class Threshold:
    """A rule that decides what is sent; each worker has its own.

    Args:
        initial: the first threshold.

    Attributes:
        threshold: of the next message.
    """

    def __init__(self, initial: float) -> None:
        self.initial = number(f"{type(self).__name__} {self._name}", initial, minimum=EPSILON, below=1e30)
        self.threshold = self.initial

    _name = "initial"  # of the argument, in messages

    def sent(self, share: float) -> None:
        """This share of all weights was sent with `threshold`: choose the next one."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it: numbers by name."""
        return {"threshold": self.threshold}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.threshold = state["threshold"]

    def _scale(self, factor: float) -> None:
        self.threshold = min(max(self.threshold * factor, EPSILON), 1e30)


class FixedThreshold(Threshold):
    """Always the same.

    Args:
        threshold: the step a weight makes; small against the weights, and of the size of some iterations' updates.

    Raises:
        ConfigError: it cannot be one.
    """

    _name = "threshold"

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)

    def __str__(self) -> str:
        return f"a threshold of {self.initial:g}"


class TargetSparsity(Threshold):
    """Lower whenever less than a share of the weights was sent, higher whenever more.

    Args:
        target: that share, 0 to 1.
        initial: the first threshold.
        decay: the factor by which it is lowered, and the divisor by which it is raised.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(self, target: float = 1e-3, initial: float = 1e-4, decay: float = DECAY) -> None:
        super().__init__(initial)
        self.target = number("TargetSparsity target", target, above=0, below=1)
        self.decay = number("TargetSparsity decay", decay, above=0, below=1)

    def __str__(self) -> str:
        return f"about {self.target:.2g} of the weights sent"

    def sent(self, share: float) -> None:
        self._scale(self.decay if share < self.target else 1 / self.decay)


class AdaptiveThreshold(Threshold):
    """Lower when too few weights were sent, higher when too many, the same in between.

    Args:
        initial: the first threshold.
        fewest, most: the shares of the weights, 0 to 1, between which it stays as it is.
        decay: the factor by which it is lowered, and the divisor by which it is raised.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(self, initial: float = 1e-4, fewest: float = 1e-4, most: float = 1e-2, decay: float = DECAY) -> None:
        super().__init__(initial)
        self.fewest = number("AdaptiveThreshold fewest", fewest, minimum=0, below=1)
        self.most = number("AdaptiveThreshold most", most, above=0, below=1)
        self.decay = number("AdaptiveThreshold decay", decay, above=0, below=1)
        if self.fewest > self.most:
            raise ConfigError(f"AdaptiveThreshold fewest={fewest:g}: must be at most `most`, which is {most:g}")

    def __str__(self) -> str:
        return f"{self.fewest:.2g} to {self.most:.2g} of the weights sent"

    def sent(self, share: float) -> None:
        if not self.fewest <= share <= self.most:
            self._scale(self.decay if share < self.fewest else 1 / self.decay)


class ThresholdEncoding:
    """A worker's residual, and how it makes messages of it.

    Args:
        algorithm: what decides on the threshold; `AdaptiveThreshold()` by default.
        clip_residual_every: iterations after which residuals are cut to `clip_residual` thresholds, so that what was
            wished for long ago does not go on for ever; 0 for never.
        clip_residual: in thresholds.

    Attributes:
        residual: what has not been sent, (P,), on the host; exists after `start`.

    Raises:
        ConfigError: an argument cannot work.
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

    def start(self, count: int, dtype: Any) -> None:
        """Nothing is left over of `count` weights, which are fewer than 2^31."""
        self.residual: NDArray[Any] = np.zeros(count, dtype)

    def encode(self, update: NDArray[Any], samples: int) -> Message:
        """What is large enough of an update, (P,), of so many samples, and of the residual; the rest stays there.

        Of no samples there is no update, and nothing is said.
        """
        if not samples:
            return Message(0, True, 0.0, np.empty(0, np.int32), True)
        residual, finite = self.residual, is_finite(update)
        residual += update
        threshold = float(np.float32(self.algorithm.threshold))  # as the others will read it
        sent, sparse, body = _take(residual, residual.dtype.type(threshold))
        self._encoded += 1
        if self.clip_residual_every and self._encoded % self.clip_residual_every == 0:
            limit = residual.dtype.type(self.clip_residual * threshold)
            np.clip(residual, -limit, limit, out=residual)
        if len(residual):  # a stage of a pipeline may have no weights
            self.algorithm.sent(sent / len(residual))
        return Message(samples, finite, threshold, body, sparse)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it besides `residual`: numbers by name."""
        return {"encoded": self._encoded, "algorithm": self.algorithm.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._encoded = state["encoded"]
        self.algorithm.restore(state["algorithm"])


def _take(residual: NDArray[Any], step: Any) -> tuple[int, bool, NDArray[np.int32]]:
    """Take a step out of every residual that is as large as one: how many, whether the body is sparse, and the body."""
    large = abs(residual) >= step
    count = int(np.count_nonzero(large))
    if count <= len(residual) // 16:
        places = np.flatnonzero(large)
        values = residual[places]
        grows = values > 0
        residual[places] = values - np.where(grows, step, -step)
        return count, True, np.where(grows, places + 1, -places - 1).astype(np.int32)
    bits = np.zeros((2, -(-len(residual) // 32) * 32), np.bool_)  # in whole words each
    grows, shrinks = bits[:, : len(residual)]
    np.greater_equal(residual, step, out=grows)
    np.less_equal(residual, -step, out=shrinks)
    residual -= (grows.view(np.int8) - shrinks.view(np.int8)) * step
    return count, False, np.packbits(bits).view(np.int32)


def encoding(value: str | ThresholdEncoding | None) -> ThresholdEncoding | None:
    """`threshold` with its defaults; an encoding, or None, as it is. Else a ConfigError."""
    if value is None or isinstance(value, ThresholdEncoding):
        return value
    if isinstance(value, str):
        if value != "threshold":
            also = f"must be threshold, a ThresholdEncoding, or null for none{guess(value, ['threshold'])}"
            raise refusal("encoding", shown(value), also)
        return ThresholdEncoding()
    return instance("encoding", value, ThresholdEncoding, "ThresholdEncoding(), or None")
