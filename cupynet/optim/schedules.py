"""Learning rates as functions of the iteration: what all share, and those that stretch over a fit.

Those that count from the beginning of training are in counted.py, the one that learns from evaluations in plateau.py.
"""

from __future__ import annotations

import math
from typing import Any

from cupynet.core.checks import instance, integer, learning_rate_scale, number, refusal, shown


class Schedule:
    """iteration -> learning rate. An iteration is one update of one replica: with several workers, one round.

    A schedule that stretches over training learns from `span` which iterations that is; one that learns from
    evaluations is told of them by `learn`. All of it is alike on all workers.

    Attributes:
        monitor: which figure of an evaluation of validation images it learns from; None for none.
        highest: the argument of its constructor that is its highest rate, or says it; None where none does.
    """

    monitor: str | None = None
    highest: str | None = None

    @property
    def doubt(self) -> str | None:
        """What is probably not meant about the span it was told of last, in one line; None for nothing."""
        return None

    @property
    def needs_validation(self) -> bool:
        """Whether a fit must evaluate validation images, epoch by epoch."""
        return self.monitor is not None

    def __call__(self, iteration: int) -> float:
        raise NotImplementedError

    def span(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        """A fit begins that stretches over iterations start <= i < stop.

        Called at the beginning of each fit, before its first iteration, with the counters of the whole training: a
        second fit is a span of its own, which begins where the first one ended. A fit that is resumed keeps its start.

        Args:
            epoch: the iterations of each of its epochs; 0 where that is not known.
            epochs: how many epochs of the whole training will be complete at `stop`.
        """

    def learn(self, figure: float) -> None:
        """What it monitors, after an epoch that was evaluated."""

    def state(self) -> dict[str, float]:
        """What a checkpoint must hold to go on exactly, beside what `span` will say again."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Take over what `state` returned."""


class Constant(Schedule):
    """The same learning rate `value` throughout, whatever the span."""

    highest = "value"

    def __init__(self, value: float) -> None:
        self.value = number("Constant value", value, above=0)

    def __call__(self, iteration: int) -> float:
        return self.value


class Spanning(Schedule):
    """A schedule that stretches over a fit; each further fit is one of its own.

    Attributes:
        start, stop: the span; None before it is known.
    """

    def __init__(self) -> None:
        self.start: int | None = None
        self.stop: int | None = None

    def span(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        self.start, self.stop = start, stop

    def done(self, iteration: int) -> tuple[int, int]:
        """Iterations of the span before this one, and before its last one. RuntimeError before the first `span`.

        Before its span it counts as the first iteration, after it as the last.
        """
        if self.start is None or self.stop is None:
            name = type(self).__name__
            raise RuntimeError(f"{name} does not know how long training is: call span(start, stop) first")
        last = max(self.stop - self.start - 1, 1)
        return min(max(iteration - self.start, 0), last), last


class OneCycle(Spanning):
    """Up along half a cosine to `peak`, then down along another to almost nothing, once over the span.

    Smith & Topin 2018, "Super-convergence". Each further fit is a cycle of its own. Before its span the rate is the
    first one, after it the last.

    Args:
        peak: the highest learning rate.
        warmup: the fraction of the span in which it rises.
        start_divisor: the first learning rate is peak / start_divisor.
        end_divisor: the last one is peak / end_divisor.

    Raises:
        ConfigError: an argument cannot work.
    """

    highest = "peak"

    def __init__(
        self, peak: float, warmup: float = 0.3, start_divisor: float = 25.0, end_divisor: float = 1000.0
    ) -> None:
        super().__init__()
        self.peak = number("OneCycle peak", peak, above=0)
        self.start_divisor = number("OneCycle start_divisor", start_divisor, minimum=1)
        self.end_divisor = number("OneCycle end_divisor", end_divisor, minimum=1)
        self.warmup = number(
            "OneCycle warmup", warmup, minimum=0, below=1, also=", the fraction of training spent rising"
        )

    def __call__(self, iteration: int) -> float:
        """The rate at `iteration`. RuntimeError before the first `span`."""
        done, last = self.done(iteration)
        rising = self.warmup * last
        if done < rising:
            return _cosine(self.peak / self.start_divisor, self.peak, done / rising)
        return _cosine(self.peak, self.peak / self.end_divisor, (done - rising) / (last - rising))


class Cosine(Spanning):
    """Down along half a cosine, once over the span, or again and again (Loshchilov & Hutter 2017, SGDR).

    Args:
        initial: the learning rate at the beginning.
        end: what it comes down to, in the last iteration of the span; a cycle that is followed by another ends just
            above.
        cycle: iterations of the first of several cycles, counted from the beginning of the span; None for one over all
            of it.
        growth: how many times longer each cycle is than the one before.

    Raises:
        ConfigError: an argument cannot work.
    """

    highest = "initial"

    def __init__(self, initial: float, end: float = 0.0, cycle: int | None = None, growth: int = 1) -> None:
        super().__init__()
        self.initial = number("Cosine initial", initial, above=0)
        self.end = below("Cosine end", end, "initial", self.initial)
        self.cycle = None if cycle is None else integer("Cosine cycle", cycle, 1, ", or null")
        self.growth = integer("Cosine growth", growth, 1)
        if self.growth > 1 and self.cycle is None:
            raise refusal("Cosine growth", shown(growth), "is of cycles, and there is one over all: set cycle too")

    def __call__(self, iteration: int) -> float:
        """The rate at `iteration`. RuntimeError before the first `span`."""
        done, length = self.done(iteration)
        if self.cycle is not None:
            length = self.cycle
            while done >= length:
                done, length = done - length, length * self.growth
        return _cosine(self.initial, self.end, done / length)


class Polynomial(Spanning):
    """initial · (1 - progress)^power, down to `end`, over the span. (Deeplearning4j's PolySchedule rises and breaks
    off.)

    Args:
        initial: the learning rate at the beginning.
        power: 1 for a straight line.
        end: what it comes down to, in the last iteration of the span.

    Raises:
        ConfigError: an argument cannot work.
    """

    highest = "initial"

    def __init__(self, initial: float, power: float = 1.0, end: float = 0.0) -> None:
        super().__init__()
        self.initial = number("Polynomial initial", initial, above=0)
        self.power = number("Polynomial power", power, above=0)
        self.end = below("Polynomial end", end, "initial", self.initial)

    def __call__(self, iteration: int) -> float:
        """The rate at `iteration`. RuntimeError before the first `span`."""
        done, last = self.done(iteration)
        return float(self.end + (self.initial - self.end) * (1 - done / last) ** self.power)


class Around(Schedule):
    """A schedule that changes another one, which is told of all that this one is told of."""

    def __init__(self, inner: Schedule) -> None:
        self.schedule = instance(f"{type(self).__name__} schedule", inner, Schedule, "OneCycle(0.2)")
        self.monitor = inner.monitor

    def span(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        self.schedule.span(start, stop, epoch, epochs)

    @property
    def doubt(self) -> str | None:
        return self.schedule.doubt

    def learn(self, figure: float) -> None:
        self.schedule.learn(figure)

    def state(self) -> dict[str, float]:
        return self.schedule.state()

    def restore(self, state: dict[str, float]) -> None:
        self.schedule.restore(state)


class Scaled(Around):
    """Another schedule times a factor.

    Args:
        schedule: the other one.
        factor: above 0.

    Raises:
        ConfigError: an argument cannot work.
    """

    highest = "schedule"

    def __init__(self, schedule: Schedule, factor: float) -> None:
        super().__init__(schedule)
        self.factor = number("Scaled factor", factor, above=0)

    def __call__(self, iteration: int) -> float:
        return self.factor * self.schedule(iteration)


class Warmup(Around):
    """A straight line up to the first rate of another schedule, once at the beginning of training; then that one.

    (Goyal et al. 2017.) The other one begins behind the line, and knows nothing of the iterations before: one that
    counts epochs counts those complete since then.

    Args:
        steps: iterations of the line.
        then: a learning rate, or a schedule.
        start: the first learning rate, as a fraction of that at the end of the line.

    Raises:
        ConfigError: an argument cannot work.
    """

    highest = "then"

    def __init__(self, steps: int, then: float | Schedule, start: float = 0.1) -> None:
        super().__init__(schedule("Warmup then", then))
        self.steps = integer("Warmup steps", steps, 1)
        self.first = number("Warmup start", start, above=0, below=1)
        self._stop: int | None = None
        self._epochs: int | None = None  # that were complete when the line ended; None before that is known

    def span(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        if epoch and (start < self.steps or self._epochs is None):  # epochs of a later fit may be of another length
            self._epochs = max(epochs - -(-(stop - self.steps) // epoch), 0)
        self._stop, begin = stop, max(start - self.steps, 0)
        super().span(begin, max(stop - self.steps, begin + 1), epoch, epochs - (self._epochs or 0))

    @property
    def doubt(self) -> str | None:
        if self._stop is not None and self._stop <= self.steps:
            return f"Warmup steps={self.steps}: training ends after {self._stop} iterations, while the rate still rises"
        return super().doubt

    def state(self) -> dict[str, float]:
        return super().state() | ({} if self._epochs is None else {"epochs": self._epochs})

    def restore(self, state: dict[str, float]) -> None:
        self._epochs = int(state["epochs"]) if "epochs" in state else None
        super().restore(state)

    def __call__(self, iteration: int) -> float:
        rising = min(iteration / self.steps, 1.0)
        return (self.first + (1 - self.first) * rising) * self.schedule(max(iteration - self.steps, 0))


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


def below(name: str, value: float, other: str, start: float) -> float:
    """`value` as a rate that another one, `other` of the same schedule, comes down to. ConfigError."""
    end = number(name, value, minimum=0)
    if end > start:
        raise refusal(name, shown(value), f"must be at most {other}, {start:g}: the rate comes down to it")
    return end


def schedule(owner: str, learning_rate: Any) -> Schedule:
    """A number as a constant schedule; a schedule as it is. Else a ConfigError that names `owner`."""
    name = f"{owner} learning_rate"
    if isinstance(learning_rate, type):  # the class of a schedule, where one of its objects is needed
        return instance(name, learning_rate, Schedule, "OneCycle(0.2), or a number")
    if isinstance(learning_rate, Schedule):
        return learning_rate
    example = "OneCycle(0.2), in YAML {_target_: cupynet.optim.OneCycle, peak: 0.2}"
    return Constant(number(name, learning_rate, above=0, also=f", or a schedule such as {example}"))
