"""The data that callbacks receive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from numpy.typing import NDArray

from cupynet.training.evaluation import Evaluation


@dataclass(frozen=True)
class Spent:
    """Time and traffic of each worker; lists in rank order.

    Attributes:
        rounds_s, compute_s, data_s, averaging_s, waiting_s: seconds, see `Clock`.
        samples, bytes_sent: samples that the worker trained on, and bytes that it sent.
    """

    rounds_s: list[float]
    compute_s: list[float]
    data_s: list[float]
    averaging_s: list[float]
    waiting_s: list[float]
    samples: list[int]
    bytes_sent: list[int]

    def share(self, name: str) -> list[float]:
        """Return the share of each worker's time that `compute_s`, `data_s` ... takes, 0..1."""
        return [part / whole if whole else 0.0 for part, whole in zip(getattr(self, name), self.rounds_s, strict=True)]

    @property
    def averaging(self) -> float:
        """The smallest averaging share of any worker: the last one to arrive does not wait."""
        return min(self.share("averaging_s"))

    @property
    def data(self) -> float:
        """The largest share of waiting for batches, because the other workers wait for that one."""
        return max(self.share("data_s"))

    @classmethod
    def of(cls, table: NDArray[Any]) -> Spent:
        """Return the times from the figures of all workers, (W, figures) in the order of `SPENT`."""
        *seconds, samples, sent = table.T
        counts = [[int(count) for count in column] for column in (samples, sent)]
        return cls(*(column.tolist() for column in seconds), *counts)


SPENT = tuple(each.name for each in fields(Spent))  # a `Clock` has the same attributes


@dataclass(frozen=True)
class IterationRecord:
    """Figures since the last report.

    Attributes:
        iteration, epoch: iterations and complete epochs so far.
        learning_rate: of the last iteration.
        loss, accuracy: mean loss of this replica's samples since the last report, and the fraction predicted correctly.
            The accuracy is NaN if it was not counted.
        score_after_averaging: mean loss of all replicas' samples between the last two averaging steps; NaN if there was
            none.
        images_per_s: of all replicas together.
        compute_s, data_s, averaging_s, waiting_s: seconds of this worker, see `Clock`.
        drift: the largest relative distance of a replica from the mean, as last measured since the last report; else
            NaN. In a pipeline the maximum over stages, an upper bound for the whole network.
        drift_by_layer: the same for each layer's weights; empty if it was not measured.
        bytes_sent: by all workers to each other in this run.
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
    """The end of an epoch.

    Attributes:
        epoch, iteration: complete epochs and iterations so far.
        samples: samples of all replicas in this epoch.
        train_s: seconds of its iterations, without the evaluation.
        split: `test` or `validation`, the data set of the evaluation.
        evaluation: None if this epoch was not evaluated.
        spent: time and traffic of each worker in this epoch; `bytes_sent` includes the evaluation.
        bytes_sent: by all workers to each other in this run.
        loss: the training loss: the mean over this epoch's samples, each at the time of its iteration; NaN if there
            were none.
        losses: the training loss of each worker, in rank order; NaN for a worker without samples, and for all pipeline
            stages but the last.
        accuracy: the training accuracy: the fraction of correct predictions, 0..1; with `binary_cross_entropy` targets,
            of outputs on the right side of 1/2. NaN for other targets.
        learning_rate: of the last iteration.
        drift, drift_by_layer: as last measured since the last report, see `IterationRecord`.
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
        """Training images per second of all replicas together."""
        return self.samples / self.train_s if self.train_s else 0.0


class StopReason(IntEnum):
    """Why training ends before its last epoch."""

    REQUEST = 1  # `stop` was called
    SIGNAL = 2  # the process received a signal
    EARLY = 3  # early stopping
    DIVERGED = 4  # a value is not finite


@dataclass(frozen=True)
class Stop:
    """A request to stop training; after a fit, why it ended early. text: shown to the user."""

    reason: StopReason
    text: str

    @property
    def urgent(self) -> bool:
        """True after a signal: the result is saved at once, without another evaluation."""
        return self.reason is StopReason.SIGNAL

    @property
    def interrupts(self) -> bool:
        """True if the fit was interrupted and its last weights can be trained further."""
        return self.reason in (StopReason.REQUEST, StopReason.SIGNAL)
