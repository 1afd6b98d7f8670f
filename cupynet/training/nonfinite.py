"""A loss or a gradient that is not finite: found in the round in which it arises, and what is done about it.

It never moves a weight and is never averaged into other replicas. Each worker looks at its own batch before anything of
it is used: at the loss, and at the squared length of the gradient, one pass over it. (Over 300 lines: what is found,
what is done about it, and the words for both.)
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cupynet.checks import counted, integer, one_of, setting
from cupynet.data import Batch, Batches
from cupynet.errors import DivergedError
from cupynet.nn import Context, Layer, Sequential
from cupynet.parallel import Groups, is_finite, parts
from cupynet.runs import Run
from cupynet.training.callbacks import Callback
from cupynet.training.records import EpochRecord, TrainerView
from cupynet.training.replica import Replica
from cupynet.training.scaling import LossScaler

ACTIONS = ("stop", "skip", "rollback")
MOST_ROLLBACKS = 3
NAMED = 5  # samples of a batch that are named in a message

log = logging.getLogger(__name__)


class Guarded(TrainerView, Protocol):
    """A trainer, as one sees it who may take a batch out of its hands."""

    groups: Groups
    replica: Replica
    scaler: LossScaler | None

    def rewind(self, state: dict[str, Any]) -> None:
        """Go back to what `state` returned before, in the same epoch of the same fit."""


class GoBack(Exception):
    """Raised on every worker after the same round: all go back to the state that they kept."""


class NonFinite(Callback):
    """What happens where a loss or a gradient is not finite, NaN or infinite. Without one among the callbacks: `stop`.

    - `stop` ends the fit with a DivergedError that names the worker, the batch, its samples and the layer.
    - `skip` leaves that batch out, on that worker alone, as if it had had none; each is told of in a warning.
    - `rollback` lets all workers go back to a state of the same epoch that they kept in memory, and leave the batch out
      when they come to it again; three times in a fit at most. (Not so where only an average brings it to light.)

    Weights that are not finite themselves are not mended by leaving a batch out: `skip` ends the fit then. So it does
    after an epoch of whose batches more than half were left out: that is no training any more.

    Args:
        action: `stop`, `skip` or `rollback`.
        most_skipped: batches that a worker may leave out, with `skip`; one more ends the fit.
        every_iterations: iterations between the states that are kept, with `rollback`. Each is a copy of the weights,
            the optimizer's and the synchronizer's vectors.

    Attributes:
        left_out: batches that all workers left out, in all fits, known at the end of each; before that, what this
            worker has since.

    Raises:
        ConfigError: an argument cannot work.
    """

    every_rank = True
    last = True

    def __init__(self, action: str = "stop", most_skipped: int = 100, every_iterations: int = 100) -> None:
        self.action = one_of("action", action, ACTIONS)
        self.most_skipped = integer("most_skipped", most_skipped, 1)
        self.every_iterations = integer("every_iterations", every_iterations, 1)
        self.left_out = 0
        self._skipped: list[tuple[int, int]] = []  # epoch and batch, of this worker
        self._found: tuple[int, int] | None = None  # in this round
        self._text = ""
        self._count = 0  # of those that were left out in this fit
        self._backs = 0
        self._continues = False  # whether the next fit goes on from a restored state
        self._kept: dict[str, Any] = {}

    # events ---------------------------------------------------------------------------------------------------------

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        self._found, self._kept, self._skipped = None, {}, []
        self.left_out, self._continues = 0, False

    def on_fit_start(self, trainer: TrainerView) -> None:
        if not self._continues:
            self._backs = self._count = 0
        self._continues = False
        self._keep(trainer)

    def on_iteration_end(self, trainer: TrainerView) -> None:
        if trainer.iteration % self.every_iterations == 0:
            self._keep(trainer)

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self._keep(trainer)  # nobody goes back behind an evaluation: what others made of it stands

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._kept = {}
        if self.action != "stop":
            self.left_out = len(self._of_all(trainer))

    def _of_all(self, trainer: TrainerView) -> Any:
        """(M, 2) epoch and batch of what workers left out. Stages of a replica leave a batch out together, and others
        may have taken over what is known of it: each counts once."""
        own = np.array(self._skipped, np.int64).reshape(-1)
        return np.unique(np.concatenate(trainer.world.all_gather_ragged(own)).reshape(-1, 2), axis=0)

    def state(self) -> dict[str, Any]:
        skipped = np.array(self._skipped, np.int64).reshape(-1, 2)
        return {"skipped": skipped, "count": self._count, "backs": self._backs}

    def restore(self, state: dict[str, Any]) -> None:
        self._skipped = [(int(epoch), int(batch)) for epoch, batch in state["skipped"]]
        self.left_out = len(self._skipped)
        self._count, self._backs, self._continues = int(state.get("count", 0)), int(state["backs"]), True

    def _keep(self, trainer: TrainerView) -> None:
        if self.action == "rollback":
            self._kept = copy.deepcopy(trainer.state())

    # in a round -----------------------------------------------------------------------------------------------------

    def takes(self, batch: Batch | None) -> Batch | None:
        """The batch that is to be trained on: none where it was left out before."""
        return None if batch is not None and (batch.epoch, batch.index) in self._skipped else batch

    def checked(self, trainer: Guarded, batch: Batch | None, samples: int) -> int:
        """After the gradients of a round: how many samples they are of; 0 where the batch is left out.

        Every worker calls it, with a batch or without one.

        Raises:
            DivergedError: on the worker that has found something; on all stages of its replica alike, but for `stop`.
        """
        replica, stages = trainer.replica, trainer.groups.stages
        broken = batch is not None and is_broken(replica)
        if trainer.scaler is not None:
            lost = broken and not is_finite_loss(replica)
            if trainer.scaler.skips(overflow=broken and not lost, failed=lost):
                replica.forget()
                return 0
        self._text = told(trainer.rank, replica, batch) if batch is not None and broken else ""
        if self.action == "stop":
            if broken:
                replica.forget()
                raise DivergedError(self._text + WAYS_OUT + LEAVE_OUT)
            return samples
        if stages.size > 1:
            broken = bool(stages.gather_numbers(broken).any())
        self._found = None
        if not broken or batch is None:
            return samples
        self._found = batch.epoch, batch.index
        lost = self.action == "skip" and not _weights_are_finite(trainer)
        if lost or (self.action == "skip" and self._count >= self.most_skipped):
            often = "" if lost else f"; {counted(self.most_skipped, 'batch')} of this worker left out before"
            raise DivergedError((self._text or "another stage of the replica is not finite") + often + WAYS_OUT)
        if self._text:
            log.warning("%s; the batch is left out", self._text)
        self._skipped.append(self._found)
        self._count, self.left_out = self._count + 1, self.left_out + 1
        replica.forget()
        return 0

    def halted(self, trainer: Guarded, batch: Batch) -> DivergedError:
        """What there is to say where a replica that ran ahead of the host stands still since this batch."""
        trainer.replica.begin()
        trainer.replica.gradient(batch)
        text = told(trainer.rank, trainer.replica, batch)
        trainer.replica.forget()
        return DivergedError(text + WAYS_OUT + LEAVE_OUT)

    def end_epoch(self, trainer: Guarded, train: Batches) -> None:
        """After the last round of an epoch of these batches, before anything is made of it.

        Raises:
            DivergedError: on every worker alike, with `skip`, where more than half of them were left out.
        """
        if self.action != "skip":
            return
        left_out = int((self._of_all(trainer)[:, 0] == trainer.epoch - 1).sum())
        if left_out > train.batches / 2:
            of_all = f"{counted(train.batches, 'batch')} of epoch {trainer.epoch}"
            raise DivergedError(f"{left_out} of the {of_all} were left out, for what is not finite{WAYS_OUT}")

    def look_back(self, trainer: Guarded) -> None:
        """After the update of a round, with `rollback`: whether all go back.

        Raises:
            GoBack: on every worker alike.
            DivergedError: on every worker alike, where they did too often.
        """
        if self.action != "rollback":
            return
        broken = self._found is not None or not is_finite(*trainer.params.vectors)
        who = np.flatnonzero(trainer.world.gather_numbers(broken)[:, 0])
        if not len(who):
            return
        whose = f"worker{'s' * (len(who) > 1)} {', '.join(map(str, who))}"
        if self._backs >= MOST_ROLLBACKS:
            raise DivergedError(
                f"what {whose} computed after iteration {trainer.iteration} is not finite, and all went back "
                f"{MOST_ROLLBACKS} times before{WAYS_OUT}"
            )
        raise GoBack(whose)

    def go_back(self, trainer: Guarded) -> None:
        """Let the weights, and whatever moves them, be as they were kept; what was spent and judged stays so."""
        at, self._backs, self._found = trainer.iteration, self._backs + 1, None
        trainer.rewind(copy.deepcopy(self._kept))
        if trainer.rank == 0:
            log.warning(
                "not finite: all workers go back from iteration %d to %d, time %d of %d",
                at, trainer.iteration, self._backs, MOST_ROLLBACKS,
            )  # fmt: skip


WAYS_OUT = ": lower learning_rate, or train in a wider dtype"
LEAVE_OUT = ", or leave such batches out: " + setting(
    "callbacks", "nonfinite.action", "skip", python="NonFinite(action='skip')"
)


def is_broken(replica: Replica) -> bool:
    """Whether the loss or the gradient of the last batch is not finite; or so large that its length is not."""
    norm = float(replica.backend.squared_norm(replica.params.grad))
    return not (math.isfinite(norm) and is_finite_loss(replica))


def is_finite_loss(replica: Replica) -> bool:
    """Whether the loss of the last batch is; where another stage has it nothing is known against it."""
    return replica.losses is None or math.isfinite(float(replica.losses))


def told(rank: int, replica: Replica, batch: Batch) -> str:
    """What is not finite, and where: the worker, the batch, its samples, the layer.

    Found by passing the batch on once more, layer by layer and as in training: with its own statistics, and with what
    is dropped of it. The buffers are as before the batch then.
    """
    at = f"of worker {rank} at batch {batch.index} of epoch {batch.epoch + 1}"
    for name, values in replica.params.views(replica.params.master):
        if not _finite(replica, values).all():
            return f"the weights of layer '{name.partition('.')[0]}' {at} are not finite"
    layer, bad = _first_output(replica, batch) if replica.model is replica.whole else ("", np.zeros(0, np.int64))
    if layer:
        return (
            f"the loss {at} is not finite, for {_samples(batch.samples[bad])}, first in the output of layer '{layer}'"
        )
    meeting = next((layer.path for layer in replica.model.network.walk() if layer.meets), None)
    if meeting is not None and not is_finite_loss(replica):
        return f"the loss {at} is not finite, but for what layer '{meeting}' has of other replicas' batches"
    for name, values in reversed(list(replica.params.views(replica.params.grad))):
        if not _finite(replica, values).all():
            layer = name.partition(".")[0]
            return f"the gradient of layer '{layer}' {at} is not finite, of {_samples(batch.samples)}"
    return f"the loss {at} is not finite, or the gradient too large, of {_samples(batch.samples)}"


def _first_output(replica: Replica, batch: Batch) -> tuple[str, Any]:
    """The first layer whose output is not finite, and for which samples of the batch; "" where all are finite."""
    network, found = replica.model.network, []
    layers = list(network.children()) if isinstance(network, Sequential) else [("network", network)]
    for part in parts(len(batch), replica.accumulate):
        with replica.backend.loans() as loans:  # nothing goes back through these layers
            number, bad = _first_of_part(replica, [layer for _, layer in layers], batch, part)
            loans.end()
        if len(bad):
            found.append((number, bad + part.start))
    replica.params.undo()
    first = min((number for number, _ in found), default=0)
    bad_ones = [bad for number, bad in found if number == first]
    return (layers[first][0], np.concatenate(bad_ones)) if found else ("", np.zeros(0, np.int64))


def _first_of_part(replica: Replica, layers: Sequence[Layer], batch: Batch, part: slice) -> tuple[int, Any]:
    """The number of the first layer whose output is not finite for a part of a batch, and for which of its samples.

    The other replicas do not take part: a layer that meets them has this batch alone.
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


def _weights_are_finite(trainer: Guarded) -> bool:
    """Whether the weights of all stages of this worker's replica are finite; all of them ask."""
    return bool(trainer.groups.stages.gather_numbers(is_finite(*trainer.params.vectors)).all())
