"""Learning rates as functions of the iteration."""

from __future__ import annotations

import math
from typing import Any

from cupynet.checks import instance, learning_rate_scale, number


class Schedule:
    """iteration -> learning rate. An iteration is one update of one replica: with several workers, one round.

    A schedule that stretches over training learns from `span` which iterations that is.
    """

    def __call__(self, iteration: int) -> float:
        raise NotImplementedError

    def span(self, start: int, stop: int) -> None:
        """A fit begins that stretches over iterations start <= i < stop.

        Called at the beginning of each fit, before its first iteration, with the counters of the whole training: a
        second fit is a span of its own, which begins where the first one ended. A fit that is resumed keeps its start.
        """


class Constant(Schedule):
    """The same learning rate throughout, whatever the span."""

    def __init__(self, value: float) -> None:
        self.value = number("Constant value", value, above=0)

    def __call__(self, iteration: int) -> float:
        return self.value


class OneCycle(Schedule):
    """Up along half a cosine to `peak`, then down along another to almost nothing, once over the span.

    Smith & Topin 2018, "Super-convergence". Each further fit is a cycle of its own. Before its span the rate is the
    first one, after it the last.

    Args:
        peak: the highest learning rate.
        warmup: the fraction of the span in which it rises.
        start_divisor: the first learning rate is peak / start_divisor.
        end_divisor: the last one is peak / end_divisor.

    Attributes:
        start, stop: the span; None before it is known.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(
        self, peak: float, warmup: float = 0.3, start_divisor: float = 25.0, end_divisor: float = 1000.0
    ) -> None:
        self.peak = number("OneCycle peak", peak, above=0)
        self.start_divisor = number("OneCycle start_divisor", start_divisor, minimum=1)
        self.end_divisor = number("OneCycle end_divisor", end_divisor, minimum=1)
        self.warmup = number(
            "OneCycle warmup", warmup, minimum=0, below=1, also=", the fraction of training spent rising"
        )
        self.start: int | None = None
        self.stop: int | None = None

    def span(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __call__(self, iteration: int) -> float:
        """The rate at `iteration`. RuntimeError before the first `span`."""
        if self.start is None or self.stop is None:
            raise RuntimeError("OneCycle does not know how long training is: call span(start, stop) first")
        last = max(self.stop - self.start - 1, 1)
        done = min(max(iteration - self.start, 0), last)
        rising = self.warmup * last
        if done < rising:
            return _cosine(self.peak / self.start_divisor, self.peak, done / rising)
        return _cosine(self.peak, self.peak / self.end_divisor, (done - rising) / (last - rising))


class Scaled(Schedule):
    """Another schedule times a factor.

    Args:
        schedule: the other one.
        factor: above 0.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(self, schedule: Schedule, factor: float) -> None:
        self.schedule = instance("Scaled schedule", schedule, Schedule, "OneCycle(0.2)")
        self.factor = number("Scaled factor", factor, above=0)

    def span(self, start: int, stop: int) -> None:
        self.schedule.span(start, stop)

    def __call__(self, iteration: int) -> float:
        return self.factor * self.schedule(iteration)


def scale_factor(scale: str | float, workers: int) -> float:
    """What a rule for the learning rate as workers grow multiplies it with.

    `none`: 1. `linear`: W (Goyal et al. 2017: the mean of W times as many examples is worth a step W times as long).
    `sqrt`: the root of W (the noise of that mean is so much smaller). A number: itself.

    Raises:
        ConfigError: it is no such rule.
    """
    rule = learning_rate_scale("learning_rate_scale", scale)
    if isinstance(rule, str):
        return {"none": 1.0, "linear": float(workers), "sqrt": math.sqrt(workers)}[rule]
    return rule


def _cosine(start: float, end: float, progress: float) -> float:
    """From start to end along half a cosine as progress goes from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def schedule(owner: str, learning_rate: Any) -> Schedule:
    """A number as a constant schedule; a schedule as it is. Else a ConfigError that names `owner`."""
    name = f"{owner} learning_rate"
    if isinstance(learning_rate, type):  # the class of a schedule, where one of its objects is needed
        return instance(name, learning_rate, Schedule, "OneCycle(0.2), or a number")
    if isinstance(learning_rate, Schedule):
        return learning_rate
    return Constant(number(name, learning_rate, above=0, also=", or a schedule such as OneCycle(0.2)"))
