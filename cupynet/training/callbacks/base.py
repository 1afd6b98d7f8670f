"""The base class of callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from cupynet.core.errors import ConfigError
from cupynet.runs.run import Run
from cupynet.training.events import EpochRecord, IterationRecord
from cupynet.training.trainer import Trainer

FINAL_WEIGHTS = "the final weights"  # for `Callback.decides`


class Callback:
    """Receives the events of training on rank 0, or on every worker if `every_rank` is True.

    Rank 0 uses the given object; other workers use copies made before `start`. Events do nothing by default.

    Attributes:
        every_rank: True for a copy on every worker.
        last: True to receive each event after the other callbacks.
        needs_validation: True to require that each epoch is evaluated on validation images.
        decides: a decision that only one callback can make in a fit, such as `FINAL_WEIGHTS`; "" for most.
        unless: the argument that leaves this decision to another callback, for the message; "" if there is none.
        outside: arguments that always name a place outside the run's folder. A stored run cannot set them.
    """

    every_rank = False
    last = False
    needs_validation = False
    decides = ""
    unless = ""
    outside: tuple[str, ...] = ()

    def check_path(self) -> None:
        """Raise OutputError if a path argument cannot be written, before data are loaded."""

    def check_new(self) -> None:
        """Raise ConfigError before a new run if a path argument holds results of another run."""

    def start(self, trainer: Trainer, run: Run | None) -> None:
        """Called once for each trainer, when it is created. run: the folder for files; None if no files are written."""

    def check_fit(self, trainer: Trainer) -> None:
        """Raise ConfigError for an invalid fit, before kernels are compiled for it; not called if they are ready."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called before the first iteration of a `fit`, which resumes a restored one if `trainer.resumes(self)` is
        true.
        """

    def on_iteration_end(self, trainer: Trainer) -> None:
        """Called after each iteration, including its update, averaging step and `on_log`."""

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        """Called every `log_every` iterations."""

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        """Called after a complete epoch and its evaluation; not after an interrupted one."""

    def on_stop(self, trainer: Trainer) -> None:
        """Called when a stop ends a fit early: after its last iteration, before its last averaging step."""

    def after_finish(self, trainer: Trainer) -> None:
        """Called after the last averaging step of a fit and the end of its last epoch, also after a stop.

        Weights may be changed here, identically on every worker. They become the result and are evaluated again.
        """

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called at the end of a fit, also after a stop; not after an error."""

    def on_diverged(self, trainer: Trainer, text: str) -> None:
        """Called after a fit that ended on a value that is not finite, on any worker; text: the error.

        Weights may be changed here. All workers have left the fit, so they can no longer communicate.
        """

    def close(self) -> None:
        """Release resources; also called after an error, even one in `start`."""

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume exactly: numbers, strings and host arrays in (nested) dictionaries."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`. If `trainer.resumes(self)` is true, the next fit continues the saved one."""

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return a common state to resume with another number of replicas; None: each keeps its own.

        states: the saved states of the replicas, in order.
        """
        return None


def check_decisions(callbacks: Mapping[str, Callback]) -> None:
    """Raise ConfigError if two callbacks make the same decision. callbacks: by name, for messages."""
    for (first, one), (second, other) in combinations(callbacks.items(), 2):
        if one.decides and one.decides == other.decides:
            remedies = [f"set {name}.{each.unless}" for name, each in ((first, one), (second, other)) if each.unless]
            remedies.append("leave one of them out")
            raise ConfigError(f"{first} and {second} both decide {one.decides}. To fix this, {' or '.join(remedies)}.")
