"""Learning-rate schedules: the base class, and schedules that span a fit. Others are in counted.py and plateau.py."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from cupynet.core.checks import instance, integer, number, one_of
from cupynet.core.described import Described
from cupynet.core.errors import ConfigError
from cupynet.core.shared_options import learning_rate_scale
from cupynet.core.wording import shown

NAMES: dict[str, type[Schedule]] = {}  # schedules that can be chosen by name


class Schedule(Described):
    """Base class of schedules, which map an iteration to a learning rate.

    On a GPU, a copy of the schedule is also called in advance for later iterations, ignoring exceptions.
    `begin_fit` and `on_evaluation` receive the same values on all workers.

    Attributes:
        monitor: name of the monitored validation metric, or None.
        highest: name of the argument that determines the highest rate, or None.
    """

    monitor: str | None = None
    highest: str | None = None

    def __init_subclass__(cls, name: str = "", **named: Any) -> None:
        """Register the schedule under a name, as in `class Mine(Schedule, name="mine")`."""
        super().__init_subclass__(**named)
        if name:
            NAMES[name] = cls

    @property
    def needs_validation(self) -> bool:
        """True if validation data must be evaluated after each epoch."""
        return self.monitor is not None

    def __call__(self, iteration: int) -> float:
        """Return the learning rate at an iteration, counted from 0 over all fits."""
        raise NotImplementedError

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        """Called before the first iteration of each fit. A resumed fit keeps its original start.

        Args:
            start, stop: the fit's iterations, start <= i < stop, counted over all fits.
            epoch: iterations per epoch; 0 if unknown.
            epochs: number of epochs completed at `stop`, over all fits.
        """

    def on_evaluation(self, figure: float) -> None:
        """Called with the monitored metric after an epoch has been evaluated."""

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, excluding the arguments of `begin_fit`."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Restore a saved state."""


def not_begun(schedule: Schedule) -> ConfigError:
    reason = "depends on the length of the fit. Call begin_fit(0, iterations, iterations_per_epoch, epochs) first"
    return ConfigError(f"{type(schedule).__name__} {reason}")


class Constant(Schedule, name="constant"):
    """A constant learning rate."""

    highest = "value"

    def __init__(self, value: float) -> None:
        self.value = number("Constant value", value, above=0)

    def __call__(self, iteration: int) -> float:
        return self.value


class FitSchedule(Schedule):
    """Base class of schedules that span one fit (iterations `start` <= i < `stop`) and restart in the next."""

    start, stop = 0, -1  # until `begin_fit`

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        self.start, self.stop = start, stop

    def done(self, iteration: int) -> tuple[int, int]:
        """Return the position of an iteration in the fit, clipped to 0..last, and `last`."""
        if self.stop < 0:
            raise not_begun(self)
        last = max(self.stop - self.start - 1, 1)
        return min(max(iteration - self.start, 0), last), last


class OneCycle(FitSchedule, name="one_cycle"):
    """The 1cycle schedule over a fit: cosine annealing up to `peak`, then down (Smith & Topin 2018).

    Args:
        warmup: fraction of the fit in which the rate increases.
        start_divisor, end_divisor: the first and the last learning rate are `peak` divided by these.
    """

    highest = "peak"

    def __init__(
        self, peak: float, warmup: float = 0.3, start_divisor: float = 25.0, end_divisor: float = 1000.0
    ) -> None:
        self.peak = number("OneCycle peak", peak, above=0)
        self.start_divisor = number("OneCycle start_divisor", start_divisor, minimum=1)
        self.end_divisor = number("OneCycle end_divisor", end_divisor, minimum=1)
        self.warmup = number(
            "OneCycle warmup", warmup, minimum=0, below=1, also=", the fraction of the fit in which the rate increases"
        )

    def __call__(self, iteration: int) -> float:
        done, last = self.done(iteration)
        rising = self.warmup * last
        if done < rising:
            return _cosine(self.peak / self.start_divisor, self.peak, done / rising)
        return _cosine(self.peak, self.peak / self.end_divisor, (done - rising) / (last - rising))


class Cosine(FitSchedule, name="cosine"):
    """Cosine annealing from `initial` over a fit, or with warm restarts (Loshchilov & Hutter 2017, SGDR).

    Args:
        end: the learning rate in the last iteration of the fit. With `cycle`, each cycle ends slightly above it.
        cycle: iterations of the first cycle; None for a single cycle over the whole fit.
        growth: factor by which the cycle length grows at each restart.
    """

    highest = "initial"

    def __init__(self, initial: float, end: float = 0.0, cycle: int | None = None, growth: int = 1) -> None:
        self.initial = number("Cosine initial", initial, above=0)
        self.end = number("Cosine end", end, minimum=0, below=self.initial)
        self.cycle = None if cycle is None else integer("Cosine cycle", cycle, 1, ", or null")
        self.growth = integer("Cosine growth", growth, 1)
        if self.growth > 1 and self.cycle is None:
            raise ConfigError("requires several cycles. Set cycle too", "Cosine growth", shown(growth))

    def __call__(self, iteration: int) -> float:
        done, length = self.done(iteration)
        if self.cycle is not None:
            length = self.cycle
            while done >= length:
                done, length = done - length, length * self.growth
        return _cosine(self.initial, self.end, done / length)


