"""Parameter averaging: replicas train independently and are averaged periodically (local SGD).

Each replica is weighted by its number of samples since the last averaging step. With frequency 1 and a linear optimizer
(SGD, momentum or Nesterov without clipping), W replicas are therefore equivalent to one replica on the concatenated
batch, even if some batches are short or missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from cupynet.backend.array import Array
from cupynet.core.checks import flag, integer, one_of
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.synchronizers.base import Average, Synchronizer
from cupynet.parallel.synchronizers.half_precision import TRANSFER_DTYPES, half_mean
from cupynet.parallel.synchronizers.outer_optimizer import OuterOptimizer, outer_optimizer_of
from cupynet.parallel.synchronizers.replica_view import ReplicaView, Tally, by_name, distance, take_by_name
from cupynet.parallel.synchronizers.schedule import AveragingSchedule, Moment, averaging_schedule

Spread: TypeAlias = "tuple[float, Mapping[str, float]]"  # `drift` and `drift_by_layer` of `Average`
UNMEASURED: Spread = (math.nan, {})


class ParameterAveraging(Synchronizer):
    """Replaces the weights of all replicas with their weighted mean every k iterations (local SGD).

    This is Deeplearning4j's AVERAGING. A single replica is never averaged and takes no outer steps. Buffers (running
    statistics) are averaged in full precision and are not changed by outer steps.

    Args:
        averaging_frequency: k, to average after iterations k, 2k, 3k ..., counted over all fits; or `epoch`, or `end`;
            or a schedule such as `PostLocal` or `Adaptive`. Replicas are always averaged at the end of a fit and,
            except with `end`, before an evaluation. With `end`, evaluation is possible only at the end of the fit.
        average_updaters: True to average the optimizer state together with the weights.
        report_score: True to compute `Average.score`, reading the losses from the device at each averaging step.
        measure_every: measure the drift at the first averaging step in each epoch and in each period of this many
            iterations, and at additional averaging steps (before an evaluation, at the end of a fit). The step after an
            additional step does not measure the drift, because it follows a shorter interval. 0 to measure the drift
            only if the schedule requires it.
        transfer_dtype: `full` sends weights in full precision, and `half` sends their differences from the last average
            in 16 bits (see `half_mean`). Replicas stay bit-identical. The optimizer state is sent in full precision.
        outer_optimizer: optimizer applied at every averaging step: `slowmo`, `diloco`, an `OuterOptimizer`, or None.
    """

    schedule: AveragingSchedule
    shares_gradients = False

    def __init__(
        self,
        averaging_frequency: int | str | AveragingSchedule = 1,
        *,
        average_updaters: bool = True,
        report_score: bool = True,
        measure_every: int = 50,
        transfer_dtype: str = "full",
        outer_optimizer: str | OuterOptimizer | None = None,
    ) -> None:
        self.schedule = averaging_schedule(averaging_frequency)
        self.average_updaters = flag("average_updaters", average_updaters)
        self.report_score = flag("report_score", report_score)
        self.measure_every = integer("measure_every", measure_every, 0)
        self.transfer_dtype = one_of("transfer_dtype", transfer_dtype, TRANSFER_DTYPES)
        self.outer_optimizer = outer_optimizer_of(outer_optimizer)
        self._tally = Tally()  # counts since the last averaging step
        self._measured = -1  # index of the last `measure_every` period with a measurement in this epoch
        self._short = False  # True after an additional averaging step, because the next step follows a shorter interval
        self._common: list[Array] = []  # the weights after the last averaging step, if they are needed

    def start(self, replica: ReplicaView, communicator: Communicator) -> None:
        super().start(replica, communicator)
        self._replica = replica
        self._tally = replica.tally(losses=self.report_score)
        if communicator.size > 1:
            if self.transfer_dtype == "half" or self.outer_optimizer is not None:
                self._common = [replica.params.master.copy()]
            if self.outer_optimizer is not None:
                self.outer_optimizer.start(replica)

    def begin(self, replica: ReplicaView) -> None:
        super().begin(replica)
        if self.identical:
            self._remember(replica)

    def after_update(self, replica: ReplicaView, iteration: int) -> Average | None:
        if not self.schedule.after(iteration):
            return None
        if self.communicator.size > 1:  # a single replica need not wait
            replica.complete()
        return self._average(replica, iteration) if self._tally.iterations else None

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        replica.complete()
        average = self._average(replica, None) if self._tally.iterations and self.schedule.at(moment) else None
        self._measured, self._short = -1, self._short or average is not None
        self.schedule.ended(moment)
        return average

    @property
    def may_run_ahead(self) -> bool:  # type: ignore[override]
        """False if a subclass overrides `before_update` or `after_update`."""
        cls = type(self)
        default_before = cls.before_update is Synchronizer.before_update
        return default_before and cls.after_update is ParameterAveraging.after_update

    @property
    def identical(self) -> bool:
        return self._tally.iterations == 0 or self.communicator.size == 1

    def __str__(self) -> str:
        outer = "" if self.outer_optimizer is None else f", outer optimizer {self.outer_optimizer}"
        return f"averaged {self.schedule}{outer}{', sent as half' * (self.transfer_dtype == 'half')}"

    def state(self) -> dict[str, Any]:
        outer = None if self.communicator.size == 1 else self.outer_optimizer
        common = {str(i): by_name(self._replica, vector) for i, vector in enumerate(self._common)}
        return {
            "measured": self._measured,
            "short": int(self._short),
            "tally": self._tally.state(),
            "when": self.schedule.state(),
            "outer": {} if outer is None else outer.state(),
            "common": common,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("apart") and self.identical and self.communicator.size > 1:
            reason = "ElasticAveraging saved this state before its replicas adopted the center"
            raise ConfigError(f"{reason}. Restore it with ElasticAveraging, and train to the end of a fit")
        self._measured, self._short = state["measured"], bool(state.get("short", 0))  # not saved by earlier versions
        self._tally.restore(state["tally"])
        self.schedule.restore(state["when"])
        if self.communicator.size > 1 and self.outer_optimizer is not None:
            self.outer_optimizer.restore(state["outer"])
        for i, vector in enumerate(self._common):
            take_by_name(self._replica, vector, state["common"][str(i)])

    def merge(self, state: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        return float(state["tally"]["samples"]), {**state, "tally": Tally().state()}

    def _average(self, replica: ReplicaView, iteration: int | None) -> Average:
        """Average the replicas after iteration `iteration` (from 0), or at the end of an epoch or fit if it is None."""
        score = self._tally.gather(replica, self.communicator, iteration)
        measure = self._measure(iteration)
        if self.communicator.size == 1:
            average = Average(score, 0.0 if measure else math.nan)
        else:
            average = Average(score, *self._synchronize(replica, measure=measure))
        self._tally.clear()
        self.schedule.averaged(average.drift)
        return average

    def _measure(self, iteration: int | None) -> bool:
        short, self._short = self._short, False
        if self.schedule.measures:
            return True
        if not self.measure_every or iteration is None:
            return self.measure_every > 0
        if short or iteration // self.measure_every == self._measured:
            return False
        self._measured = iteration // self.measure_every
        return True

    def _synchronize(self, replica: ReplicaView, *, measure: bool) -> Spread:
        before = replica.params.master.copy() if measure else None
        self._mean(self.shared(replica), self._tally.samples, buffers=replica.params.running)
        samples, mean = self._tally.samples, replica.params.master
        drift = UNMEASURED if before is None else spread(self.communicator, replica, before, mean, samples)
        if self.outer_optimizer is not None:
            self.outer_optimizer.step(self._common[0], replica.params.master)
        self._remember(replica)
        replica.params.publish()
        return drift

    def _mean(self, vectors: list[Array], weight: float, buffers: Sequence[Array] = ()) -> None:
        """Average `vectors` (weights, then (P,) optimizer vectors) and `buffers` over the workers, in place.

        With `half`, the weights are sent in 16 bits, and the other vectors in full precision.
        """
        if self.transfer_dtype == "half":
            weights, *vectors = vectors
            weights -= self._common[0]
            half_mean(self.communicator, weights, weight)
            weights += self._common[0]
        parts = [part for vector in vectors for part in self._replica.params.trained(vector)]
        if parts or buffers:
            self.communicator.allreduce_mean([*parts, *buffers], weight)

    def _remember(self, replica: ReplicaView) -> None:
        for common in self._common:
            common[...] = replica.params.master


def spread(communicator: Communicator, replica: ReplicaView, own: Array, mean: Array, weight: float) -> Spread:
    """Return the largest relative distance of a replica from the mean, over all weights and by layer. Collective.

    `own` and `mean` are the weights (P,) of this replica and the mean of all, and `weight` is this replica's weight in
    the mean. Replicas with weight 0 are ignored; if fewer than two remain, the result is `UNMEASURED`.
    """
    layers: dict[str, list[tuple[Array, Array]]] = {}
    for (name, local), (_, common) in zip(replica.params.views(own), replica.params.views(mean), strict=True):
        layers.setdefault(name.partition(".")[0], []).append((local.reshape(-1), common.reshape(-1)))
    parts = [[(own, mean)], *layers.values()]
    distances = [distance(replica.backend, pairs) if weight else 0.0 for pairs in parts]
    gathered = communicator.gather_numbers(weight > 0, *distances)  # (W, 2 + layers)
    if gathered[:, 0].sum() < 2:
        return UNMEASURED
    whole, *by_layer = gathered[:, 1:].max(axis=0).tolist()
    return whole, dict(zip(layers, by_layer, strict=True))
