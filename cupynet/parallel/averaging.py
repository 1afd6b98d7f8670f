"""Replicas whose parameters are averaged now and then.

A replica trains alone between averages. An average weights each replica by the samples it has seen since the last one,
so that with frequency 1 and a linear optimizer (SGD, momentum, Nesterov, without clipping) W replicas do what one does
on the concatenated batch, short batches and a last round with fewer workers included.
"""

from __future__ import annotations

import math
from typing import Any

from cupynet.backend.array import Array
from cupynet.checks import flag, integer
from cupynet.parallel.replica import ReplicaView
from cupynet.parallel.synchronizers import Average, Moment, Synchronizer, distance, is_finite, refuse_divergence
from cupynet.parallel.when import When


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
