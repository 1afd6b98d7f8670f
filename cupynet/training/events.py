"""The data that callbacks receive: reports, records of epochs, reasons to stop."""

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
        samples: samples that the worker trained on.
        bytes_sent: bytes that it sent to others.
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
        """The averaging share of the worker that waits least: the last one to arrive does not wait at all."""
        return min(self.share("averaging_s"))

    @property
    def data(self) -> float:
        """The share of waiting for batches of the worker that waits longest: the others wait for it."""
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
        loss: mean over this replica's samples since the last report.
        accuracy: the share of these samples whose highest score was at the label, 0..1. NaN if it was not counted.
        score_after_averaging: mean over all replicas' samples between the last two averages; NaN if there was none.
        images_per_s: of all replicas together.
        compute_s, data_s, averaging_s, waiting_s: this worker's seconds in gradients and updates, waiting for batches,
            in its synchronizer, and waiting for other stages of a pipeline.
        drift: the largest relative distance of a replica from the mean, as last measured since the last report;
            NaN if it was not. In a pipeline, the largest of the stages': an upper bound of the whole network's.
        drift_by_layer: the same of each layer's weights alone; empty if it was not measured.
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
        epoch: complete epochs so far.
        iteration: iterations so far.
        samples: samples of all replicas in this epoch.
        train_s: seconds of its rounds, without the evaluation.
        split: `test` or `validation`, the data set of the evaluation.
        evaluation: None if this epoch was not evaluated.
        spent: what each worker spent on this epoch; `bytes_sent` includes the evaluation.
        bytes_sent: by all workers to each other in this run.
        loss: the training loss: the mean over the samples of this epoch, each with the weights that its replica had
            then. NaN if there were none.
        losses: the same of each worker's own samples, in rank order. NaN for a worker without samples, and for all
            stages of a pipeline but the last.
        accuracy: the training accuracy: the share of these samples whose highest score was at the label, 0..1; or of
            outputs on the right side of 1/2, with `binary_cross_entropy` and targets. NaN for other targets.
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
        """Of all replicas together."""
        return self.samples / self.train_s if self.train_s else 0.0


class StopReason(IntEnum):
    """Why training ends before its last epoch; workers send each other the number."""

    REQUEST = 1  # `stop` was called
    SIGNAL = 2  # the process received a signal
    EARLY = 3  # early stopping
    DIVERGED = 4  # a value is not finite


@dataclass(frozen=True)
class Stop:
    """A request to end training; after a fit, why it ended early. text: shown to the user."""

    reason: StopReason
    text: str

    @property
    def urgent(self) -> bool:
        """True after a signal: the result is saved at once, without another evaluation."""
        return self.reason is StopReason.SIGNAL

    @property
    def interrupts(self) -> bool:
        """True if the fit was cut short, so that its last weights can be trained further; else it has its result."""
        return self.reason in (StopReason.REQUEST, StopReason.SIGNAL)
