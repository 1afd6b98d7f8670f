"""The learning-rate range test (Smith 2017, "Cyclical learning rates"): the rate grows at each iteration.

It uses the same workers, dtype, optimizer and averaging as training, on a copy of the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cupynet.backend import create_backend
from cupynet.core.checks import instance, integer, number
from cupynet.core.errors import CupynetError, DivergedError
from cupynet.data import Batches, as_loader
from cupynet.nn import Model
from cupynet.optim import Nesterov, Optimizer, Schedule
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import Report, StopReason
from cupynet.training.parallel_wrapper import Examples, ParallelWrapper
from cupynet.training.trainer_view import TrainerView

SMOOTHING = 0.95  # the decay of the exponential mean over 200 iterations; less over fewer
EXPLODED = 4.0  # times the least smoothed loss: fastai's rule
BELOW = 10.0  # suggest the rate at the least loss divided by this: there the loss still falls
FALLEN = 0.01  # the least relative fall of the loss that counts
LEAST = 10  # iterations of a test
DONE, TOO_HIGH = "the learning-rate test is done", "the loss has exploded: the learning-rate test is done"


class Growing(Schedule):
    """lowest · (highest / lowest)^(i / (iterations - 1)): as much larger in each iteration.

    Args:
        lowest, highest: the first and the last rate.
        iterations: how many there are.
    """

    def __init__(self, lowest: float, highest: float, iterations: int) -> None:
        self.low = number("Growing lowest", lowest, above=0)
        self.high = number("Growing highest", highest, above=self.low)
        self.iterations = integer("Growing iterations", iterations, 2)

    def __call__(self, iteration: int) -> float:
        share = min(iteration, self.iterations - 1) / (self.iterations - 1)
        return float(self.low * (self.high / self.low) ** share)


@dataclass
class RateTest:
    """The result of a range test.

    Attributes:
        rates: the learning rates, growing.
        losses: the loss at each of them: the mean over all replicas in that iteration, before its update.
        asked: planned iterations.
        ended: why it ended early; "" if it did not.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    asked: int = 0
    ended: str = ""

    @property
    def smoothed(self) -> list[float]:
        """The losses' exponential means, corrected for bias."""
        keep = SMOOTHING ** (200 / max(self.asked, LEAST))
        mean, found = 0.0, []
        for count, loss in enumerate(self.losses, 1):
            mean = keep * mean + (1 - keep) * loss
            found.append(mean / (1 - keep**count))
        return found

    @property
    def exploded(self) -> bool:
        """True if the last smoothed loss is far above the least."""
        smoothed = self.smoothed
        return bool(smoothed) and not smoothed[-1] <= EXPLODED * min(smoothed)

    @property
    def least(self) -> int | None:
        """The place of the least smoothed loss; None if it never fell, or if too few rates were tried."""
        first, smoothed = self.asked // LEAST, self.smoothed  # the beginning is noise
        if len(smoothed) < max(LEAST, first + 2):
            return None
        place = min(range(first, len(smoothed)), key=lambda i: smoothed[i])
        return place if smoothed[first] - smoothed[place] > FALLEN * abs(smoothed[first]) else None

    @property
    def steepest(self) -> float | None:
        """The rate at which the smoothed loss falls fastest, per order of magnitude."""
        least, first, smoothed = self.least, self.asked // LEAST, self.smoothed
        if least is None:
            return None
        slopes = {
            i: (smoothed[i + 1] - smoothed[i - 1]) / math.log(self.rates[i + 1] / self.rates[i - 1])
            for i in range(max(first, 1), min(least + 1, len(smoothed) - 1))
        }
        place = min(slopes, key=lambda i: slopes[i], default=None)
        return None if place is None or slopes[place] >= 0 else self.rates[place]

    @property
    def suggestion(self) -> float | None:
        """The rate to train with, or the peak of a schedule: a tenth of that at the least loss (fastai's rule)."""
        least = self.least
        return None if least is None else max(self.rates[least] / BELOW, self.rates[0])


class _Watch(Callback):
    """Collects the mean losses on every worker, and ends the fit after the last rate, or if the loss explodes."""

    every_rank = True

    def __init__(self, found: RateTest, rates: Growing) -> None:
        self.found, self._rates = found, rates

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        known = math.isfinite(report.loss)  # not without a batch, nor in the middle of a pipeline
        table = trainer.world.gather_numbers(report.loss if known else 0.0, float(known))  # (W, 2)
        if not table[:, 1].sum():
            return
        self.found.rates.append(self._rates(report.iteration - 1))
        self.found.losses.append(float(table[:, 0].sum() / table[:, 1].sum()))
        if len(self.found.rates) > LEAST and self.found.exploded:
            self.found.ended = TOO_HIGH
            trainer.stop(TOO_HIGH, StopReason.EARLY)
        elif report.iteration >= self._rates.iterations:
            trainer.stop(DONE, StopReason.EARLY)


def find_rate(
    model: Model,
    data: Examples,
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    iterations: int = 200,
    batch_size: int = 128,
    optimizer: Optimizer | None = None,
    **wrapper: Any,
) -> RateTest:
    """Try growing learning rates on a copy of a model, to find one to train with.

        from cupynet.training import find_rate

        found = find_rate(model, data.train, optimizer=Adam(0.001), workers=2)
        ParallelWrapper(model, workers=2, optimizer=Adam(found.suggestion)).fit(data.train)

    Args:
        model: is not changed.
        data: as for `ParallelWrapper.fit`.
        lowest, highest: the first and the last rate.
        iterations: the number of rates.
        batch_size: for `data` that are no `Loader`.
        optimizer: Nesterov(0.01, 0.9) by default. Its own rate, or schedule, is not used.
        wrapper: other arguments of `ParallelWrapper`.

    Raises:
        ConfigError: an argument is not valid.
    """
    optimizer = Nesterov(0.01, 0.9) if optimizer is None else instance("optimizer", optimizer, Optimizer, "Adam(0.001)")
    loader = as_loader(data, batch_size, classes=model.output.features, pixels=model.pixels)

    def make(optimizer: Optimizer, watch: Callback) -> ParallelWrapper:
        own = model.backend
        own.synchronize()
        backend = create_backend(own.name, own.policy.name, own.device, **own.options)
        return ParallelWrapper(
            model.replicate(backend), optimizer=optimizer, callbacks=[watch], report_every=1, **wrapper
        )

    return tested(loader, optimizer, Growing(lowest, highest, integer("iterations", iterations, LEAST)), make)


def tested(
    loader: Batches, optimizer: Optimizer, rates: Growing, make: Callable[[Optimizer, Callback], ParallelWrapper]
) -> RateTest:
    """Run a range test. make: returns a wrapper with this optimizer and callback that reports after every iteration."""
    found = RateTest(asked=rates.iterations)
    optimizer = copy.copy(optimizer)
    optimizer.learning_rate = rates
    with make(optimizer, _Watch(found, rates)) as wrapper:
        try:
            wrapper.fit(loader, epochs=-(-rates.iterations // loader.rounds(wrapper.placement.workers)))
        except CupynetError as error:
            if error.exit_code != DivergedError.exit_code or not found.losses:
                raise
            found.ended = f"with a rate of {rates(len(found.rates)):.3g} a number was not finite any more"
    return found
