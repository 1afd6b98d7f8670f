"""Handling of losses and gradients that are not finite.

Each worker checks its own batch before anything of it is used: the loss, and the squared norm of the gradient. So a
value that is not finite never moves a weight and is never averaged into other replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynet.core.checks import counted, integer, one_of, setting
from cupynet.core.errors import DivergedError
from cupynet.data import Batch, Batches
from cupynet.nn import Context, Layer, Sequential
from cupynet.parallel import is_finite, parts
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.replica import Replica, Step
from cupynet.training.trainer_view import TrainerView

ACTIONS = ("stop", "skip")
NAMED = 5  # samples of a batch that are named in a message

log = logging.getLogger(__name__)


class NonFinite(Callback):
    """Decides what happens if a loss or a gradient is NaN or infinite. Without one among the callbacks: `stop`.

    - `stop` ends the fit with a DivergedError that names the worker, the batch, its samples and the layer.
    - `skip` leaves that batch out, on that worker alone, as if it had had none, and logs a warning. It ends the fit if
      the weights themselves are not finite, and after an epoch of which it left out more than half of the batches.

    Args:
        action: `stop` or `skip`.
        most_skipped: batches that a worker may leave out in a fit, with `skip`; one more ends the fit.

    Attributes:
        left_out: batches that all workers left out, in all fits, known at the end of each fit; before that, those that
            this worker has left out since.

    Raises:
        ConfigError: an argument is not valid.
    """

    every_rank = True
    last = True

    def __init__(self, action: str = "stop", most_skipped: int = 100) -> None:
        self.action = one_of("action", action, ACTIONS)
        self.most_skipped = integer("most_skipped", most_skipped, 1)
        self.left_out = 0
        self._skipped: list[tuple[int, int]] = []  # epoch and batch, of this worker
        self._count = 0  # skipped in this fit
        self._resumed = False  # the next fit continues a restored one

    # events ---------------------------------------------------------------------------------------------------------

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        self._skipped, self.left_out, self._resumed = [], 0, False

    def on_fit_start(self, trainer: TrainerView) -> None:
        if not self._resumed:
            self._count = 0
        self._resumed = False

    def on_fit_end(self, trainer: TrainerView) -> None:
        if self.action == "skip":
            self.left_out = len(self._of_all(trainer))

    def _of_all(self, trainer: TrainerView) -> Any:
        """Return epoch and batch, (M, 2), of what all workers left out; what several stages left out counts once."""
        own = np.array(self._skipped, np.int64).reshape(-1)
        return np.unique(np.concatenate(trainer.world.all_gather_ragged(own)).reshape(-1, 2), axis=0)

    def state(self) -> dict[str, Any]:
        skipped = np.array(self._skipped, np.int64).reshape(-1, 2)
        return {"skipped": skipped, "count": self._count}

    def restore(self, state: dict[str, Any]) -> None:
        self._skipped = [(int(epoch), int(batch)) for epoch, batch in state["skipped"]]
        self.left_out = len(self._skipped)
        self._count, self._resumed = int(state.get("count", 0)), True

    # in a round -----------------------------------------------------------------------------------------------------

    def checked(self, trainer: TrainerView, step: Step) -> Step:
        """Return the step, or one without samples if its batch is left out. All workers call it in every round.

        Raises:
            DivergedError: on the worker that has found something; with `skip` on all stages of its replica.
        """
        replica, stages, batch = trainer.replica, trainer.groups.stages, step.batch
        text = diagnose(trainer.rank, replica, batch) if batch is not None and not step.finite else ""
        if self.action == "stop":
            if text:
                replica.forget()
                raise DivergedError(text + WAYS_OUT + LEAVE_OUT)
            return step
        if step.overflowed:
            return step
        broken = bool(text)
        if stages.size > 1:
            broken = bool(stages.gather_numbers(broken).any())
        if not broken or batch is None:
            return step
        lost = not stages.gather_numbers(is_finite(*trainer.params.vectors)).all()
        if lost or self._count >= self.most_skipped:
            often = "" if lost else f"; {counted(self.most_skipped, 'batch')} of this worker left out before"
            raise DivergedError((text or "another stage of the replica is not finite") + often + WAYS_OUT)
        if text:
            log.warning("%s; the batch is left out", text)
        self._skipped.append((batch.epoch, batch.index))
        self._count, self.left_out = self._count + 1, self.left_out + 1
        replica.forget()
        return Step(batch)

    def halted(self, trainer: TrainerView, batch: Batch) -> DivergedError:
        """Return the error of a replica that ran ahead of the host and stands still since this batch."""
        trainer.replica.begin()
        trainer.replica.backpropagate(batch)
        text = diagnose(trainer.rank, trainer.replica, batch)
        trainer.replica.forget()
        return DivergedError(text + WAYS_OUT + LEAVE_OUT)

    def end_epoch(self, trainer: TrainerView, train: Batches) -> None:
        """End the fit after an epoch of which `skip` left out more than half of the batches. DivergedError."""
        if self.action != "skip":
            return
        left_out = int((self._of_all(trainer)[:, 0] == trainer.epoch - 1).sum())
        if left_out > train.batches / 2:
            of_all = f"{counted(train.batches, 'batch')} of epoch {trainer.epoch}"
            raise DivergedError(f"{left_out} of the {of_all} were left out, for what is not finite{WAYS_OUT}")


WAYS_OUT = ": lower learning_rate, or train in a wider dtype"
LEAVE_OUT = ", or leave such batches out: " + setting(
    "callbacks", "nonfinite.action", "skip", python="NonFinite(action='skip')"
)


def diagnose(rank: int, replica: Replica, batch: Batch) -> str:
    """Return what is not finite, and where: the worker, the batch, its samples, the layer.

    The batch is passed forward once more, layer by layer, with its own statistics and dropout.
    """
    at = f"of worker {rank} at batch {batch.index} of epoch {batch.epoch + 1}"
    for name, values in replica.params.views(replica.params.master):
        if not _finite(replica, values).all():
            return f"the weights of layer '{name.partition('.')[0]}' {at} are not finite"
    layer, bad = _first_output(replica, batch) if replica.model is replica.whole else ("", np.zeros(0, np.int64))
    if layer:
        samples = _samples(batch.samples[bad])
        return f"the loss {at} is not finite, for {samples}, first in the output of layer '{layer}'"
    meeting = next((layer.path for layer in replica.model.network.walk() if layer.syncs_replicas), None)
    if meeting is not None and not replica.loss_is_finite:
        return f"the loss {at} is not finite, because of other replicas' batches, which layer '{meeting}' uses"
    for name, values in reversed(list(replica.params.views(replica.params.grad))):
        if not _finite(replica, values).all():
            layer = name.partition(".")[0]
            return f"the gradient of layer '{layer}' {at} is not finite, of {_samples(batch.samples)}"
    return f"the loss {at} is not finite, or the gradient too large, of {_samples(batch.samples)}"


def _first_output(replica: Replica, batch: Batch) -> tuple[str, Any]:
    """Return the first layer whose output is not finite, and for which samples; "" if all are finite."""
    network, found = replica.model.network, []
    layers = list(network.children()) if isinstance(network, Sequential) else [("network", network)]
    for part in parts(len(batch), replica.accumulate):
        with replica.backend.loans() as loans:  # there is no backward pass
            number, bad = _first_of_part(replica, [layer for _, layer in layers], batch, part)
            loans.end()
        if len(bad):
            found.append((number, bad + part.start))
    replica.params.restore_buffers()
    first = min((number for number, _ in found), default=0)
    bad_ones = [bad for number, bad in found if number == first]
    return (layers[first][0], np.concatenate(bad_ones)) if found else ("", np.zeros(0, np.int64))


def _first_of_part(replica: Replica, layers: Sequence[Layer], batch: Batch, part: slice) -> tuple[int, Any]:
    """Return the number of the first layer whose output is not finite for a part of a batch, and for which samples.

    The other replicas do not take part: a layer that exchanges values with them has this batch alone.
    """
    model, x, samples = replica.model, batch.images[part], batch.samples[part]
    context = Context(train=True, epoch=batch.epoch, iteration=replica.updates, samples=samples, seed=model.seed)
    for number, layer in enumerate(layers):
        x, _ = layer.forward(x, context)  # each by itself: no two of them as one operation
        fine = _finite(replica, x)
        bad = np.flatnonzero(~fine.reshape(len(fine), -1).all(axis=1))
        if len(bad):
            return number, bad
    losses, _ = model.loss(replica.backend, x, batch.labels[part])
    return len(layers) - 1, np.flatnonzero(~_finite(replica, losses))


def _finite(replica: Replica, array: Any) -> Any:
    return np.isfinite(np.asarray(replica.backend.to_host(array), np.float64))


def _samples(indices: Any) -> str:
    named = ", ".join(str(index) for index in indices[:NAMED])
    more = f" and {len(indices) - NAMED} more" if len(indices) > NAMED else ""
    return f"sample{'s' * (len(indices) > 1)} {named}{more}"
