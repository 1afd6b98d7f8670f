from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from cupynet.backend.array import Array
from cupynet.core.checks import integer, number, one_of
from cupynet.core.wording import counted
from cupynet.parallel.synchronizers.replica_view import copies, overwrite
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord
from cupynet.training.resize import mean as mean_of
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)


class WeightAverage(Callback):
    """Averages the weights over time. At the end of a fit, the mean over time and replicas replaces the weights.

    Buffers such as running statistics are averaged too. Training itself does not change, and epochs are evaluated with
    the trained weights. At the end, the averaged weights are evaluated and saved. After `stop` or a signal, the trained
    weights are kept, because only they can continue the fit. Another fit starts from the averaged weights with a new
    average, but the optimizer state of the trained ones. To combine this callback with `EarlyStopping`, pass
    `restore_best_weights=False` to the latter.

    Args:
        decay: decay of the exponential moving average (Polyak & Juditsky 1992), at most (1 + n) / (10 + n) after n
            additions, as in TensorFlow, so that the initial weights do not dominate in a short fit. None for equal
            weights (stochastic weight averaging, Izmailov et al. 2018).
        unit: the unit of `interval` and `start_after`: `iteration` or `epoch`. If it is changed when training is
            resumed, a new average begins.
        interval: number of iterations or epochs between additions of the weights to the mean.
        start_after: number of iterations or epochs of the fit before averaging begins.

    Attributes:
        added: number of additions in this fit.
    """

    every_rank = True

    def __init__(
        self,
        decay: float | None = 0.999,
        unit: str = "iteration",
        interval: int = 1,
        start_after: int = 0,
    ) -> None:
        null = ", or null for equal weights"
        self.decay = None if decay is None else number("WeightAverage decay", decay, above=0, below=1, also=null)
        self.unit = one_of("WeightAverage unit", unit, ("iteration", "epoch"))
        self.interval = integer("WeightAverage interval", interval, 1)
        self.start_after = integer("WeightAverage start_after", start_after, 0)
        self.added = 0
        self._passed = 0  # iterations or epochs in this fit
        self._means: list[Array] = []  # means of the weights, and of the buffers if there are any

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy, without references to the trainer."""
        own = {name: value for name, value in vars(self).items() if name not in ("_params", "_backend")}
        return own | {"_means": []}

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self.added = self._passed = 0
        self._params, self._backend = trainer.params, trainer.backend
        with trainer.backend.activated():
            self._means = [vector.copy() for vector in trainer.params.vectors]

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.params is not self._params:  # another wrapper has used this object
            self.start(trainer, None)
        if not trainer.resumes(self):
            self.added = self._passed = 0

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self.unit == "iteration":
            self._count()

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        if self.unit == "epoch":
            self._count()

    def _count(self) -> None:
        self._passed += 1
        if self._passed <= self.start_after or (self._passed - self.start_after) % self.interval:
            return
        kept = self._kept()
        for mean, vector in zip(self._means, self._params.vectors, strict=True):
            if self.added:
                self._backend.weighted_sum(mean, [mean, vector], [kept, 1 - kept])
            else:
                with self._backend.activated():
                    mean[...] = vector
        self.added += 1

    def _kept(self) -> float:
        if self.decay is None:
            return self.added / (self.added + 1)
        return min(self.decay, (1 + self.added) / (10 + self.added))

    def after_finish(self, trainer: Trainer) -> bool:
        if trainer.stopped is not None and trainer.stopped.interrupts:
            return False
        if not self.added:
            if trainer.rank == 0:
                log.warning(
                    "WeightAverage: nothing was averaged. Lower start_after=%d or interval=%d",
                    self.start_after,
                    self.interval,
                )
            return False
        trainer.groups.replicas.allreduce_mean(self._means, 1.0)
        with self._backend.activated():
            for vector, mean in zip(self._params.vectors, self._means, strict=True):
                vector[...] = mean
        self._params.publish()
        if trainer.rank == 0:
            log.info("the final weights are the mean over %s", counted(self.added, self.unit))
        return True

    def state(self) -> dict[str, Any]:
        means = {kind: copies(self._backend, views) for kind, views in self._views()} if self.added else {}
        return {"added": self.added, "passed": self._passed, "unit": self.unit, **means}

    def restore(self, state: dict[str, Any]) -> None:
        if state.get("unit", self.unit) != self.unit:  # a new average; earlier versions did not save the unit
            self.added = self._passed = 0
            return
        self.added, self._passed = int(state["added"]), int(state["passed"])
        with self._backend.activated():
            for kind, views in self._views() if self.added else ():
                saved = state[kind]
                if "0" in saved:  # saved as one vector by earlier versions
                    saved = dict(self._params.buffer_views(saved["0"]))
                overwrite(self._backend, views, saved)

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = mean_of(states, [1 / len(states)] * len(states))  # equal weights, as in `after_finish`
        return found

    def _views(self) -> Iterator[tuple[str, Iterator[tuple[str, Array]]]]:
        """Yield "mean" and, if there are buffers, "buffers", each with its arrays by name."""
        views = self._params.views, self._params.buffer_views
        for kind, of, vector in zip(("mean", "buffers"), views, self._means, strict=False):
            yield kind, of(vector)
