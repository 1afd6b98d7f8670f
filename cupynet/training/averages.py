"""The averages of a fit: recording each one, and averaging at the end, which leaves the replicas identical."""

from __future__ import annotations

import math
import time
from itertools import starmap

from cupynet.core.errors import ConfigError, DivergedError
from cupynet.data import Batches
from cupynet.parallel import Average, Moment, is_finite
from cupynet.training.events import StopReason
from cupynet.training.replica import moved
from cupynet.training.trainer_view import TrainerView


def average(trainer: TrainerView, moment: Moment) -> None:
    """Let the synchronizer average at this moment; if it does not, check the weights.

    Raises:
        DivergedError: the weights are not finite.
    """
    began = time.perf_counter()
    made = trainer.synchronizer.finish(trainer.replica, moment)
    if made is not None:
        trainer.statistics.clock.meeting(time.perf_counter() - began)
        take_note(trainer, made)
    elif not is_finite(*trainer.params.vectors):
        raise DivergedError(
            f"the replica of worker {trainer.rank} is not finite after iteration {trainer.iteration}: "
            "lower learning_rate, or train in a wider dtype"
        )


def take_note(trainer: TrainerView, made: Average) -> None:
    """After an average: agree on a loss scale, and record its figures for the next report."""
    if trainer.replica.scaler is not None:
        trainer.replica.scaler.meet(trainer.replicas)
    if trainer.groups.stages.size > 1 and not math.isnan(made.divergence):
        trainer.consensus.own = made  # other stages learn of it at the next agreement
        made = Average(made.score, math.nan)
    trainer.statistics.averaged(made)


def finish(trainer: TrainerView) -> None:
    """Make the last average of a fit, once."""
    if trainer.averaged:
        return
    trainer.averaged = True
    changed = _changed_in(trainer, "before_finish")
    began = time.perf_counter()
    if trainer.replicas.gather_numbers(changed).any():
        trainer.synchronizer.changed(trainer.replica)
    trainer.statistics.clock.meeting(time.perf_counter() - began)
    average(trainer, "fit")
    name = type(trainer.synchronizer).__name__
    _assemble(trainer, f"{name}: the replicas differ at the end of a fit: average them in finish(replica, 'fit')")


def choose(trainer: TrainerView, evaluate_on: Batches | None) -> None:
    """Let callbacks give the replicas other weights, and evaluate these; not after a signal, which is urgent."""
    if not trainer.world.gather_numbers(_changed_in(trainer, "after_finish")).any():
        return
    _assemble(
        trainer,
        "a callback changed the weights of some replicas alone, in after_finish: let it run on every worker "
        "(every_rank = True) and do the same on each",
    )
    urgent = trainer.stopped is not None and trainer.stopped.reason == StopReason.SIGNAL
    trainer.evaluation = None if evaluate_on is None or urgent else trainer.evaluate(evaluate_on)


def _changed_in(trainer: TrainerView, event: str) -> bool:
    """Emit an event in which callbacks may change weights; return whether they did, on this worker."""
    vectors = trainer.params.vectors
    copies = [vector.copy() for vector in vectors]
    trainer.emit(event)
    return any(starmap(moved, zip(vectors, copies, strict=True)))


def _assemble(trainer: TrainerView, refusal: str) -> None:
    """Make the user's model complete. ConfigError, with this text, if replicas differ."""
    own = [float(trainer.backend.total(vector)) for vector in trainer.params.vectors]
    if len({tuple(theirs) for theirs in trainer.replicas.gather_numbers(*own).tolist()}) > 1:
        raise ConfigError(refusal)
    trainer.replica.assemble()
