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
from cupynet.data import Loader, as_loader
from cupynet.nn import Model
from cupynet.optim import Exponential, Nesterov, Optimizer, Schedule
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import Report, StopReason
from cupynet.training.parallel_wrapper import Examples, ParallelWrapper
from cupynet.training.trainer import Trainer

SMOOTHING = 0.95  # the decay of the exponential mean over 200 iterations; less over fewer
EXPLODED = 4.0  # times the least smoothed loss: fastai's rule
BELOW = 10.0  # suggest the rate at the least loss divided by this: there the loss still falls
FALLEN = 0.01  # the least relative fall of the loss that counts
LEAST = 10  # iterations of a test


@dataclass
class RateTest:
    """The result of a range test.

    Attributes:
        rates: the learning rates, growing.
        losses: the loss at each rate: the mean over all replicas in that iteration, before its update.
        planned: number of iterations, if the test does not end early.
        ended: why it ended early; "" if it did not.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    planned: int = 0
    ended: str = ""

    @property
    def smoothed(self) -> list[float]:
        """The exponential means of the losses, corrected for bias."""
        keep = SMOOTHING ** (200 / max(self.planned, LEAST))
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
        """The index of the lowest smoothed loss; None if the loss never fell, or if too few rates were tested."""
        first, smoothed = self.planned // LEAST, self.smoothed  # the beginning is noise
        if len(smoothed) < max(LEAST, first + 2):
            return None
        index = min(range(first, len(smoothed)), key=lambda i: smoothed[i])
        return index if smoothed[first] - smoothed[index] > FALLEN * abs(smoothed[first]) else None

    @property
    def suggestion(self) -> float | None:
        """The rate to train with, or the peak of a schedule: a tenth of that at the least loss (fastai's rule)."""
        return None if self.least is None else max(self.rates[self.least] / BELOW, self.rates[0])


class _Collect(Callback):
    """Collects the mean losses on every worker, and ends the fit after the last rate, or if the loss explodes."""

    every_rank = True

    def __init__(self, found: RateTest, rates: Schedule) -> None:
        self.found, self._rates = found, rates

    def on_report(self, trainer: Trainer, report: Report) -> None:
        known = math.isfinite(report.loss)  # unknown without a batch, and in all pipeline stages but the last
        table = trainer.world.gather_numbers(report.loss if known else 0.0, float(known))  # (W, 2)
        if not table[:, 1].sum():
            return
        found = self.found
        found.rates.append(self._rates(report.iteration - 1))  # without `learning_rate_scale`
        found.losses.append(float(table[:, 0].sum() / table[:, 1].sum()))
        if len(found.rates) > LEAST and found.exploded:
            found.ended = "the loss has exploded"
        if found.ended or report.iteration >= found.planned:
            trainer.stop("the learning-rate test is complete", StopReason.EARLY)


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
    """Test increasing learning rates on a copy of a model, to find one for training.

        from cupynet.training import find_rate

        found = find_rate(model, data.train, optimizer=Adam(0.001), workers=2)
        ParallelWrapper(model, workers=2, optimizer=Adam(found.suggestion)).fit(data.train)

    Args:
        model: is not changed.
        data: as for `ParallelWrapper.fit`.
        lowest, highest: the first and the last rate.
        iterations: the number of rates.
        batch_size: for `data` other than a `Loader`.
        optimizer: Nesterov(0.01, 0.9) by default. Its own rate, or schedule, is not used.
        wrapper: other arguments of `ParallelWrapper`.

    Raises:
        ConfigError: an argument is not valid.
    """
    optimizer = Nesterov(0.01, 0.9) if optimizer is None else instance("optimizer", optimizer, Optimizer, "Adam(0.001)")
    loader = as_loader(data, batch_size, classes=model.output.features, pixels=model.pixels)

    def make(optimizer: Optimizer, callback: Callback) -> ParallelWrapper:
        own = model.backend
        own.synchronize()
        backend = create_backend(own.name, own.policy.name, own.device, **own.options)
        return ParallelWrapper(
            model.replicate(backend), optimizer=optimizer, callbacks=[callback], report_every=1, **wrapper
        )

    return range_test(loader, optimizer, lowest, highest, iterations, make)


def range_test(
    loader: Loader,
    optimizer: Optimizer,
    lowest: float,
    highest: float,
    iterations: int,
    make: Callable[[Optimizer, Callback], ParallelWrapper],
) -> RateTest:
    """Run a range test. See `find_rate` for the arguments.

    make: returns a wrapper with this optimizer and callback that reports after every iteration.
    """
    lowest = number("lowest", lowest, above=0)
    highest = number("highest", highest, above=lowest)
    found = RateTest(planned=integer("iterations", iterations, LEAST))
    rates = Exponential(lowest, (highest / lowest) ** (1 / (iterations - 1)))
    optimizer = copy.copy(optimizer)
    optimizer.learning_rate = rates
    with make(optimizer, _Collect(found, rates)) as wrapper:
        try:
            wrapper.fit(loader, epochs=-(-iterations // loader.rounds(wrapper.placement.workers)))
        except CupynetError as error:
            if error.exit_code != DivergedError.exit_code or not found.losses:
                raise
            found.ended = f"at a rate of {rates(len(found.rates)):.3g} a value was not finite"
    return found
