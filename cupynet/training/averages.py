"""The averages of a fit: recording each one, and averaging at the end, which leaves the replicas identical."""

from __future__ import annotations

import json
import math
import time
from itertools import starmap
from typing import TYPE_CHECKING

import numpy as np

from cupynet.core.errors import DivergedError
from cupynet.data import Loader
from cupynet.parallel import Average, Communicator, Moment, is_finite
from cupynet.training.replica import moved

if TYPE_CHECKING:
    from cupynet.training.trainer import Trainer


def average(trainer: Trainer, moment: Moment) -> None:
    """Let the synchronizer average at this moment; if it does not, check the weights.

    Raises:
        DivergedError: the weights are not finite.
    """
    began = time.perf_counter()
    made = trainer.synchronizer.finish(trainer.replica, moment)
    if made is not None:
        trainer.statistics.clock.extend("averaging_s", began)
        record(trainer, made)
    elif not is_finite(*trainer.params.vectors):
        raise DivergedError(
            f"the replica of worker {trainer.rank} is not finite after iteration {trainer.iteration}: "
            "lower learning_rate, or train in a wider dtype"
        )


def record(trainer: Trainer, made: Average) -> None:
    """After an average, agree on a loss scale and record the measurements for the next report."""
    if trainer.replica.scaler is not None:
        trainer.replica.scaler.agree(trainer.replicas)
    if not math.isnan(made.divergence):
        made = _of_all_stages(trainer.groups.stages, made)
    trainer.statistics.averaged(made)


def _of_all_stages(stages: Communicator, made: Average) -> Average:
    """Return the layers of all stages, and their largest divergence: an upper bound of the whole network's."""
    if stages.size == 1:
        return made
    own = json.dumps([made.divergence, {name: float(apart) for name, apart in made.by_layer.items()}])
    found = [json.loads(each.tobytes()) for each in stages.all_gather(np.frombuffer(own.encode(), np.uint8))]
    layers = {name: apart for _, layers in found for name, apart in layers.items()}
    return Average(made.score, max(apart for apart, _ in found), layers)


def finish(trainer: Trainer) -> None:
    """Make the last average of a fit, once."""
    if trainer.averaged:
        return
    trainer.averaged = True
    average(trainer, "fit")
    trainer.replica.assemble()


def choose(trainer: Trainer, evaluate_on: Loader | None) -> None:
    """Let callbacks replace the weights, and evaluate the new ones, except after a signal, which is urgent."""
    vectors = trainer.params.vectors
    copies = [vector.copy() for vector in vectors]
    trainer.emit("after_finish")
    if not trainer.world.gather_numbers(any(starmap(moved, zip(vectors, copies, strict=True)))).any():
        return
    trainer.replica.assemble()
    urgent = trainer.stopped is not None and trainer.stopped.urgent
    trainer.evaluation = None if evaluate_on is None or urgent else trainer.evaluate(evaluate_on)
