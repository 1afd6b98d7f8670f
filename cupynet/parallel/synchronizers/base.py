"""The base class of synchronizers.

The constructor takes settings only, so that a configuration can name it; `start` binds it to a replica. It keeps what
is needed between fits (residuals, momentum). Every method is called on every worker in every round, with a batch or
without one, because each may contain collective operations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.synchronizers.replica_view import ReplicaView
from cupynet.parallel.synchronizers.schedule import AveragingSchedule, Moment


@dataclass(frozen=True)
class Average:
    """The findings of one average; the same on every worker.

    Attributes:
        score: the mean loss of all samples that the replicas trained on since the last average; NaN if unknown.
        drift: the largest relative distance |w_r - mean| / |mean| of a replica that counts in the mean; NaN if it
            was not measured.
        drift_by_layer: the same for the weights of each layer, by its name; empty if it was not measured.
    """

    score: float
    drift: float
    drift_by_layer: Mapping[str, float] = field(default_factory=dict)

    def over(self, stages: Communicator) -> Average:
        """Return the average over all stages. Its drift is the largest of a stage, an upper bound of the whole."""
        if stages.size == 1 or math.isnan(self.drift):
            return self
        own = json.dumps([self.drift, {name: float(apart) for name, apart in self.drift_by_layer.items()}])
        found = [json.loads(each.tobytes()) for each in stages.all_gather(np.frombuffer(own.encode(), np.uint8))]
        layers = {name: apart for _, layers in found for name, apart in layers.items()}
        return Average(self.score, max(apart for apart, _ in found), layers)


class Synchronizer:
    """Keeps replicas together. The base class does nothing: it is for a single replica.

    A subclass overrides `before_update`, `after_update` or `finish`, and `state` and `restore` if it has a state, and
    the other methods only if needed. Example: average the gradients in every iteration, so that all replicas stay
    identical.

        class GradientMean(Synchronizer):
            def before_update(self, replica, samples):
                self.communicator.allreduce_mean([replica.params.grad], samples)

    Attributes:
        communicator: connects this replica to the others; exists after `start`.
        schedule: decides when replicas are averaged; None: `after_update` acts in every iteration.
        average_updaters: True if identical replicas have identical optimizer state.
        shares_gradients: True if `before_update` shares gradients. All replicas then move in every round, also one
            without a batch; they have one loss scale, and the gradient norm is computed again before clipping. False if
            each replica makes its own steps. True by default in a class with a `before_update`, unless a base class
            sets it.
        may_run_ahead: True if nothing looks at the replica before an average is due, so that a GPU may run several
            rounds ahead of the host; before it looks, it then calls `replica.complete()`.
    """

    communicator: Communicator
    schedule: AveragingSchedule | None = None
    average_updaters: bool = True
    shares_gradients: bool = False
    may_run_ahead: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bases = cls.__mro__[: cls.__mro__.index(Synchronizer)]
        if "before_update" in vars(cls) and not any("shares_gradients" in vars(each) for each in bases):
            cls.shares_gradients = True

    @property
    def averaging_frequency(self) -> int | str | None:
        """Iterations between averages, or `epoch`, or `end`; None if there is no such rule."""
        return None if self.schedule is None else self.schedule.averaging_frequency

    @property
    def evaluates(self) -> bool:
        """True if every epoch can be evaluated, because replicas are identical then."""
        return self.schedule is None or self.schedule.evaluates

    def check(self, workers: int, stages: int = 1) -> None:
        """Check the number of replicas and of the stages of each, before anything is started. Overrides call `super`.

        Raises:
            ConfigError: the base class itself with several workers; or stages and a schedule that measures replicas,
                on which they would decide differently and wait for each other forever.
        """
        if type(self) is Synchronizer and workers > 1:
            raise ConfigError(
                f"Synchronizer itself is for a single worker, and there are {workers}: use ParameterAveraging or "
                "another subclass"
            )
        if stages > 1 and self.schedule is not None and self.schedule.measures:
            raise ConfigError(
                f"{type(self).__name__} averages when its measurements say so, and each stage of a pipeline measures "
                "something else: use a number of iterations"
            )

    def start(self, replica: ReplicaView, communicator: Communicator) -> None:
        """Bind to a worker's replica. Called once."""
        self.communicator = communicator

    def begin(self, replica: ReplicaView) -> None:
        """Called before a fit, and before an evaluation outside a fit.

        Replicas that should be identical get the weights of rank 0, which the user may have changed.
        """
        if self.identical and self.communicator.size > 1:
            for vector in (*self.shared(replica), *replica.params.running):
                self.communicator.broadcast(vector)
            replica.params.publish()

    def shared(self, replica: ReplicaView) -> list[Array]:
        """Return the flat vectors (P,), besides the buffers, that are equal on identical replicas."""
        return [replica.params.master, *(replica.optimizer_state.values() if self.average_updaters else ())]

    def before_update(self, replica: ReplicaView, samples: int) -> None:
        """Called after the gradients of a round.

        samples: the size of this worker's batch; 0 without one, and the gradients are zero.
        """

    def after_update(self, replica: ReplicaView, iteration: int) -> Average | None:
        """Called after iteration `iteration` (from 0). Return the average, if any; the same on every worker."""
        return None

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        """Called at the end of an `epoch`, of an epoch to be evaluated (`evaluation`) and of a `fit`.

        Return the average, if any. After a `fit` all replicas must be identical.
        """
        return None

    @property
    def identical(self) -> bool:
        """True if all replicas hold the same weights now, so that each of them is the model."""
        return True

    def __str__(self) -> str:
        """Describe the method in a few words."""
        return f"kept together by {type(self).__name__}"

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers, and arrays on the host, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    def merge(self, state: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Return a replica's weight in the mean of all, and its state once all have become that mean.

        Called when a run resumes with another number of workers. state: what that replica's `state` returned.
        """
        return 1.0, dict(state)
