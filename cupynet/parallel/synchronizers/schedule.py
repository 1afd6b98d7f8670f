"""Averaging schedules: every k iterations, at the end of each epoch, once at the end, or adaptive.

Each worker has its own schedule. All schedules make the same decisions without communication, because the decisions
depend only on the iteration and on measurements that all workers share.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

from cupynet.core.checks import integer, number
from cupynet.core.errors import ConfigError
from cupynet.core.wording import guess, shown

Moment: TypeAlias = Literal["epoch", "evaluation", "fit"]

MOMENTS = ("epoch", "end")


class AveragingSchedule:
    """Decides when replicas are averaged.

    Subclasses choose the iterations. By default, replicas are also averaged at the end of a fit and before an
    evaluation.

    Attributes:
        averaging_frequency: iterations between averaging steps, or `epoch`, or `end`; None if it is not fixed.
        measures: True if the schedule needs the drift of every averaging step.
    """

    averaging_frequency: int | str | None = None
    measures = False

    def __str__(self) -> str:
        return f"by {type(self).__name__}"

    def after(self, iteration: int) -> bool:
        """Return True to average after iteration `iteration` (from 0). This is called once per iteration."""
        raise NotImplementedError

    def at(self, moment: Moment) -> bool:
        """Return True to average at this moment. Not called if replicas have not trained since the last average."""
        return moment != "epoch"

    @property
    def evaluates(self) -> bool:
        """True if every epoch can be evaluated, because replicas are averaged before an evaluation."""
        return self.at("evaluation")

    def averaged(self, drift: float) -> None:
        """Called after an averaging step. `drift` is NaN if it was not measured."""

    def ended(self, moment: Moment) -> None:
        """Called at this moment, after the averaging step if there is one."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class Every(AveragingSchedule):
    """Averages after iterations k, 2k, 3k ..., counted over all fits, with k = `averaging_frequency`."""

    averaging_frequency: int

    def __init__(self, averaging_frequency: int) -> None:
        self.averaging_frequency = integer("averaging_frequency", averaging_frequency, 1, ", epoch or end")

    def __str__(self) -> str:
        return "in every iteration" if self.averaging_frequency == 1 else f"every {self.averaging_frequency} iterations"

    def after(self, iteration: int) -> bool:
        return (iteration + 1) % self.averaging_frequency == 0


class AtMoments(AveragingSchedule):
    """Averages after every `epoch`, or at the `end` of a fit. In between, replicas differ and cannot be evaluated."""

    def __init__(self, averaging_frequency: str) -> None:
        self.averaging_frequency = averaging_frequency

    def __str__(self) -> str:
        return "after every epoch" if self.averaging_frequency == "epoch" else "at the end"

    def after(self, iteration: int) -> bool:
        return False

    def at(self, moment: Moment) -> bool:
        return self.averaging_frequency == "epoch" or moment == "fit"


class PostLocal(AveragingSchedule):
    """Averages in every iteration of the first epochs, then less often (post-local SGD, Lin et al. 2018, 1808.07217).

    Args:
        epochs: number of epochs with averaging in every iteration. The end of a fit counts as the end of an epoch.
        averaging_frequency: iterations between later averaging steps, or `epoch`, or `end`, or another schedule.
    """

    def __init__(self, epochs: int, averaging_frequency: int | str | AveragingSchedule) -> None:
        self.epochs = integer("PostLocal epochs", epochs, 0)
        self.later = averaging_schedule(averaging_frequency)
        self.measures = self.later.measures
        self._complete = 0
        self._iterations = 0  # iterations of the incomplete epoch

    def __str__(self) -> str:
        epochs = f"{self.epochs} epoch{'s are' if self.epochs != 1 else ' is'} complete"
        return f"in every iteration until {epochs}, then {self.later}"

    @property
    def _often(self) -> bool:
        return self._complete < self.epochs

    def after(self, iteration: int) -> bool:
        self._iterations += 1
        return self._often or self.later.after(iteration)

    def at(self, moment: Moment) -> bool:
        return self._often or self.later.at(moment)

    @property
    def evaluates(self) -> bool:
        return self.later.evaluates

    def averaged(self, drift: float) -> None:
        if not self._often:
            self.later.averaged(drift)

    def ended(self, moment: Moment) -> None:
        if self._iterations:  # the last epoch and the fit end together and count once
            self._complete, self._iterations = self._complete + 1, 0
        self.later.ended(moment)

    def state(self) -> dict[str, Any]:
        return {"complete": self._complete, "rounds": self._iterations, "later": self.later.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._complete, self._iterations = state["complete"], state["rounds"]
        self.later.restore(state["later"])


class Adaptive(AveragingSchedule):
    """Adapts the averaging period to a target drift (Jiang & Agrawal 2020, "Adaptive periodic averaging").

    If the drift (`Average.drift`) at an averaging step is below the target, the next period is longer; if it is above
    the target, the next period is shorter. The factor is at most 2. An averaging step before the end of a period can
    only shorten the next period.

    Args:
        target: the target drift.
        initial_period, max_period: the first and the longest period, in iterations.

    Attributes:
        period: current period in iterations, rounded down when used.
    """

    measures = True

    def __init__(self, target: float, initial_period: int = 1, max_period: int = 100) -> None:
        self.target = number("Adaptive target", target, above=0)
        self.max_period = integer("Adaptive max_period", max_period, 1)
        self.initial_period = integer(
            "Adaptive initial_period", initial_period, 1, most=self.max_period, why="`max_period`"
        )
        self.period = float(self.initial_period)
        self._iterations = 0  # iterations since the last averaging step

    def __str__(self) -> str:
        return f"every {self.initial_period} to {self.max_period} iterations, for a drift of {100 * self.target:g} %"

    def after(self, iteration: int) -> bool:
        self._iterations += 1
        return self._iterations >= int(self.period)

    def averaged(self, drift: float) -> None:
        complete, self._iterations = self._iterations >= int(self.period), 0
        if math.isnan(drift):  # only one replica had a batch
            return
        factor = min(max(self.target / max(drift, 1e-30), 0.5), 2.0 if complete else 1.0)
        self.period = min(max(self.period * factor, 1.0), float(self.max_period))

    def state(self) -> dict[str, Any]:
        return {"period": self.period, "rounds": self._iterations}

    def restore(self, state: dict[str, Any]) -> None:
        self.period, self._iterations = state["period"], state["rounds"]


def averaging_schedule(averaging_frequency: int | str | AveragingSchedule) -> AveragingSchedule:
    """Return the schedule for a number of iterations, `epoch` or `end`, or the given schedule."""
    if isinstance(averaging_frequency, AveragingSchedule):
        return averaging_frequency
    if not isinstance(averaging_frequency, str):
        return Every(averaging_frequency)
    if averaging_frequency not in MOMENTS:
        reason = f"must be an integer of at least 1, epoch or end{guess(averaging_frequency, MOMENTS)}"
        raise ConfigError(reason, "averaging_frequency", shown(averaging_frequency))
    return AtMoments(averaging_frequency)
