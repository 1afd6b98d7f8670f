"""Learning-rate range test (Smith 2017, "Cyclical learning rates for training neural networks")."""

from __future__ import annotations

import copy
import math
from typing import Any

from cupynet.backend import create_backend
from cupynet.core.checks import integer, number
from cupynet.core.errors import ConfigError, CupynetError, DivergedError
from cupynet.data import Loader
from cupynet.nn import Model
from cupynet.optim import ExponentialDecay, Nesterov, Optimizer, optimizer_of
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import IterationRecord, StopReason
from cupynet.training.fit import Examples, loader_of
from cupynet.training.parallel_wrapper import ParallelWrapper
from cupynet.training.trainer import Trainer

SMOOTHING = 0.95  # decay of the moving average for 200 iterations; adjusted for other lengths
EXPLODED = 4.0  # stop at this multiple of the lowest smoothed loss, as in fastai
DIVISOR = 10.0  # the rate at the lowest loss is divided by this, to get a rate at which the loss still decreases
MIN_DECREASE = 0.01  # minimum relative decrease in loss
MIN_ITERATIONS = 10


class RateTest(Callback):
    """Increases the learning rate in each iteration. This callback requires a wrapper with `log_every=1`.

    Args:
        lowest, highest, iterations: the first rate, the last rate, and the number of rates.

    Attributes:
        losses: the mean loss over the samples of all replicas at each rate, before the update.
        ended: the reason why the test ended early, or "".
    """

    every_rank = True

    def __init__(self, lowest: float, highest: float, iterations: int) -> None:
        lowest = number("lowest", lowest, above=0)
        highest = number("highest", highest, above=lowest)
        self.planned = integer("iterations", iterations, MIN_ITERATIONS)
        self._schedule = ExponentialDecay(lowest, (highest / lowest) ** (1 / (iterations - 1)))
        self.losses: list[float] = []
        self.ended = ""
        self._counted = 0  # samples processed by this replica

    def run(self, wrapper: ParallelWrapper, loader: Loader) -> None:
        """Train at increasing rates until the loss explodes or all rates have been tested."""
        with wrapper:
            try:
                wrapper.fit(loader, epochs=-(-self.planned // loader.iterations(wrapper.placement.workers)))
            except CupynetError as error:
                if error.exit_code != DivergedError.exit_code or not self.losses:
                    raise
                self.ended = self.ended or f"training diverged at a rate of {self._schedule(len(self.losses)):.3g}"

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return a copy of the optimizer with the rates of the test."""
        optimizer = copy.copy(optimizer)
        optimizer.learning_rate = self._schedule
        return optimizer

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        if self.ended or record.iteration > self.planned:  # iterations continue until all workers stop
            return
        samples, self._counted = trainer.statistics.clock.samples - self._counted, trainer.statistics.clock.samples
        known = math.isfinite(record.loss)  # NaN without a batch, and in all pipeline stages but the last
        losses, counts = trainer.world.gather_numbers(*(samples * record.loss, samples) if known else (0, 0)).T  # (W,)
        if not counts.sum():
            return
        self.losses.append(float(losses.sum() / counts.sum()))
        smoothed = self.smoothed
        if len(smoothed) > MIN_ITERATIONS and not smoothed[-1] <= EXPLODED * min(smoothed):
            self.ended = "the loss has exploded"
        if self.ended or record.iteration >= self.planned:
            trainer.stop("the learning-rate test is complete", StopReason.EARLY)

    @property
    def rates(self) -> list[float]:
        """The learning rates, in increasing order."""
        return [self._schedule(iteration) for iteration in range(len(self.losses))]

    @property
    def smoothed(self) -> list[float]:
        """The exponential moving average of the losses, with bias correction."""
        keep = SMOOTHING ** (200 / self.planned)
        mean, found = 0.0, []
        for count, loss in enumerate(self.losses, 1):
            mean = keep * mean + (1 - keep) * loss
            found.append(mean / (1 - keep**count))
        return found

    @property
    def suggestion(self) -> float | None:
        """The suggested (peak) learning rate: a tenth of the rate at the lowest smoothed loss, as in fastai.

        It is at least the first rate. None if the loss decreased by less than 1 %, or if too few rates were tested.
        """
        first, smoothed = self.planned // 10, self.smoothed  # the beginning is noisy
        if len(smoothed) < max(MIN_ITERATIONS, first + 2):
            return None
        least = min(range(first, len(smoothed)), key=lambda i: smoothed[i])
        if smoothed[first] - smoothed[least] <= MIN_DECREASE * abs(smoothed[first]):
            return None
        return max(self.rates[least] / DIVISOR, self.rates[0])


def find_rate(
    model: Model,
    data: Examples,
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    iterations: int = 200,
    batch_size: int | None = None,
    optimizer: Optimizer | str | None = None,
    **wrapper: Any,
) -> RateTest:
    """Run a learning-rate range test on a copy of a model, with the given workers and averaging. Return the test.

        from cupynet.training import find_rate

        found = find_rate(model, data.train, optimizer=Adam(0.001), workers=2)
        ParallelWrapper(model, workers=2, optimizer=Adam(found.suggestion)).fit(data.train)

    Args:
        data, batch_size: see `ParallelWrapper.fit`.
        lowest, highest, iterations: see `RateTest`.
        optimizer: the optimizer or its name, whose learning rate or schedule is ignored; Nesterov(0.01, 0.9) by
            default.
        wrapper: other arguments of `ParallelWrapper`, except `callbacks` and `log_every`.
    """
    for name in {"callbacks", "log_every"} & wrapper.keys():
        raise ConfigError("is set by find_rate. Remove this argument", name)
    optimizer = Nesterov(0.01, 0.9) if optimizer is None else optimizer_of(optimizer)
    loader = loader_of(data, batch_size, model, model.pixels)
    own, test = model.backend, RateTest(lowest, highest, iterations)
    own.synchronize()
    copied = model.replicate(create_backend(own.name, own.policy.name, own.device, **own.options))
    rates = test.optimizer(optimizer)
    test.run(ParallelWrapper(copied, optimizer=rates, callbacks=[test], log_every=1, **wrapper), loader)
    return test
