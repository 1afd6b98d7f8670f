"""When replicas are averaged, and what of them.

A replica trains alone between averages. An average weights each replica by the samples it has seen since the last one,
so that with frequency 1 and a linear optimizer (SGD, momentum, Nesterov) W replicas do what one does on the
concatenated batch, short batches and a last round with fewer workers included.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.errors import ConfigError, DivergedError
from cupynet.nn.params import Params
from cupynet.parallel.communicator import Communicator

Moment: TypeAlias = Literal["epoch", "evaluation", "fit"]


@dataclass
class Replica:
    """What a synchronizer sees of a worker.

    Attributes:
        backend: where the vectors live.
        params: the weights.
        optimizer_state: name -> (P,) vector; the optimizer's own dictionary.
        samples: how many this replica has trained on since the last average.
        losses: the sum of their losses, a number or a 0-d array on the device.
    """

    backend: Backend
    params: Params
    optimizer_state: dict[str, Array] = field(default_factory=dict)
    samples: int = 0
    losses: Any = 0.0


@dataclass(frozen=True)
class Average:
    """What one average found.

    Attributes:
        samples: how many all replicas trained on since the last one.
        score: their mean loss, weighted by samples; NaN where it was not asked for or nobody trained.
        divergence: the largest relative distance |w_r - mean| / |mean| of a replica from the mean; NaN where it was not
            asked for.
        seconds: spent in it by this worker, waiting included.
        stop_signal: the signal number if any worker was asked to stop, else 0. All replicas see the same.
    """

    samples: int
    score: float
    divergence: float
    seconds: float
    stop_signal: int


class Synchronizer:
    """When x what: called by every worker at the same points. This base class never averages: one replica alone."""

    def start(self, replica: Replica) -> None:
        """Before the first iteration: all replicas begin equal."""

    def before_update(self, replica: Replica) -> None:
        """After the gradients of an iteration, before the optimizer moves the weights."""

    def after_update(self, replica: Replica, iteration: int, *, measure: bool = False) -> Average | None:
        """After iteration `iteration` (from 0; also on a worker that had no batch in it). What was averaged, if
        anything.
        """
        return None

    def finish(self, replica: Replica, moment: Moment) -> Average | None:
        """At the end of an `epoch`, of an epoch that is to be evaluated (`evaluation`), or of the whole `fit`."""
        return None

    @property
    def identical(self) -> bool:
        """Whether all replicas hold the same weights now, so that any of them may stand for the model."""
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on exactly."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


class ParameterAveraging(Synchronizer):
    """Every k iterations all replicas get the weighted mean of their weights (local SGD; Deeplearning4j's AVERAGING).

    Args:
        communicator: the way to the other workers.
        frequency: k, after iterations k, 2k, 3k of the whole training; or `epoch`, or `end`. Whatever it is, the end of
            training averages, and the end of an epoch that is evaluated too (`end` alone waits for the end, and is
            evaluated there).
        average_updaters: the optimizer state is averaged with the weights.
        report_score: compute `Average.score` (reads the losses from the device, once per average).
    """

    def __init__(
        self,
        communicator: Communicator,
        frequency: int | str = 1,
        *,
        average_updaters: bool = True,
        report_score: bool = True,
    ) -> None:
        self.communicator = communicator
        self.frequency = check_frequency(frequency)
        self.average_updaters = average_updaters
        self.report_score = report_score
        self.pending = 0  # iterations since the last average, the same on every worker

    def start(self, replica: Replica) -> None:
        for vector in self._vectors(replica):
            host = replica.backend.to_host(vector)
            self.communicator.broadcast(host)
            if host is not vector:
                vector[...] = replica.backend.asarray(host)
        replica.params.publish()

    def after_update(self, replica: Replica, iteration: int, *, measure: bool = False) -> Average | None:
        self.pending += 1
        if isinstance(self.frequency, int) and (iteration + 1) % self.frequency == 0:
            return self._average(replica, iteration, measure)
        self.communicator.check()
        return None

    def finish(self, replica: Replica, moment: Moment) -> Average | None:
        due = {"fit": True, "evaluation": self.frequency != "end", "epoch": self.frequency == "epoch"}[moment]
        return self._average(replica, None, False) if due and self.pending else None

    @property
    def identical(self) -> bool:
        return self.pending == 0 or self.communicator.size == 1

    def state(self) -> dict[str, Any]:
        return {"pending": self.pending}

    def restore(self, state: dict[str, Any]) -> None:
        self.pending = state["pending"]

    def _vectors(self, replica: Replica) -> list[Array]:
        return [replica.params.master, *(replica.optimizer_state.values() if self.average_updaters else ())]

    def _average(self, replica: Replica, iteration: int | None, measure: bool) -> Average:
        began = time.perf_counter()
        loss = float(replica.losses) if self.report_score and replica.samples else 0.0
        finite = math.isfinite(loss) and is_finite(replica.params.master)
        gathered = self.communicator.all_gather((replica.samples, loss, finite, self.communicator.stop_signal))
        refuse_divergence([g[2] for g in gathered], iteration)
        samples = sum(g[0] for g in gathered)
        before = replica.params.master.copy() if measure else None
        self._reduce(replica)
        divergence = math.nan
        if before is not None:
            divergence = max(self.communicator.all_gather(distance(before, replica.params.master)))
        score = sum(g[1] for g in gathered) / samples if self.report_score and samples else math.nan
        replica.samples, replica.losses, self.pending = 0, 0.0, 0
        seconds = time.perf_counter() - began
        return Average(samples, score, divergence, seconds, max(g[3] for g in gathered))

    def _reduce(self, replica: Replica) -> None:
        """Average the vectors through host memory, and let the layers see the result."""
        if self.communicator.size > 1:
            vectors = self._vectors(replica)
            hosts = [replica.backend.to_host(v) for v in vectors]
            self.communicator.allreduce_mean(hosts, replica.samples, replica.backend.mean_in_place)
            for vector, host in zip(vectors, hosts, strict=True):
                if host is not vector:
                    vector[...] = replica.backend.asarray(host)
            replica.params.publish()


def check_frequency(frequency: Any) -> int | str:
    """`frequency` if it is an integer of at least 1, `epoch` or `end`; else a ConfigError that names it."""
    if frequency in ("epoch", "end"):
        return str(frequency)
    if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
        raise ConfigError(f"averaging_frequency={frequency!r}: must be an integer of at least 1, epoch or end")
    return frequency


def is_finite(vector: Array) -> bool:
    """Whether every element is finite; one pass, without a temporary vector."""
    return math.isfinite(float(vector.sum()))


def distance(vector: Array, mean: Array) -> float:
    """|vector - mean| / |mean|."""
    difference = vector - mean
    return math.sqrt(float(difference @ difference) / max(float(mean @ mean), 1e-30))


def refuse_divergence(finite: list[bool], iteration: int | None) -> None:
    """Raise on every worker alike if any replica is not finite: it must not be averaged into the others."""
    bad = [str(rank) for rank, fine in enumerate(finite) if not fine]
    if bad:
        when = "at the end" if iteration is None else f"after iteration {iteration + 1}"
        raise DivergedError(
            f"the replica of worker {', '.join(bad)} is not finite {when} and was not averaged into the others: "
            "lower optimizer.learning_rate, or train in a wider dtype"
        )
