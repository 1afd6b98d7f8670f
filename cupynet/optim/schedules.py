"""Learning-rate schedules: the base class, and the schedules that span a fit.

Schedules that count from the beginning of training are in counted.py; the one that uses evaluations is in plateau.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cupynet.core.checks import instance, integer, number, one_of
from cupynet.core.described import Described
from cupynet.core.errors import ConfigError
from cupynet.core.shared_options import learning_rate_scale
from cupynet.core.wording import shown

NAMES: dict[str, type[Schedule]] = {}  # of the schedules that can be chosen by name


class Schedule(Described):
    """A function from iterations to learning rates. An iteration is one update of each replica.

    `begin_fit` sets the iterations of a fit, `on_evaluation` passes the result of an evaluation. Both are the same on
    all workers.

    Attributes:
        monitor: the validation metric that it uses; None if it uses none.
        highest: name of the constructor argument that is, or contains, the highest rate; None if there is none.
    """

    monitor: str | None = None
    highest: str | None = None

    def __init_subclass__(cls, name: str = "", **named: Any) -> None:
        """Register a schedule under a name, as in `class Mine(Schedule, name="mine")`."""
        super().__init_subclass__(**named)
        if name:
            NAMES[name] = cls

    @property
    def needs_validation(self) -> bool:
        """True if a fit must evaluate validation images after each epoch."""
        return self.monitor is not None

    def __call__(self, iteration: int) -> float:
        raise NotImplementedError

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        """Begin a fit over the iterations start <= i < stop, counted over the whole training.

        Called before the first iteration of each fit. A second fit begins where the first ended; a resumed fit keeps
        its start.

        Args:
            epoch: iterations per epoch; 0 if unknown.
            epochs: complete epochs of the whole training at `stop`.
        """

    def on_evaluation(self, figure: float) -> None:
        """Use the monitored figure of an evaluated epoch."""

    def state(self) -> dict[str, float]:
        """Return what a checkpoint must hold to continue exactly, besides the arguments of the next `begin_fit`."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Restore what `state` returned."""


class Constant(Schedule, name="constant"):
    """The learning rate `value` throughout."""

    highest = "value"

    def __init__(self, value: float) -> None:
        self.value = number("Constant value", value, above=0)

    def __call__(self, iteration: int) -> float:
        return self.value


class Spanning(Schedule):
    """A schedule over a fit, which restarts in each further fit.

    Attributes:
        start, stop: the span, set by `begin_fit`.
    """

    start: int
    stop: int

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        self.start, self.stop = start, stop

    def done(self, iteration: int) -> tuple[int, int]:
        """Return the number of iterations of the span before this one, and before the last one.

        Iterations outside the span count as its first or last.
        """
        last = max(self.stop - self.start - 1, 1)
        return min(max(iteration - self.start, 0), last), last


class OneCycle(Spanning, name="one_cycle"):
    """One cycle over a fit: half a cosine up to `peak`, then another down to almost zero.

    Smith & Topin 2018, "Super-convergence".

    Args:
        peak: the highest learning rate.
        warmup: the fraction of the fit in which the rate rises.
        start_divisor: the first learning rate is peak / start_divisor.
        end_divisor: the last one is peak / end_divisor.

    Raises:
        ConfigError: an argument is not valid.
    """

    highest = "peak"

    def __init__(
        self, peak: float, warmup: float = 0.3, start_divisor: float = 25.0, end_divisor: float = 1000.0
    ) -> None:
        self.peak = number("OneCycle peak", peak, above=0)
        self.start_divisor = number("OneCycle start_divisor", start_divisor, minimum=1)
        self.end_divisor = number("OneCycle end_divisor", end_divisor, minimum=1)
        self.warmup = number(
            "OneCycle warmup", warmup, minimum=0, below=1, also=", the fraction of training spent rising"
        )

    def __call__(self, iteration: int) -> float:
        done, last = self.done(iteration)
        rising = self.warmup * last
        if done < rising:
            return _cosine(self.peak / self.start_divisor, self.peak, done / rising)
        return _cosine(self.peak, self.peak / self.end_divisor, (done - rising) / (last - rising))


class Cosine(Spanning, name="cosine"):
    """Cosine annealing over a fit, or with warm restarts (Loshchilov & Hutter 2017, SGDR).

    Args:
        initial: the learning rate at the beginning.
        end: the learning rate in the last iteration of the fit. A cycle before a restart ends just above it.
        cycle: iterations of the first cycle; None for a single cycle over the whole fit.
        growth: each cycle is this many times longer than the one before.

    Raises:
        ConfigError: an argument is not valid.
    """

    highest = "initial"

    def __init__(self, initial: float, end: float = 0.0, cycle: int | None = None, growth: int = 1) -> None:
        self.initial = number("Cosine initial", initial, above=0)
        self.end = number("Cosine end", end, minimum=0, below=self.initial)
        self.cycle = None if cycle is None else integer("Cosine cycle", cycle, 1, ", or null")
        self.growth = integer("Cosine growth", growth, 1)
        if self.growth > 1 and self.cycle is None:
            raise ConfigError("needs several cycles: set cycle too", "Cosine growth", shown(growth))

    def __call__(self, iteration: int) -> float:
        done, length = self.done(iteration)
        if self.cycle is not None:
            length = self.cycle
            while done >= length:
                done, length = done - length, length * self.growth
        return _cosine(self.initial, self.end, done / length)


