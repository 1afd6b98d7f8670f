"""Learning-rate schedules that count iterations or epochs across fits, as in Deeplearning4j."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cupynet.core.checks import integer, number, one_of
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown
from cupynet.optim.schedules import Schedule, not_begun


class Counted(Schedule):
    """Base class of schedules that depend on n, the number of iterations or epochs (`by`) since training began."""

    def __init__(self, by: str) -> None:
        self.by = one_of(f"{type(self).__name__} by", by, ("iteration", "epoch"))
        self._epoch = self._stop = self._epochs = 0

    def begin_fit(self, start: int, stop: int, epoch: int = 0, epochs: int = 0) -> None:
        self._stop, self._epoch, self._epochs = stop, epoch, epochs

    def __call__(self, iteration: int) -> float:
        """Return the learning rate at `iteration`. With `by="epoch"`, call `begin_fit` first."""
        if self.by == "iteration":
            return self.rate(iteration)
        if not self._epoch:
            raise not_begun(self)
        # count back from the end of the fit, because its first epoch may be incomplete after a resume
        left = -(-(self._stop - iteration) // self._epoch)
        return self.rate(max(self._epochs - left, 0))

    def rate(self, n: int) -> float:
        """Return the learning rate after n iterations or epochs."""
        raise NotImplementedError


class StepDecay(Counted, name="step"):
    """Step decay: initial · factor^floor(n / every). `by` is the unit of n, `iteration` or `epoch`."""

    highest = "initial"

    def __init__(self, initial: float, factor: float, every: int, by: str = "iteration") -> None:
        super().__init__(by)
        self.initial = number("StepDecay initial", initial, above=0)
        self.factor = number("StepDecay factor", factor, above=0)
        self.every = integer("StepDecay every", every, 1)

    def rate(self, n: int) -> float:
        return self.initial * self.factor ** (n // self.every)


class PiecewiseConstant(Counted, name="piecewise_constant"):
    """Piecewise constant learning rate: `rates` maps the first n of each interval to its rate, beginning with n = 0.

    `by` is the unit of n, `iteration` or `epoch`.
    """

    def __init__(self, rates: Mapping[int, float], by: str = "iteration") -> None:
        super().__init__(by)
        if not isinstance(rates, Mapping) or 0 not in rates:
            raise ConfigError(
                "must be a mapping with the key 0, such as {0: 0.1, 500: 0.01}",
                "PiecewiseConstant rates",
                shown(rates),
            )
        found = {
            integer("PiecewiseConstant rates key", n, 0): number("PiecewiseConstant rates", rate, above=0)
            for n, rate in rates.items()
        }
        self.rates = dict(sorted(found.items()))

    def rate(self, n: int) -> float:
        return self.rates[max(start for start in self.rates if start <= n)]


class ExponentialDecay(Counted, name="exponential"):
    """Exponential decay: initial · gamma^n. `by` is the unit of n, `iteration` or `epoch`."""

    highest = "initial"

    def __init__(self, initial: float, gamma: float, by: str = "iteration") -> None:
        super().__init__(by)
        self.initial = number("ExponentialDecay initial", initial, above=0)
        self.gamma = number("ExponentialDecay gamma", gamma, above=0)

    def rate(self, n: int) -> float:
        return self.initial * self.gamma**n


class InverseTimeDecay(Counted, name="inverse_time"):
    """Inverse-time decay: initial / (1 + gamma · n)^power. `by` is the unit of n, `iteration` or `epoch`."""

    highest = "initial"

    def __init__(self, initial: float, gamma: float, power: float = 1.0, by: str = "iteration") -> None:
        super().__init__(by)
        self.initial = number("InverseTimeDecay initial", initial, above=0)
        self.gamma = number("InverseTimeDecay gamma", gamma, minimum=0)
        self.power = number("InverseTimeDecay power", power, above=0)

    def rate(self, n: int) -> float:
        return float(self.initial / (1 + self.gamma * n) ** self.power)


class SigmoidDecay(Counted, name="sigmoid"):
    """Sigmoid decay: initial / (1 + exp(-gamma · (n - middle))). `by` is the unit of n, `iteration` or `epoch`.

    The rate decreases from about `initial` if gamma < 0, and increases toward `initial` if gamma > 0. At `middle`
    (stepSize in Deeplearning4j), it is half of `initial`.
    """

    highest = "initial"

    def __init__(self, initial: float, gamma: float, middle: int, by: str = "iteration") -> None:
        super().__init__(by)
        self.initial = number("SigmoidDecay initial", initial, above=0)
        self.gamma = number("SigmoidDecay gamma", gamma)
        self.middle = integer("SigmoidDecay middle", middle, 0)

    def rate(self, n: int) -> float:
        steps = min(max(-self.gamma * (n - self.middle), -700.0), 700.0)  # beyond this, exp overflows or underflows
        return self.initial / (1 + math.exp(steps))
