"""When replicas are brought together, and what of them.

A synchronizer is described by its constructor and bound by `start`, so that a configuration can name one. What is
needed between fits (residuals, momentum) lives on it from `start` on. Every method is called on every worker in every
round, whether that worker had a batch or not: each may hold collective operations.

A replica trains alone between averages. An average weights each replica by the samples it has seen since the last one,
so that with frequency 1 and a linear optimizer (SGD, momentum, Nesterov, without clipping) W replicas do what one does
on the concatenated batch, short batches and a last round with fewer workers included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cupynet.backend.array import Array
from cupynet.checks import flag, integer
from cupynet.errors import ConfigError, DivergedError
from cupynet.parallel.communicator import Communicator
from cupynet.parallel.replica import ReplicaView

Moment: TypeAlias = Literal["epoch", "evaluation", "fit"]


@dataclass(frozen=True)
class Average:
    """What one average found; the same on every worker.

    Attributes:
        score: mean loss of all samples that the replicas trained on since the last average; NaN where it was not
            asked for or nobody has it.
        divergence: the largest relative distance |w_r - mean| / |mean| of a replica from the mean; NaN where it was not
            measured.
    """

    score: float
    divergence: float


class Synchronizer:
    """Keeps replicas together. This one, used as it is, does nothing: for one replica alone.

    A subclass overrides what it needs. Gradients averaged in every iteration, so that all replicas stay one:

        class GradientMean(Synchronizer):
            def before_update(self, replica, samples):
                self.communicator.allreduce_mean([replica.params.grad], samples)
                return True

    Attributes:
        communicator: the way to the other replicas; exists after `start`.
        frequency: iterations between averages, or `epoch`, or `end`; None where no such rule is followed.
    """

    communicator: Communicator
    frequency: int | str | None = None

    def start(self, replica: ReplicaView, communicator: Communicator) -> None:
        """Bind to a worker's replica, once, when it has been made.

        Raises:
            ConfigError: this class itself is to keep several replicas together, which it does not.
        """
        if type(self) is Synchronizer and communicator.size > 1:
            raise ConfigError(
                f"Synchronizer keeps nothing together, and there are {communicator.size} workers: take "
                "ParameterAveraging or another subclass"
            )
        self.communicator = communicator

    def begin(self, replica: ReplicaView) -> None:
        """Before a fit, and before an evaluation outside of one.

        Replicas that should be identical now take over rank 0's weights, which somebody may have changed.
        """
        if self.identical and self.communicator.size > 1:
            for vector in self.shared(replica):
                self.communicator.broadcast(vector)
            replica.params.publish()

    def shared(self, replica: ReplicaView) -> list[Array]:
        """The flat vectors that replicas have in common whenever they are identical."""
        return [replica.params.master, *replica.optimizer_state.values()]

    def before_update(self, replica: ReplicaView, samples: int) -> bool:
        """After the gradients of a round: whether the optimizer is to move the weights.

        samples: how many this worker's gradients are of; 0 without a batch, and the gradients are zero.
        """
        return samples > 0

    def after_update(self, replica: ReplicaView, iteration: int) -> Average | None:
        """After iteration `iteration` (from 0). What was averaged, if anything: the same on every worker."""
        return None

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        """At the end of an `epoch`, of an epoch that is to be evaluated (`evaluation`), and of a `fit`.

        What was averaged, if anything. After a `fit` all replicas must be identical.
        """
        return None

    @property
    def identical(self) -> bool:
        """Whether all replicas hold the same weights now, so that any of them may stand for the model."""
        return True

    def describe(self) -> str:
        """How it keeps replicas together, in a few words for people."""
        return f"kept together by {type(self).__name__}"

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on exactly: numbers, and arrays on the host, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


@dataclass(frozen=True)
class When:
    """The rule of when replicas are averaged.

    frequency: after iterations k, 2k, 3k ... of the whole training; `epoch`: after each epoch; `end`: after the last.
    """

    frequency: int | str

    def __post_init__(self) -> None:
        if self.frequency not in ("epoch", "end"):
            whole = integer("averaging_frequency", self.frequency, 1, ", epoch or end")
            object.__setattr__(self, "frequency", whole)

    def __str__(self) -> str:
        named = {"epoch": "after every epoch", "end": "at the end", 1: "in every iteration"}
        return named.get(self.frequency, f"every {self.frequency} iterations")

    def after(self, iteration: int) -> bool:
        """Whether iteration `iteration` (from 0) is followed by an average."""
        return isinstance(self.frequency, int) and (iteration + 1) % self.frequency == 0

    def at(self, moment: Moment) -> bool:
        """Whether a moment asks for an average: a fit always, an evaluation unless the frequency is `end`."""
        return {"fit": True, "evaluation": self.frequency != "end", "epoch": self.frequency == "epoch"}[moment]


class ParameterAveraging(Synchronizer):
    """Every k iterations all replicas get the weighted mean of their weights (local SGD; Deeplearning4j's AVERAGING).

    Args:
        frequency: k, after iterations k, 2k, 3k of the whole training; or `epoch`, or `end`. Whatever it is, the end of
            a fit averages, and so does the end of an epoch that is evaluated (except with `end`, which averages and
            is evaluated only at the end of the fit).
        average_updaters: the optimizer state is averaged with the weights.
        report_score: compute `Average.score` (reads the losses from the device, once per average).
        measure_every: the divergence is measured at the first average in each stretch of this many iterations; 0 for
            never.
    """

    def __init__(
        self,
        frequency: int | str = 1,
        *,
        average_updaters: bool = True,
        report_score: bool = True,
        measure_every: int = 50,
    ) -> None:
        self.when = When(frequency)
        self.frequency = self.when.frequency
        self.average_updaters = flag("average_updaters", average_updaters)
        self.report_score = flag("report_score", report_score)
        self.measure_every = integer("measure_every", measure_every, 0)
        self._pending = 0  # rounds since the last average: the same on every worker
        self._measured = -1  # the last stretch of `measure_every` iterations that was measured in
        self._samples = 0  # this replica's since the last average
        self._scored = 0  # those of them whose losses this worker has; the next is the sum of these losses
        self._losses: Array = 0.0

    def before_update(self, replica: ReplicaView, samples: int) -> bool:
        self._pending += 1
        self._samples += samples
        if self.report_score and samples and replica.losses is not None:
            self._scored, self._losses = self._scored + samples, self._losses + replica.losses
        return samples > 0

    def after_update(self, replica: ReplicaView, iteration: int) -> Average | None:
        return self._average(replica, iteration) if self.when.after(iteration) else None

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        return self._average(replica, None) if self._pending and self.when.at(moment) else None

    def shared(self, replica: ReplicaView) -> list[Array]:
        return [replica.params.master, *(replica.optimizer_state.values() if self.average_updaters else ())]

    @property
    def identical(self) -> bool:
        return self._pending == 0 or self.communicator.size == 1

    def describe(self) -> str:
        return f"averaged {self.when}"

    def state(self) -> dict[str, Any]:
        counts = {"samples": self._samples, "scored": self._scored, "losses": float(self._losses)}
        return {"pending": self._pending, "measured": self._measured, **counts}

    def restore(self, state: dict[str, Any]) -> None:
        self._pending, self._measured, self._samples = state["pending"], state["measured"], state["samples"]
        self._scored, self._losses = state["scored"], state["losses"]

    def _average(self, replica: ReplicaView, iteration: int | None) -> Average:
        """One average. iteration: the one it follows; None at the end of an epoch or of the fit."""
        loss = float(self._losses)
        finite = math.isfinite(loss) and is_finite(replica.params.master)
        gathered = self.communicator.gather_numbers(self._scored, loss, finite).tolist()  # (W, 3)
        refuse_divergence([fine for _, _, fine in gathered], iteration)
        divergence = self._reduce(replica, measure=self._measure(iteration))
        scored = sum(count for count, _, _ in gathered)
        score = sum(total for _, total, _ in gathered) / scored if scored else math.nan
        self._samples, self._scored, self._losses, self._pending = 0, 0, 0.0, 0
        return Average(score, divergence)

    def _measure(self, iteration: int | None) -> bool:
        """Whether the average after `iteration` measures the divergence."""
        if not self.measure_every or iteration is None or iteration // self.measure_every == self._measured:
            return False
        self._measured = iteration // self.measure_every
        return True

    def _reduce(self, replica: ReplicaView, *, measure: bool) -> float:
        """Average the vectors and let the layers see the result; the divergence where it is measured, else NaN."""
        if self.communicator.size == 1:
            return 0.0 if measure else math.nan
        own = replica.params.master.copy() if measure else None
        self.communicator.allreduce_mean(self.shared(replica), self._samples)
        replica.params.publish()
        if own is None:
            return math.nan
        return float(self.communicator.gather_numbers(distance(own, replica.params.master)).max())


def is_finite(vector: Array) -> bool:
    """Whether every element is finite; one pass, without a temporary vector."""
    return math.isfinite(float(vector.sum()))


def distance(vector: Array, mean: Array) -> float:
    """|vector - mean| / |mean|."""
    difference = vector - mean
    return math.sqrt(float(difference @ difference) / max(float(mean @ mean), 1e-30))


def refuse_divergence(finite: list[float], iteration: int | None) -> None:
    """Raise on every worker alike if any replica is not finite: it must not be averaged into the others."""
    bad = [str(rank) for rank, fine in enumerate(finite) if not fine]
    if bad:
        when = "at the end of an epoch" if iteration is None else f"after iteration {iteration + 1}"
        raise DivergedError(
            f"the replica of worker {', '.join(bad)} is not finite {when} and was not averaged into the others: "
            "lower learning_rate, or train in a wider dtype"
        )
