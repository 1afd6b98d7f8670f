"""Records passed to callbacks, and reasons for stopping training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from numpy.typing import NDArray

from cupynet.training.evaluation import Evaluation


@dataclass(frozen=True)
class Spent:
    """Seconds (see `Clock`), samples and bytes sent, each as a list over workers in rank order."""

    rounds_s: list[float]
    compute_s: list[float]
    data_s: list[float]
    averaging_s: list[float]
    waiting_s: list[float]
    samples: list[int]
    bytes_sent: list[int]

    def share(self, name: str) -> list[float]:
        """Return the fraction of each worker's time, 0..1, spent on `name`, such as `compute_s`."""
        return [part / whole if whole else 0.0 for part, whole in zip(getattr(self, name), self.rounds_s, strict=True)]

    @property
    def averaging(self) -> float:
        """The fraction of time spent averaging: the minimum over workers, because the last to arrive does not wait."""
        return min(self.share("averaging_s"))

    @property
    def data(self) -> float:
        """The fraction of time spent waiting for batches: the maximum over workers, as all wait for the slowest."""
        return max(self.share("data_s"))

    @classmethod
    def of(cls, table: NDArray[Any]) -> Spent:
        """Create an instance from a table with a row for each worker and columns in the order of `SPENT`."""
        *seconds, samples, sent = table.T
        counts = [[int(count) for count in column] for column in (samples, sent)]
        return cls(*(column.tolist() for column in seconds), *counts)


SPENT = tuple(each.name for each in fields(Spent))  # `Clock` has attributes of the same names


@dataclass(frozen=True)
class IterationRecord:
    """Measurements since the last report.

    Attributes:
        iteration, epoch: completed iterations and epochs.
        learning_rate: the rate of the last iteration.
        loss, accuracy: mean training loss and accuracy of this replica; NaN if unknown.
        score_after_averaging: mean loss over all replicas between the last two averaging steps; NaN if not computed.
        images_per_s: training images per second over all replicas.
        compute_s, data_s, averaging_s, waiting_s: seconds of this worker (see `Clock`).
        drift: the largest relative distance of a replica from the mean, |w - mean| / |mean|, at the last measurement
            since the previous report; NaN if not measured. In a pipeline, this is the maximum over the stages, which is
            an upper bound for the whole network.
        drift_by_layer: the same for the weights of each layer, by name; empty if not measured.
        bytes_sent: bytes sent between all workers so far in this run.
    """

    iteration: int
    epoch: int
    learning_rate: float
    loss: float
    score_after_averaging: float
    images_per_s: float
    compute_s: float
    data_s: float
    averaging_s: float
    waiting_s: float
    drift: float
    drift_by_layer: dict[str, float] = field(default_factory=dict)
    bytes_sent: int = 0
    accuracy: float = math.nan


@dataclass(frozen=True)
class EpochRecord:
    """Results of an epoch.

    Attributes:
        epoch, iteration: completed epochs and iterations.
        samples: number of samples on which all replicas trained in this epoch.
        train_s: seconds that this worker spent training, excluding evaluations and callbacks.
        split: the data set of the evaluation, `test` or `validation`.
        evaluation: the result of the evaluation; None if this epoch was not evaluated.
        spent: time and traffic of each worker in this epoch. `spent.bytes_sent` includes the evaluation.
        bytes_sent: bytes sent between all workers so far in this run.
        loss: mean training loss during this epoch; NaN without samples.
        losses: training loss of each worker, in rank order; NaN for workers without samples and for all pipeline stages
            but the last.
        accuracy: training accuracy during this epoch, 0..1: the fraction of samples classified correctly or, for
            targets of `binary_cross_entropy`, the fraction of outputs on the same side of 1/2 as their target. NaN for
            other targets.
        learning_rate: the rate of the last iteration.
        drift, drift_by_layer: the last measurement in this epoch (see `IterationRecord`); NaN and empty if there is
            none. A measurement after a full averaging interval takes precedence over one at the end of the epoch.
    """

    epoch: int
    iteration: int
    samples: int
    train_s: float
    split: str
    evaluation: Evaluation | None
    spent: Spent
    bytes_sent: int
    loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    learning_rate: float = math.nan
    drift: float = math.nan
    drift_by_layer: dict[str, float] = field(default_factory=dict)
    accuracy: float = math.nan

    @property
    def images_per_s(self) -> float:
        """Training images per second over all replicas."""
        return self.samples / self.train_s if self.train_s else 0.0


class StopReason(IntEnum):
    """Why training ended early."""

    REQUEST = 1  # `stop` was called
    SIGNAL = 2  # the process received a signal
    EARLY = 3  # early stopping
    DIVERGED = 4  # a loss, gradient or weight was not finite


@dataclass(frozen=True)
class Stop:
    """A request to stop training. `text` is shown to the user."""

    reason: StopReason
    text: str

    @property
    def urgent(self) -> bool:
        """True after a signal. The result is then saved at once, without another evaluation."""
        return self.reason is StopReason.SIGNAL

    @property
    def interrupts(self) -> bool:
        """True if the fit was interrupted and can be continued."""
        return self.reason in (StopReason.REQUEST, StopReason.SIGNAL)