class Polynomial(FitSchedule, name="polynomial"):
    """Polynomial decay over a fit, from `initial` to `end`: end + (initial - end) · (1 - progress)^power."""

    highest = "initial"

    def __init__(self, initial: float, power: float = 1.0, end: float = 0.0) -> None:
        self.initial = number("Polynomial initial", initial, above=0)
        self.power = number("Polynomial power", power, above=0)
        self.end = number("Polynomial end", end, minimum=0, below=self.initial)

    def __call__(self, iteration: int) -> float:
        done, last = self.done(iteration)
        return float(self.end + (self.initial - self.end) * (1 - done / last) ** self.power)


class ScheduleWrapper(Schedule):
    """Base class of schedules that modify another schedule."""

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


class Scaled(ScheduleWrapper):
    """Multiplies another schedule by `factor`, a number above 0."""

    def __init__(self, schedule: Schedule, factor: float) -> None:
        super().__init__(schedule)
        self.factor = number("Scaled factor", factor, above=0)

    def __call__(self, iteration: int) -> float:
        return self.factor * self.schedule(iteration)


class Warmup(ScheduleWrapper, name="warmup"):
    """Linear warm-up at the beginning of training, followed by another schedule (Goyal et al. 2017).

    The other schedule, `then`, counts iterations and epochs from the end of the warm-up.

    Args:
        steps: iterations of the warm-up.
        start: the first learning rate, as a fraction of the rate at the end of the warm-up.
    """

    highest = "then"

    def __init__(self, steps: int, then: float | Schedule, start: float = 0.1) -> None:
        super().__init__(schedule("Warmup then", then))
        self.steps = integer("Warmup steps", steps, 1)
        self.first = number("Warmup start", start, above=0, below=1)
        self._epochs: int | None = None  # completed epochs at the end of the warm-up

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        if epoch and (start < self.steps or self._epochs is None):  # later fits may have epochs of a different length
            self._epochs = max(epochs - -(-(stop - self.steps) // epoch), 0)
        # a fit that was resumed with fewer workers may start below 0; the warm-up then counts as progress of `then`
        begin = start - self.steps if start >= self.steps else min(start, 0)
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
    """Return the learning-rate factor for W workers.

    `none` gives 1; `linear` gives W, because the gradient is the mean over W times as many samples (Goyal et al. 2017);
    `sqrt` gives the square root of W, by which averaging reduces the noise. A number is returned unchanged.
    """
    rule = learning_rate_scale("learning_rate_scale", scale)
    if isinstance(rule, str):
        return {"none": 1.0, "linear": float(workers), "sqrt": math.sqrt(workers)}[rule]
    return rule


def _cosine(start: float, end: float, progress: float) -> float:
    """Interpolate along a half cosine from `start` to `end`, for `progress` from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def required(kind: type[Schedule]) -> list[str]:
    """Return the required arguments of a schedule, except the highest rate."""
    named = inspect.signature(kind).parameters.values()
    return [each.name for each in named if each.default is each.empty and each.name != kind.highest]


def schedule(owner: str, learning_rate: Any, highest: float | None = None) -> Schedule:
    """Convert a number, a name, or a mapping such as {"name": "step", "every": 1000, "factor": 0.5} to a `Schedule`.

    `owner` is the class to name in error messages. `highest` is the highest rate for a named schedule without one.
    """
    name = f"{owner} learning_rate"
    if isinstance(learning_rate, Schedule):
        return learning_rate
    named = {"name": learning_rate} if isinstance(learning_rate, str) else learning_rate
    if isinstance(named, Mapping):
        label = one_of(name, named.get("name", learning_rate), NAMES)
        kind = NAMES[label]
        given = {} if kind.highest is None or highest is None else {kind.highest: highest}
        arguments = given | {str(key): value for key, value in named.items() if key != "name"}
        if kind is Warmup and isinstance(arguments.get("then"), str | Mapping):
            arguments["then"] = schedule("Warmup then", arguments["then"], highest)
        try:
            return kind(**arguments)
        except TypeError as error:  # missing or unknown argument
            problem = str(error).partition("() ")[2] or str(error)
            peak = [kind.highest] if kind.highest is not None and highest is None else []
            form = {"name": label, **dict.fromkeys([*peak, *required(kind)], ...)}
            reason = f"'{label}' {problem}. Write {str(form).replace('Ellipsis', '...')}"
            raise ConfigError(reason, name, shown(learning_rate)) from error
    example = "such as 'cosine' or OneCycle(0.2)"
    return Constant(number(name, learning_rate, above=0, also=f", or a schedule {example}"))
