"""Handling of losses and gradients that are not finite.

Each worker checks the loss and the squared gradient norm of its own batch before they are used. A value that is not
finite therefore never changes a weight and is never averaged into other replicas.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynet.core.checks import counted, integer, one_of, setting
from cupynet.core.errors import DivergedError
from cupynet.data import Batch
from cupynet.parallel import is_finite
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.diagnosis import diagnose
from cupynet.training.replica import Step

if TYPE_CHECKING:
    from cupynet.training.trainer import Trainer

ACTIONS = ("stop", "skip")
REMEDY = ": lower learning_rate, train in a wider dtype, or leave such batches out: " + setting(
    "callbacks", "nonfinite.action", "skip", python="NonFinite(action='skip')"
)

log = logging.getLogger(__name__)


class NonFinite(Callback):
    """Stops training or skips the batch if a loss or a gradient is NaN or infinite.

    Trainers without this callback use `stop`.

    - `stop` ends the fit with a DivergedError that names the worker, the batch, its samples and the layer.
    - `skip` leaves that batch out, on that worker alone, as if it had had none, and logs a warning. It ends the fit if
      the weights themselves are not finite.

    Args:
        action: `stop` or `skip`.
        most_skipped: maximum number of batches that a worker may leave out; one more ends the fit.

    Attributes:
        left_out: number of batches that all workers have left out, updated at the end of each fit; during a fit, those
            of this worker are added.

    Raises:
        ConfigError: an argument is not valid.
    """

    every_rank = True
    last = True
    decides = "the handling of values that are not finite"

    def __init__(self, action: str = "stop", most_skipped: int = 100) -> None:
        self.action = one_of("action", action, ACTIONS)
        self.most_skipped = integer("most_skipped", most_skipped, 1)
        self.left_out = 0
        self._skipped: list[tuple[int, int]] = []  # epoch and batch, of this worker

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._skipped, self.left_out = [], 0

    def on_fit_end(self, trainer: Trainer) -> None:
        if self.action == "skip":
            own = np.array(self._skipped, np.int64).reshape(-1)
            every = np.concatenate(trainer.world.all_gather(own)).reshape(-1, 2)
            self.left_out = len(np.unique(every, axis=0))  # a batch left out by several stages counts once

    def state(self) -> dict[str, Any]:
        return {"skipped": np.array(self._skipped, np.int64).reshape(-1, 2)}

    def restore(self, state: dict[str, Any]) -> None:
        self._skipped = [(int(epoch), int(batch)) for epoch, batch in state["skipped"]]
        self.left_out = len(self._skipped)

    # called by the trainer ------------------------------------------------------------------------------------------

    def checked(self, trainer: Trainer, step: Step) -> Step:
        """Return the step, or one without samples if its batch is left out. All workers call it in every round.

        Raises:
            DivergedError: the step is not finite; with `skip`, too many were left out, or the weights are not finite.
        """
        replica, stages, batch = trainer.replica, trainer.groups.stages, step.batch
        text = diagnose(trainer.rank, replica, batch) if batch is not None and not step.finite else ""
        if self.action == "stop":
            if text:
                replica.forget()
                raise DivergedError(text + REMEDY)
            return step
        if step.overflowed:
            return step
        broken = bool(text)
        if stages.size > 1:
            broken = bool(stages.gather_numbers(broken).any())
        if not broken or batch is None:
            return step
        reason = text or "another stage of the replica is not finite"
        if not stages.gather_numbers(is_finite(*trainer.params.vectors)).all():
            raise DivergedError(reason + REMEDY)
        if len(self._skipped) >= self.most_skipped:
            before = f"{counted(self.most_skipped, 'batch')} already left out by this worker"
            raise DivergedError(f"{reason}; {before}{REMEDY}")
        if text:
            log.warning("%s; the batch is left out", text)
        self._skipped.append((batch.epoch, batch.index))
        self.left_out += 1
        replica.forget()
        return Step(batch)

    def halted(self, trainer: Trainer, batch: Batch) -> DivergedError:
        """Return the error of a replica that ran ahead of the host and stopped at this batch."""
        trainer.replica.begin()
        trainer.replica.backpropagate(batch)
        text = diagnose(trainer.rank, trainer.replica, batch)
        trainer.replica.forget()
        return DivergedError(text + REMEDY)
