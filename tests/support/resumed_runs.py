"""Runs ended by a signal after some iteration, and comparisons of resumed runs with uninterrupted ones."""

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupynet import config
from cupynet.commands import train
from cupynet.config import stored
from cupynet.config.overrides import quoted
from cupynet.runs.run import Run
from cupynet.training import Callback, Trainer
from tests.support.settings import settings_of
from tests.support.trainers import TIMES

FAULT = """
import os, resource, signal, time
from cupynet.training import Callback

class Fault(Callback):
    every_rank = True

    def __init__(self, rank, iteration, kind):
        self.rank, self.iteration, self.kind = rank, iteration, kind

    def on_iteration_end(self, trainer):
        if (trainer.rank, trainer.iteration) != (self.rank, self.iteration):
            return
        if self.kind == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        else:
            os.kill(os.getpid(), getattr(signal, self.kind))
            time.sleep(0.2)  # until the main thread has handled the signal
"""
MORE = ["epochs=3", "log_every=2", "callbacks.checkpoint.every_iterations=4", "data.validation=40"]


def faulty(folder: Path, kind: str, iteration: int, rank: int = 0) -> list[str]:
    """Return settings that give a rank a fault after an iteration: a signal, or "disk" for a full disk."""
    (folder / "fault.py").write_text(FAULT)
    part = {"_target_": "fault.Fault", "rank": rank, "iteration": iteration, "kind": kind}
    return ["trusted_modules=[fault]", *(f"+callbacks.fault.{key}={value}" for key, value in part.items())]


class EndAfter(Callback):
    """Ends a run after the given iteration, with SIGTERM or with an error that simulates a kill."""

    def __init__(self, iteration: int, *, killed: bool = False) -> None:
        self.iteration, self.killed = iteration, killed

    def on_iteration_end(self, trainer: Trainer) -> None:
        if trainer.iteration != self.iteration:
            return
        if self.killed:
            raise KeyError("as if killed")
        os.kill(os.getpid(), signal.SIGTERM)
        while trainer.consensus.request is None:  # wait until the main thread has handled the signal
            time.sleep(0.001)


def trained(folder: Path, *overrides: str, callbacks: Sequence[Callback] = ()) -> None:
    """Train in this process with additional callbacks, and store the settings as the command does."""
    settings = settings_of(*overrides)
    stored.keep(folder, settings, overrides)
    experiment = train.prepare(settings)
    experiment.callbacks += callbacks
    train.train(experiment, folder)


def resumed(folder: Path, *changes: str) -> None:
    """Resume a run in this process, without storing changed settings."""
    train.train(train.prepare(config.load(folder, [*changes, f"resume={quoted(folder)}"])), folder)


def timeless_history(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in TIMES} for row in Run(folder).history()]


def same(one: Path, other: Path) -> bool:
    """Return True if two runs have the same weights, history (except for times) and results."""

    def left(folder: Path) -> tuple[Any, ...]:
        summary = json.loads((folder / "summary.json").read_text())
        weights = (folder / "weights.safetensors").read_bytes()
        return weights, timeless_history(folder), summary["images"], summary["test_loss"]

    return left(one) == left(other)
