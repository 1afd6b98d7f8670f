"""When replicas are averaged: every k iterations, at the ends of epochs, once at the end, or by a rule that learns.

A rule is asked alike on every worker and decides alike: from iterations, moments and measurements that all have in
common. So workers need not talk in order to know that they are about to.
"""

from __future__ import annotations

import math
from typing import Any

from cupynet.core.checks import guess, instance, integer, number, refusal, shown
from cupynet.parallel.synchronizers.base import Moment

MOMENTS = ("epoch", "end")


class When:
    """A rule of when replicas are averaged.

    A subclass says after which iterations; whatever it says, the end of a fit averages too, and so does the end of an
    epoch that is evaluated.

    Attributes:
        frequency: iterations between averages, or `epoch`, or `end`; None where it is neither.
        measures: whether every average must measure the divergence, because the rule learns from it.
    """

    frequency: int | str | None = None
    measures = False

    def after(self, iteration: int) -> bool:
        """Whether iteration `iteration` (from 0) is followed by an average; asked once after each."""
        raise NotImplementedError

    def due(self, iteration: int) -> bool:
        """Whether `after` will say so of this iteration, without telling the rule that it is over.

        True where a rule does not know: replicas that run ahead of the host are waited for then.
        """
        return True

    def at(self, moment: Moment) -> bool:
        """Whether a moment asks for an average of replicas that have trained since the last one."""
        return moment != "epoch"

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation asks for an average, however far the training is: whether every epoch can have one."""
        return self.at("evaluation")

    def averaged(self, divergence: float) -> None:
        """An average has been made that found this divergence; NaN where it was not measured."""

    def ended(self, moment: Moment) -> None:
        """A moment is over, and so is its average if there was one."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it: numbers by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


class Every(When):
    """After iterations k, 2k, 3k ... of the whole training.

    Args:
        iterations: k.
    """

    frequency: int

    def __init__(self, iterations: int) -> None:
        self.frequency = integer("averaging_frequency", iterations, 1)

    def __str__(self) -> str:
        return "in every iteration" if self.frequency == 1 else f"every {self.frequency} iterations"

    def after(self, iteration: int) -> bool:
        return (iteration + 1) % self.frequency == 0

    def due(self, iteration: int) -> bool:
        return self.after(iteration)


class AtEpochs(When):
    """After every epoch."""

    frequency = "epoch"

    def __str__(self) -> str:
        return "after every epoch"

    def after(self, iteration: int) -> bool:
        return False

    def due(self, iteration: int) -> bool:
        return False

    def at(self, moment: Moment) -> bool:
        return True


class AtEnd(When):
    """Once, at the end of a fit: before that replicas differ, so that no epoch but the last can be evaluated."""

    frequency = "end"

    def __str__(self) -> str:
        return "at the end"

    def after(self, iteration: int) -> bool:
        return False

    def due(self, iteration: int) -> bool:
        return False

    def at(self, moment: Moment) -> bool:
        return moment == "fit"


class PostLocal(When):
    """In every iteration until some epochs are complete, then less often (post-local SGD, Lin et al. 2018, 1808.07217).

    Early in training replicas move fast and apart: averaged often then, they may be left alone for longer afterwards.

    Args:
        epochs: how many are averaged in every iteration. A fit that ends also ends an epoch in this count, where it was
            broken off too.
        frequency: what follows: iterations between averages, or `epoch`, or `end`, or another rule.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(self, epochs: int, frequency: int | str | When) -> None:
        self.epochs = integer("PostLocal epochs", epochs, 0)
        self.later = rule(frequency)
        self.measures = self.later.measures
        self._complete = 0
        self._rounds = 0  # of the epoch that is not complete

    def __str__(self) -> str:
        epochs = f"{self.epochs} epoch{'s are' if self.epochs != 1 else ' is'} complete"
        return f"in every iteration until {epochs}, then {self.later}"

    @property
    def _often(self) -> bool:
        return self._complete < self.epochs

    def after(self, iteration: int) -> bool:
        self._rounds += 1
        return self._often or self.later.after(iteration)

    def due(self, iteration: int) -> bool:
        return self._often or self.later.due(iteration)

    def at(self, moment: Moment) -> bool:
        return self._often or self.later.at(moment)

    @property
    def evaluates(self) -> bool:
        return self.later.evaluates

    def averaged(self, divergence: float) -> None:
        if not self._often:
            self.later.averaged(divergence)

    def ended(self, moment: Moment) -> None:
        if self._rounds:  # a fit that ends with a complete epoch, where that has been told already, counts once
            self._complete, self._rounds = self._complete + 1, 0
        self.later.ended(moment)

    def state(self) -> dict[str, Any]:
        return {"complete": self._complete, "rounds": self._rounds, "later": self.later.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._complete, self._rounds = state["complete"], state["rounds"]
        self.later.restore(state["later"])


class Adaptive(When):
    """As often as keeps the replicas about as far apart as is wished, after Jiang & Agrawal 2020.

    Each average measures the divergence (`Average.divergence`). A period that ended below the target is followed by a
    longer one, at most twice as long, in proportion; one that ended above it by a shorter one, at least half as long.
    An average that a moment asked for before the period was over may shorten it, but not make it longer.

    Args:
        target: the relative distance of a replica from the mean, at an average, that is aimed at.
        first: the first period, in iterations.
        most: the longest.

    Attributes:
        period: iterations, as a real number; the next average is made once its whole part has passed.

    Raises:
        ConfigError: an argument cannot work.
    """

    measures = True

    def __init__(self, target: float, first: int = 1, most: int = 100) -> None:
        self.target = number("Adaptive target", target, above=0)
        self.first = integer("Adaptive first", first, 1)
        self.most = integer("Adaptive most", most, self.first, ": not before `first`")
        self.period = float(self.first)
        self._rounds = 0  # since the last average

    def __str__(self) -> str:
        return f"every {self.first} to {self.most} iterations, to be about {100 * self.target:g} % apart"

    def after(self, iteration: int) -> bool:
        self._rounds += 1
        return self._rounds >= int(self.period)

    def due(self, iteration: int) -> bool:
        return self._rounds + 1 >= int(self.period)

    def averaged(self, divergence: float) -> None:
        whole, self._rounds = self._rounds >= int(self.period), 0
        if math.isnan(divergence):  # only one replica had a batch: nothing to learn
            return
        factor = min(max(self.target / max(divergence, 1e-30), 0.5), 2.0 if whole else 1.0)
        self.period = min(max(self.period * factor, 1.0), float(self.most))

    def state(self) -> dict[str, Any]:
        return {"period": self.period, "rounds": self._rounds}

    def restore(self, state: dict[str, Any]) -> None:
        self.period, self._rounds = state["period"], state["rounds"]


def rule(frequency: int | str | When) -> When:
    """A number of iterations, `epoch` or `end` as a rule; a rule as it is. Else a ConfigError."""
    if isinstance(frequency, When):
        return frequency
    if isinstance(frequency, type):  # the class of a rule, where one of its objects is needed
        return instance("averaging_frequency", frequency, When, "PostLocal(2, 10)")
    if isinstance(frequency, str):
        if frequency not in MOMENTS:
            also = f"must be an integer of at least 1, epoch or end{guess(frequency, MOMENTS)}"
            raise refusal("averaging_frequency", shown(frequency), also)
        return AtEpochs() if frequency == "epoch" else AtEnd()
    return Every(integer("averaging_frequency", frequency, 1, ", epoch or end"))
