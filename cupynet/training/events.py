"""What callbacks are handed: records of what happened, why training stopped, and a trainer as they may see it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.core.errors import ConfigError
from cupynet.nn import Model, Params
from cupynet.parallel import Communicator
from cupynet.training.evaluation import Evaluation


@dataclass(frozen=True)
class Spent:
    """What each worker has spent on some of the training; lists in rank order.

    Attributes:
        rounds_s, compute_s, data_s, averaging_s, waiting_s: seconds, see `Clock`.
        samples: how many this worker trained on.
        bytes_sent: what it sent to others.
    """

    rounds_s: list[float]
    compute_s: list[float]
    data_s: list[float]
    averaging_s: list[float]
    waiting_s: list[float]
    samples: list[int]
    bytes_sent: list[int]

    def share(self, name: str) -> list[float]:
        """The share of each worker's time that one of the seconds takes, 0..1."""
        return [part / whole if whole else 0.0 for part, whole in zip(getattr(self, name), self.rounds_s, strict=True)]

    @classmethod
    def of(cls, table: NDArray[Any]) -> Spent:
        """From what workers gathered: (W, figures) in the order of `SPENT`."""
        *seconds, samples, sent = table.T
        counts = [[int(count) for count in column] for column in (samples, sent)]
        return cls(*(column.tolist() for column in seconds), *counts)


SPENT = tuple(each.name for each in fields(Spent))  # the figures, which are attributes of a `Clock` too


@dataclass(frozen=True)
class Report:
    """How training went since the last report.

    Attributes:
        iteration, epoch: iterations and complete epochs so far.
        learning_rate: of the last iteration.
        loss: mean over this replica's samples since the last report.
        score_after_averaging: mean over all replicas' samples between the last two averages; NaN if there was none.
        images_per_s: of all replicas together.
        compute_s, data_s, averaging_s, waiting_s: this worker's seconds in gradients and updates, waiting for batches,
            in its synchronizer, and waiting for other stages of a pipeline.
        divergence: the largest relative distance of a replica from the mean, as last measured since the last report;
            NaN if it was not. Stages of a pipeline learn of each other's when workers agree the next time; it is the
            largest of the stages' then, and that of the whole network is at most that.
        divergence_by_layer: the same of each layer's weights alone; empty if it was not measured.
        bytes_sent: by all workers to each other in this run, as known when they last agreed.
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
    divergence: float
    divergence_by_layer: dict[str, float] = field(default_factory=dict)
    bytes_sent: int = 0


@dataclass(frozen=True)
class EpochRecord:
    """The end of an epoch.

    Attributes:
        epoch: complete epochs so far.
        iteration: iterations so far.
        samples: how many samples all replicas were given in this epoch.
        train_s: seconds of its rounds, evaluation excluded.
        split: `test` or `validation`, what the evaluation was made on.
        evaluation: None where this epoch was not evaluated.
        spent: what each worker spent on this epoch, evaluation excluded but for what it sent.
        bytes_sent: by all workers to each other in this run.
        loss: the training loss: mean over the samples of this epoch that all replicas trained on, each with the weights
            that the replica had then. NaN where there were none.
        losses: the same of each worker's own samples, in rank order. NaN where a worker had none; in a pipeline the
            last stages alone have any.
        learning_rate: of the last iteration.
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

    @property
    def images_per_s(self) -> float:
        """Of all replicas together."""
        return self.samples / self.train_s if self.train_s else 0.0


STOP_BYTES = 200  # of the text that tells why


class StopReason(IntEnum):
    """Why training ends before its last epoch; the number is what workers tell each other."""

    REQUEST = 1  # somebody called `stop`
    SIGNAL = 2  # the process was told to end
    EARLY = 3  # a rule found that going on is of no use


@dataclass(frozen=True)
class Stop:
    """A wish to end training.

    Attributes:
        reason: why.
        text: what to tell people; cut after 200 bytes of UTF-8, which is what workers send each other.

    Raises:
        ConfigError: the reason is no `StopReason`, or the text is no str.
    """

    reason: StopReason
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ConfigError(f"stop: text={self.text!r}: must be a text that says why, and a StopReason may follow it")
        if self.reason not in list(StopReason):
            raise ConfigError(
                f"stop: reason={self.reason!r}: must be a StopReason: {', '.join(StopReason.__members__)}"
            )
        object.__setattr__(self, "reason", StopReason(self.reason))
        object.__setattr__(self, "text", self.text.encode()[:STOP_BYTES].decode(errors="ignore"))


class Piece(NamedTuple):
    """A call that a round or an evaluation is made of, for who times it: a method of an object, which may be put aside.

    Attributes:
        owner, method: whose call it is, and its name there.
        name: what people call it.
        kind: `data`, `forward`, `backward`, `update`, `averaging`, `evaluation`, `waiting` or `training`, the rest.
    """

    owner: object
    method: str
    name: str
    kind: str


class TrainerView(Protocol):
    """A worker's trainer, as its callbacks see it.

    Weights may be changed only in `Callback.before_finish`, of each replica its own, and in `after_finish` and
    `on_diverged`, by a callback that runs on every rank and does the same on each; `params.publish` lets the layers see
    it.
    """

    @property
    def rank(self) -> int:
        """This worker's number; callbacks without `every_rank` run on rank 0."""

    @property
    def workers(self) -> int:
        """How many workers there are."""

    @property
    def world(self) -> Communicator:
        """The way to the other workers, for a callback that runs on every rank: each must make the same calls."""

    @property
    def replicas(self) -> Communicator:
        """The way to the workers that train the same layers as this one: all of them, but in a pipeline."""

    @property
    def model(self) -> Model:
        """This worker's replica of the network; in a pipeline its stage's layers."""

    @property
    def whole(self) -> Model:
        """The whole network in this process; that of rank 0 is the user's own.

        In a pipeline it is complete only there, when an evaluation is told of, and after the fit.
        """

    @property
    def params(self) -> Params:
        """This worker's weights: of the whole network, or of its stage of a pipeline."""

    @property
    def backend(self) -> Backend:
        """Where these weights live."""

    @property
    def iteration(self) -> int:
        """Iterations so far: updates of each replica, counted in rounds."""

    @property
    def total_iterations(self) -> int:
        """What `iteration` will be at the end of this `fit`."""

    @property
    def epoch(self) -> int:
        """Complete epochs so far."""

    @property
    def total_epochs(self) -> int:
        """What `epoch` will be at the end of this `fit`."""

    @property
    def evaluation(self) -> Evaluation | None:
        """Of the last complete epoch, or of the weights that a callback chose at the end; None where there was none."""

    @property
    def stopped(self) -> Stop | None:
        """Why this fit ends early, once all workers have agreed that it does."""

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """Let all workers end after the same round; from any thread."""

    def pieces(self) -> list[Piece]:
        """The calls of this worker that a round and an evaluation are made of; layers are not among them."""

    def launch_singly(self, wanted: bool) -> None:
        """From the next round on ask a GPU for each operation by itself, or again for recorded steps, where it was so.

        Between two rounds. The results are the same.
        """

    def state(self) -> dict[str, Any]:
        """All that is needed to go on from here, on this worker: numbers, and arrays on the host, by name."""
