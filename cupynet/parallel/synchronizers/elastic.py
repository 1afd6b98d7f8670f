from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupynet.backend.array import Array
from cupynet.core.checks import number
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.synchronizers.averaging import UNMEASURED, ParameterAveraging, Spread, spread
from cupynet.parallel.synchronizers.base import Average
from cupynet.parallel.synchronizers.replica_view import ReplicaView, Tally
from cupynet.parallel.synchronizers.schedule import AveragingSchedule, Moment

SHARE = 0.9  # default value of pull · workers, beta in the paper


class ElasticAveraging(ParameterAveraging):
    """Synchronous EASGD: every k iterations, replicas and a center attract each other (Zhang et al. 2015, 1412.6651).

    Each replica moves toward the center by the fraction `pull` of their distance. The center moves toward the mean of
    the replicas by the fraction `pull` · workers. The mean is weighted by the samples since the last step.

    Replicas differ until an evaluation or the end of a fit. They then take a last step and adopt the center. Only then
    are buffers averaged, weighted by the samples since the previous adoption.

    Args:
        averaging_frequency, report_score, measure_every, transfer_dtype: see `ParameterAveraging`. `half` sends
            differences from the center.
        pull: alpha in the paper, at most 1 / workers; 0.9 / workers by default.
        average_updaters: True to average the optimizer state when replicas adopt the center.
    """

    def __init__(
        self,
        averaging_frequency: int | str | AveragingSchedule = 1,
        pull: float | None = None,
        *,
        average_updaters: bool = True,
        report_score: bool = True,
        measure_every: int = 50,
        transfer_dtype: str = "full",
    ) -> None:
        super().__init__(
            averaging_frequency,
            average_updaters=average_updaters,
            report_score=report_score,
            measure_every=measure_every,
            transfer_dtype=transfer_dtype,
        )
        self.pull = None if pull is None else number("pull", pull, above=0, also=", or null for 0.9 / workers")
        self._alpha = self.pull or 0.0  # set in `start`
        self._apart = Tally(losses=False)  # since replicas last adopted the center

    def check(self, workers: int, stages: int = 1) -> None:
        super().check(workers, stages)
        if self.pull is not None and workers > 1 and self.pull * workers > 1:
            raise ConfigError(
                f"must be at most 1 / workers, which is {1 / workers:g} with {workers} workers. Otherwise the center "
                "would overshoot the mean of the replicas",
                setting="pull",
                value=f"{self.pull:g}",
            )

    def start(self, replica: ReplicaView, communicator: Communicator) -> None:
        super().start(replica, communicator)
        self._apart = replica.tally(losses=False)
        self._alpha = SHARE / communicator.size if self.pull is None else self.pull
        if communicator.size > 1:
            self._common = [replica.params.master.copy()]  # the center

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        replica.complete()
        gather = self._apart.iterations and moment != "epoch" and self.schedule.at(moment)
        average = super().finish(replica, moment)
        if gather:
            if self.communicator.size > 1:
                replica.params.master[...] = self._common[0]
                replica.params.publish()
                _, *states = self.shared(replica)
                states += replica.params.running
                if states:
                    self.communicator.allreduce_mean(states, self._apart.samples)
            self._apart.clear()
        return average

    @property
    def identical(self) -> bool:
        return self._apart.iterations == 0 or self.communicator.size == 1

    def __str__(self) -> str:
        pull = f"{self._alpha:.3g}" if self._alpha else "0.9 / workers"
        return f"pulled to a center by {pull} {self.schedule}{', sent as half' * (self.transfer_dtype == 'half')}"

    def state(self) -> dict[str, Any]:
        return {**super().state(), "apart": self._apart.iterations, "seen": self._apart.samples}

    def restore(self, state: dict[str, Any]) -> None:
        self._apart.iterations, self._apart.samples = state["apart"], state["seen"]
        super().restore(state)

    def merge(self, state: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        return float(state["seen"]), {**super().merge(state)[1], "apart": 0, "seen": 0}

    def _synchronize(self, replica: ReplicaView, *, measure: bool) -> Spread:
        weights, (center,) = replica.params.master, self._common
        mean: Array = (weights if self._tally.samples else center).copy()  # the center if no worker has samples
        self._mean([mean], self._tally.samples)
        drift = spread(self.communicator, replica, weights, mean, self._tally.samples) if measure else UNMEASURED
        weights += self._alpha * (center - weights)
        center += self._alpha * self.communicator.size * (mean - center)
        replica.params.publish()
        return drift