class Polynomial(Spanning, name="polynomial"):
    """end + (initial - end) · (1 - progress)^power over a fit. (Deeplearning4j's PolySchedule rises and breaks off.)

    Args:
        initial: the learning rate at the beginning.
        power: 1 for a straight line.
        end: the learning rate in the last iteration of the fit.

    Raises:
        ConfigError: an argument is not valid.
    """

    highest = "initial"

    def __init__(self, initial: float, power: float = 1.0, end: float = 0.0) -> None:
        self.initial = number("Polynomial initial", initial, above=0)
        self.power = number("Polynomial power", power, above=0)
        self.end = number("Polynomial end", end, minimum=0, below=self.initial)

    def __call__(self, iteration: int) -> float:
        done, last = self.done(iteration)
        return float(self.end + (self.initial - self.end) * (1 - done / last) ** self.power)


class Around(Schedule):
    """A schedule that changes the rates of another one."""

    def __init__(self, inner: Schedule) -> None:
        self.schedule = instance(f"{type(self).__name__} schedule", inner, Schedule, "OneCycle(0.2)")
        self.monitor = inner.monitor

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        self.schedule.begin_fit(start, stop, epoch, epochs)

    def on_evaluation(self, figure: float) -> None:
        self.schedule.on_evaluation(figure)

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
        ConfigError: an argument is not valid.
    """

    def __init__(self, schedule: Schedule, factor: float) -> None:
        super().__init__(schedule)
        self.factor = number("Scaled factor", factor, above=0)

    def __call__(self, iteration: int) -> float:
        return self.factor * self.schedule(iteration)


class Warmup(Around, name="warmup"):
    """Linear warm-up at the beginning of training, then another schedule (Goyal et al. 2017).

    The other schedule begins after the warm-up: its iterations and epochs are counted from there.

    Args:
        steps: iterations of the warm-up.
        then: a learning rate, or a schedule.
        start: the first learning rate, as a fraction of that at the end of the warm-up.

    Raises:
        ConfigError: an argument is not valid.
    """

    highest = "then"

    def __init__(self, steps: int, then: float | Schedule, start: float = 0.1) -> None:
        super().__init__(schedule("Warmup then", then))
        self.steps = integer("Warmup steps", steps, 1)
        self.first = number("Warmup start", start, above=0, below=1)
        self._epochs: int | None = None  # complete epochs at the end of the warm-up; None before the first `begin_fit`

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        if epoch and (start < self.steps or self._epochs is None):  # epochs of a later fit may differ in length
            self._epochs = max(epochs - -(-(stop - self.steps) // epoch), 0)
        begin = max(start - self.steps, 0)
        super().begin_fit(begin, max(stop - self.steps, begin + 1), epoch, epochs - (self._epochs or 0))

    def state(self) -> dict[str, float]:
        return super().state() | ({} if self._epochs is None else {"epochs": self._epochs})

    def restore(self, state: dict[str, float]) -> None:
        self._epochs = int(state["epochs"]) if "epochs" in state else None
        super().restore(state)

    def __call__(self, iteration: int) -> float:
        rising = min(iteration / self.steps, 1.0)
        return (self.first + (1 - self.first) * rising) * self.schedule(max(iteration - self.steps, 0))


def scale_factor(scale: str | float, workers: int) -> float:
    """Return the factor on the learning rate for W workers.

    `none`: 1. `linear`: W, because the gradient is the mean over W times as many examples (Goyal et al. 2017). `sqrt`:
    the square root of W, by which the noise of that mean is reduced. A number is returned unchanged.

    Raises:
        ConfigError: unknown rule.
    """
    rule = learning_rate_scale("learning_rate_scale", scale)
    if isinstance(rule, str):
        return {"none": 1.0, "linear": float(workers), "sqrt": math.sqrt(workers)}[rule]
    return rule


def _cosine(start: float, end: float, progress: float) -> float:
    """Return the value between start and end, along half a cosine, at a progress of 0..1."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def schedule(owner: str, learning_rate: Any, highest: float | None = None) -> Schedule:
    """Return a number as a constant schedule, a name or a mapping with a name as that schedule, a schedule as it is.

    Args:
        owner: the class of the optimizer or schedule, for messages.
        learning_rate: such as 0.1, "cosine", or {"name": "step", "every": 1000, "factor": 0.5}.
        highest: the highest rate of a named schedule that does not give it.

    Raises:
        ConfigError: it is anything else.
    """
    name = f"{owner} learning_rate"
    if isinstance(learning_rate, Schedule):
        return learning_rate
    named = {"name": learning_rate} if isinstance(learning_rate, str) else learning_rate
    if isinstance(named, Mapping):
        kind = NAMES[one_of(name, named.get("name"), NAMES)]
        given = {} if kind.highest is None or highest is None else {kind.highest: highest}
        try:
            return kind(**given | {str(key): value for key, value in named.items() if key != "name"})
        except TypeError as error:  # an argument is missing, or unknown
            raise ConfigError(str(error), name, shown(learning_rate)) from error
    example = "such as 'cosine' or OneCycle(0.2)"
    return Constant(number(name, learning_rate, above=0, also=f", or a schedule {example}"))
