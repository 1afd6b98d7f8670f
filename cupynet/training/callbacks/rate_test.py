"""The learning-rate range test (Smith 2017, "Cyclical learning rates"): the rate grows from one iteration to the next,
and the loss says which rates are of use.

What is tested is what trains: the same workers, dtype, optimizer and averaging, on a new model that is thrown away.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cupynet.backend import create_backend
from cupynet.core.checks import instance, integer, number
from cupynet.core.errors import ConfigError, CupynetError, DivergedError
from cupynet.data import Batches, as_loader
from cupynet.nn import Model
from cupynet.optim import Nesterov, Optimizer, Schedule
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import Report, StopReason
from cupynet.training.parallel_wrapper import Examples, ParallelWrapper
from cupynet.training.trainer_view import TrainerView

SMOOTHING = 0.95  # of what was known is kept of each loss, over 200 iterations; less over fewer
EXPLODED = 4.0  # times the least smoothed loss: fastai's rule
BELOW = 10.0  # the rate at the least loss over this is suggested: there the loss still falls
FALLEN = 0.01  # of a loss is what it must fall to have fallen at all
LEAST = 10  # iterations that say anything
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
    """What a range test has found.

    Attributes:
        rates: learning rates, in the order in which they were tried: growing.
        losses: with each of them: the mean over all replicas of their batch's in that iteration, before its update.
        asked: how many iterations there were to be.
        ended: why it ended before, in words; "" where it did not.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    asked: int = 0
    ended: str = ""

    @property
    def smoothed(self) -> list[float]:
        """The losses' exponential means, corrected for their beginning."""
        keep = SMOOTHING ** (200 / max(self.asked, LEAST))
        mean, found = 0.0, []
        for count, loss in enumerate(self.losses, 1):
            mean = keep * mean + (1 - keep) * loss
            found.append(mean / (1 - keep**count))
        return found

    @property
    def exploded(self) -> bool:
        """Whether the last loss, smoothed, is far above the least."""
        smoothed = self.smoothed
        return bool(smoothed) and not smoothed[-1] <= EXPLODED * min(smoothed)

    @property
    def least(self) -> int | None:
        """Where the smoothed loss is least; None where nothing says so: it never fell, or too few were tried."""
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
        """The rate to train with, or the peak of a schedule: a tenth of that where the loss is least (fastai's rule).

        None where the loss says nothing.
        """
        least = self.least
        return None if least is None else max(self.rates[least] / BELOW, self.rates[0])


class _Watch(Callback):
    """Collects the losses on every worker, which know the same, and ends the fit where they have said enough.

    Args:
        found: what rank 0 writes into.
        rates: by iteration.
    """

    every_rank = True

    def __init__(self, found: RateTest, rates: Growing) -> None:
        self.found, self._rates = found, rates

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        """Nothing is known yet."""

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        known = math.isfinite(report.loss)  # neither without a batch, nor in the middle of a pipeline
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
    """Try growing learning rates on a copy of a model: which one to train with.

        from cupynet.training import find_rate

        found = find_rate(model, data.train, optimizer=Adam(0.001), workers=2)
        ParallelWrapper(model, workers=2, optimizer=Adam(found.suggestion)).fit(data.train)

    Args:
        model: stays as it is.
        data: as `ParallelWrapper.fit` takes them; epochs follow each other until there have been enough iterations.
        lowest, highest: the first and the last rate.
        iterations: how many rates are tried, one in each.
        batch_size: for `data` that are no `Loader`.
        optimizer: whose rate is looked for: Nesterov(0.01, 0.9) by default. Its own rate, or schedule, is not used.
        wrapper: other arguments of `ParallelWrapper`.

    Raises:
        ConfigError: an argument cannot work.
    """
    optimizer = Nesterov(0.01, 0.9) if optimizer is None else instance("optimizer", optimizer, Optimizer, "Adam(0.001)")
    taken = next((name for name in ("report_every", "callbacks", "run") if name in wrapper), None)
    if taken is not None:
        raise ConfigError(f"{taken}: a learning-rate test has its own: leave it out")
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
    """A range test. make: a new wrapper with this optimizer and this callback, which reports after every iteration."""
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
