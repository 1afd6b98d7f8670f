"""The state of a worker's training: everything from which it continues bit for bit after any round.

(Nothing else is random: the order of examples follows from seed and epoch, and what layers draw from seed, epoch,
sample, layer and place.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cupynet.parallel import Average, Synchronizer
from cupynet.training.callbacks import Callback
from cupynet.training.clock import Statistics
from cupynet.training.consensus import StopConsensus
from cupynet.training.replica import Replica


class TrainerState:
    """Where a worker's training is, and what else it continues from.

    Attributes:
        iteration, epoch, round: see `Trainer`.
        fit_start: the iteration at which the learning-rate schedule of an unfinished fit began; None between fits.
        finished: whether the last average of the fit has been made.
        deal: how the epoch that `round` counts in is dealt out to workers.
        statistics: what this worker counted.
    """

    def __init__(
        self, replica: Replica, synchronizer: Synchronizer, callbacks: Sequence[Callback], consensus: StopConsensus
    ) -> None:
        self._replica, self._synchronizer, self._consensus = replica, synchronizer, consensus
        self._callbacks = callbacks
        self.iteration = self.epoch = self.round = 0
        self.fit_start: int | None = None
        self.finished = True
        self.deal: tuple[int, ...] = ()
        self.statistics = Statistics()

    def state(self) -> dict[str, Any]:
        """Return numbers, and arrays on the host, by name, in dictionaries. No step may be running ahead."""
        replica, measured = self._replica, self._consensus.own
        return {
            "trainer": {
                "iteration": self.iteration,
                "epoch": self.epoch,
                "round": self.round,
                "fitting": int(self.fit_start is not None),
                "finished": int(self.finished),
                "span_start": self.fit_start or 0,
                "deal": np.array(self.deal, np.int64),
            },
            **self.statistics.state(),
            "replica": replica.state(),
            "schedule": replica.optimizer.learning_rate.state(),
            "synchronizer": self._synchronizer.state(),
            "scaling": {} if replica.scaler is None else replica.scaler.state(),
            "own": {} if measured is None else asdict(measured),
            "callbacks": {name: callback.state() for name, callback in _named(self._callbacks).items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned.

        Raises:
            ConfigError: it is the state of another network, optimizer or synchronizer, or of too few workers.
        """
        replica, position = self._replica, state["trainer"]
        self._synchronizer.check_state(state["synchronizer"])
        self.iteration, self.epoch, self.round = (position[name] for name in ("iteration", "epoch", "round"))
        self.fit_start = position["span_start"] if position["fitting"] else None
        self.finished = bool(position["finished"])
        self.deal = tuple(int(count) for count in position["deal"])
        self.statistics.restore(state)
        self._consensus.own = Average(**state["own"]) if state["own"] else None
        replica.restore(state["replica"])
        replica.optimizer.learning_rate.restore(state["schedule"])
        if replica.scaler is not None:
            replica.scaler.restore(state["scaling"])
        self._synchronizer.restore(state["synchronizer"])
        for name, callback in _named(self._callbacks).items():
            if name in state["callbacks"]:  # the others are new
                callback.restore(state["callbacks"][name])


def _named(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return callbacks by their class, and a number if there are several of one."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(type(each).__name__ == kind for each in named.values()) + 1
        named[kind if number == 1 else f"{kind}{number}"] = callback
    return named
