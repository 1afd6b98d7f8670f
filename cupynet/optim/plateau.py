from __future__ import annotations

import math

from cupynet.core.checks import instance, integer, mode_of, number
from cupynet.optim.schedules import Schedule


class ReduceOnPlateau(Schedule, name="reduce_on_plateau"):
    """Multiplies the learning rate by `factor` after more than `patience` evaluations without improvement.

    The rate starts at `initial` and never falls below `least`. The next fit continues with the reduced rate.

    Args:
        patience: consecutive evaluations without improvement to tolerate.
        monitor: the validation metric, as in `EarlyStopping`. Higher is better, except for names that contain "loss" or
            "error".
        min_delta: a smaller or equal change does not count as an improvement.
        cooldown: evaluations to ignore after a reduction.
    """

    highest = "initial"

    def __init__(
        self,
        initial: float,
        factor: float = 0.1,
        patience: int = 3,
        monitor: str = "loss",
        min_delta: float = 0.0,
        cooldown: int = 0,
        least: float = 0.0,
    ) -> None:
        self.rate = number("ReduceOnPlateau initial", initial, above=0)
        self.factor = number("ReduceOnPlateau factor", factor, above=0, below=1)
        self.patience = integer("ReduceOnPlateau patience", patience, 0)
        self.monitor: str = instance("ReduceOnPlateau monitor", monitor, str, "'loss'")
        self.min_delta = number("ReduceOnPlateau min_delta", min_delta, minimum=0)
        self.cooldown = integer("ReduceOnPlateau cooldown", cooldown, 0)
        self.least = number("ReduceOnPlateau least", least, minimum=0, below=self.rate)
        self._best, self._waited, self._cooling = math.nan, 0, 0

    def __call__(self, iteration: int) -> float:
        return self.rate

    def on_evaluation(self, figure: float) -> None:
        gain = figure - self._best if mode_of(self.monitor) == "max" else self._best - figure
        if gain > self.min_delta or (math.isnan(self._best) and not math.isnan(figure)):
            self._best, self._waited = figure, 0
        else:
            self._waited += 1
        if self._cooling:
            self._cooling, self._waited = self._cooling - 1, 0
        if self._waited > self.patience:
            self.rate, self._waited, self._cooling = max(self.rate * self.factor, self.least), 0, self.cooldown

    def state(self) -> dict[str, float]:
        return {"rate": self.rate, "best": self._best, "waited": self._waited, "cooling": self._cooling}

    def restore(self, state: dict[str, float]) -> None:
        self.rate, self._best = float(state["rate"]), float(state["best"])
        self._waited, self._cooling = int(state["waited"]), int(state["cooling"])
