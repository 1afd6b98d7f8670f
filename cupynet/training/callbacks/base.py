from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cupynet.core.checks import one_of
from cupynet.core.described import PLAIN
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown
from cupynet.runs.run import Run
from cupynet.training.events import EpochRecord, IterationRecord
from cupynet.training.trainer import Trainer


class Callback:
    """Receives training events on rank 0, or on every worker if `every_rank` is True.

    Rank 0 uses the object itself; other workers use copies made before `start`. By default, the methods do nothing. A
    callback that changes the weights must make the same change on every worker, so it needs `every_rank`. While a
    callback runs on rank 0, the other workers wait for it, at most `timeout_s` (see `ParallelWrapper`).

    Attributes:
        every_rank: True to run a copy on every worker.
        last: True to receive each event after the other callbacks.
        needs_validation: True to require an evaluation of validation data in each epoch.
        outside: arguments with paths outside the run folder. The settings of a stored run must not set them.
    """

    every_rank = False
    last = False
    needs_validation = False
    outside: tuple[str, ...] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raise ConfigError for a method such as `on_epoch_begin`, which would never be called."""
        super().__init_subclass__(**arguments)
        for name, value in vars(cls).items():
            if name.startswith("on_") and callable(value):
                one_of(f"{cls.__name__} event", name, EVENTS)

    def __repr__(self) -> str:
        """Return the class name and the non-default arguments, if they are attributes with plain values."""
        arguments = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = vars(self).get(name, parameter.default)
            if isinstance(value, PLAIN) and value != parameter.default:
                arguments.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    @property
    def in_use(self) -> bool:
        """True while an open `ParallelWrapper` writes files with this object. Another wrapper then refuses it."""
        return False

    def check_path(self) -> None:
        """Raise OutputError if a path argument is not writable. This is called before data are loaded."""

    def check_new(self) -> None:
        """Raise ConfigError if a path argument points to results of another run. This is called before a new run."""

    def start(self, trainer: Trainer, run: Run | None) -> None:
        """Called once per trainer, when it is created. `run` is the run folder, or None if there is none."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Called before the first iteration of a fit, which continues a restored fit if `trainer.resumes(self)`."""

    def on_iteration_end(self, trainer: Trainer) -> None:
        """Called after each iteration, including averaging and `on_log`."""

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        """Called every `log_every` iterations."""

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        """Called after a complete epoch and its evaluation, but not after an interrupted epoch."""

    def on_stop(self, trainer: Trainer) -> None:
        """Called if a fit is stopped early, after its last iteration and before the last averaging step."""

    def after_finish(self, trainer: Trainer) -> bool | None:
        """Called after the last averaging step of a fit, even if it is stopped early. Return False if nothing changed.

        Callbacks may change the weights, identically on every worker. The weights are then evaluated again, unless all
        callbacks return False.
        """
        return False

    def on_fit_end(self, trainer: Trainer) -> None:
        """Called at the end of a fit, even if it is stopped early, but not after an error."""

    def on_diverged(self, trainer: Trainer, text: str) -> None:
        """Called after a fit that ended with a DivergedError on any worker. `text` is its message.

        The callback may change the weights. All workers have left the fit, so they can no longer communicate.
        """

    def close(self) -> None:
        """Release resources. This is also called after an error, including an error in `start`."""

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume exactly, as nested dictionaries of numbers, strings and host arrays."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state. If `trainer.resumes(self)`, the next fit continues the saved fit."""

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return a common state for a different number of replicas, or None to keep the states separate."""
        return None


EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


class LambdaCallback(Callback):
    """Calls functions on training events, on rank 0.

        LambdaCallback(on_epoch_end=lambda trainer, record: print(record.epoch, record.loss))

    Each function is named after an event of `Callback` and has the same arguments.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for event, function in functions.items():
            if not callable(function):
                raise ConfigError("must be a function", f"LambdaCallback {event}", shown(function))
            setattr(self, one_of("LambdaCallback event", event, EVENTS), function)
