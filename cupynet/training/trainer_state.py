"""The state of a worker's training, from which it continues bit for bit after any round.

It needs no generator state: the order of examples depends on seed and epoch, random numbers of layers on seed, epoch,
sample, layer and place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from cupynet.parallel import Average, check_state
from cupynet.training.callbacks.base import Callback
from cupynet.training.trainer_view import TrainerView


def state_of(trainer: TrainerView) -> dict[str, Any]:
    """Return numbers, and arrays on the host, by name, in dictionaries. No step may be running ahead."""
    replica, measured = trainer.replica, trainer.consensus.own
    return {
        "trainer": {
            "iteration": trainer.iteration,
            "epoch": trainer.epoch,
            "round": trainer.round,
            "fitting": int(trainer.fit_start is not None),
            "finished": int(trainer.averaged),
            "span_start": trainer.fit_start or 0,
            "deal": np.array(trainer.deal, np.int64),
        },
        **trainer.statistics.state(),
        "replica": replica.state(),
        "schedule": trainer.schedule.state(),
        "synchronizer": trainer.synchronizer.state(),
        "scaling": {} if replica.scaler is None else replica.scaler.state(),
        "own": {} if measured is None else asdict(measured),
        "callbacks": {name: callback.state() for name, callback in _named(trainer.callbacks).items()},
    }


def restore(trainer: TrainerView, state: dict[str, Any]) -> None:
    """Take over what `state_of` returned.

    Raises:
        ConfigError: it is the state of another network, optimizer or synchronizer, or of too few workers.
    """
    replica, position = trainer.replica, state["trainer"]
    check_state(trainer.synchronizer, state["synchronizer"])
    trainer.iteration, trainer.epoch, trainer.round = (position[name] for name in ("iteration", "epoch", "round"))
    trainer.fit_start = position["span_start"] if position["fitting"] else None
    trainer.averaged = bool(position["finished"])
    trainer.deal = tuple(int(count) for count in position["deal"])
    trainer.statistics.restore(state)
    trainer.consensus.own = Average(**state["own"]) if state["own"] else None
    replica.restore(state["replica"])
    trainer.schedule.restore(state["schedule"])
    if replica.scaler is not None:
        replica.scaler.restore(state["scaling"])
    trainer.synchronizer.restore(state["synchronizer"])
    for name, callback in _named(trainer.callbacks).items():
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
