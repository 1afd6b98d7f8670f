"""Learning rates as functions of the iteration."""

from __future__ import annotations

import math
from typing import Any

from cupynet.errors import ConfigError


class Schedule:
    """iteration -> learning rate. An iteration is one update of one replica: with several workers, one round.

    A schedule that needs to know where training ends learns it from `span`, which `Trainer.fit` calls before the first
    iteration.
    """

    def __call__(self, iteration: int) -> float:
        raise NotImplementedError

    def span(self, iterations: int) -> None:
        """Training will take this many iterations in all."""


class Constant(Schedule):
    """The same learning rate throughout."""

    def __init__(self, value: float) -> None:
        self.value = check_positive("Constant", "value", value)

    def __call__(self, iteration: int) -> float:
        return self.value


class OneCycle(Schedule):
    """Up along half a cosine to `peak`, then down along another to almost nothing (Smith & Topin 2018,
    "Super-convergence").

    Args:
        peak: the highest learning rate.
        warmup: the fraction of training in which it rises.
        start_divisor: the first learning rate is peak / start_divisor.
        end_divisor: the last one is peak / end_divisor.
    """

    def __init__(
        self, peak: float, warmup: float = 0.3, start_divisor: float = 25.0, end_divisor: float = 1000.0
    ) -> None:
        self.peak = check_positive("OneCycle", "peak", peak)
        self.start_divisor = check_positive("OneCycle", "start_divisor", start_divisor, minimum=1.0)
        self.end_divisor = check_positive("OneCycle", "end_divisor", end_divisor, minimum=1.0)
        if isinstance(warmup, bool) or not isinstance(warmup, (int, float)) or not 0 <= warmup < 1:
            raise ConfigError(f"OneCycle warmup={warmup!r}: must be a fraction of training, at least 0 and below 1")
        self.warmup = warmup
        self.iterations: int | None = None

    def span(self, iterations: int) -> None:
        self.iterations = iterations

    def __call__(self, iteration: int) -> float:
        if self.iterations is None:
            raise RuntimeError("OneCycle does not know how long training is: call span(iterations) first")
        last = max(self.iterations - 1, 1)
        rising = self.warmup * last
        if iteration < rising:
            return _cosine(self.peak / self.start_divisor, self.peak, iteration / rising)
        return _cosine(self.peak, self.peak / self.end_divisor, min((iteration - rising) / (last - rising), 1.0))


def _cosine(start: float, end: float, progress: float) -> float:
    """From start to end along half a cosine as progress goes from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def schedule(owner: str, learning_rate: Any) -> Schedule:
    """A number as a constant schedule; a schedule as it is. Else a ConfigError that names `owner`."""
    if isinstance(learning_rate, Schedule):
        return learning_rate
    return Constant(check_positive(owner, "learning_rate", learning_rate))


def check_positive(owner: str, name: str, value: Any, minimum: float = 0.0) -> float:
    """`value` if it is a finite number above 0 and at least `minimum`; else a ConfigError that names it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf or value < minimum:
        bound = f"of at least {minimum:g}" if minimum else "above 0"
        raise ConfigError(f"{owner} {name}={value!r}: must be a number {bound}")
    return float(value)
