"""Base class of synchronizers.

The constructor takes only settings; `start` binds the synchronizer to a replica. State such as residuals and momentum
persists between fits. All workers call the methods in every iteration, even without a batch, because the methods may
contain collectives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.synchronizers.replica_view import ReplicaView
from cupynet.parallel.synchronizers.schedule import AveragingSchedule, Moment


@dataclass(frozen=True)
class Average:
    """Statistics of one averaging step, identical on all workers.

    Attributes:
        score: mean loss over all samples since the last averaging step; NaN if unknown.
        drift: largest relative distance |w_r - mean| / |mean| over replicas with nonzero weight; NaN if not measured.
        drift_by_layer: the same for each layer, by layer name; empty if not measured.
    """

    score: float
    drift: float
    drift_by_layer: Mapping[str, float] = field(default_factory=dict)

    def over(self, stages: Communicator) -> Average:
        """Combine the averages of all stages. The largest drift bounds the drift of the whole network."""
        if stages.size == 1 or math.isnan(self.drift):
            return self
        averages = stages.gather_json([self.drift, {name: float(drift) for name, drift in self.drift_by_layer.items()}])
        layers = {name: drift for _, layers in averages for name, drift in layers.items()}
        return Average(self.score, max(drift for drift, _ in averages), layers)


class Synchronizer:
    """Base class of synchronization methods. By itself it does nothing, and supports only a single replica.

    A subclass overrides `before_update`, `after_update` or `finish`; `state` and `restore` if it has state; and
    `identical` if replicas differ between iterations. This example averages the gradients in every iteration:

        class GradientMean(Synchronizer):
            def before_update(self, replica, samples):
                self.communicator.allreduce_mean([replica.params.grad, *replica.params.running], samples)

    Attributes:
        communicator: connects this replica to the others; exists after `start`.
        schedule: decides when replicas are averaged; None if the synchronizer acts in every iteration.
        average_updaters: True if identical replicas have identical optimizer states.
        shares_gradients: True if `before_update` exchanges gradients. Then all replicas update in every iteration, even
            without a batch; they share one loss scale; and the gradient norm is recomputed before clipping. True by
            default in a class that defines `before_update`, unless the class or a base other than Synchronizer sets it.
        may_run_ahead: True if a GPU may run several iterations ahead of the host. The replica may then be read only
            when an average is due, after `replica.complete()`.
    """

    communicator: Communicator
    schedule: AveragingSchedule | None = None
    average_updaters: bool = True
    shares_gradients: bool = False
    may_run_ahead: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        bases = cls.__mro__[: cls.__mro__.index(Synchronizer)]
        if "before_update" in vars(cls) and not any("shares_gradients" in vars(base) for base in bases):
            cls.shares_gradients = True

    @property
    def averaging_frequency(self) -> int | str | None:
        """Iterations between averaging steps, or `epoch`, or `end`; None if there is no fixed frequency."""
        return None if self.schedule is None else self.schedule.averaging_frequency

    @property
    def evaluates(self) -> bool:
        """True if every epoch can be evaluated, because replicas are identical when it ends."""
        return self.schedule is None or self.schedule.evaluates

    def check(self, workers: int, stages: int = 1) -> None:
        """Validate the number of replicas and stages before any worker starts. Overrides must call `super().check`.

        Raise ConfigError for the base class with several workers, and for an adaptive schedule with several stages,
        because stages could decide differently and deadlock.
        """
        if type(self) is Synchronizer and workers > 1:
            raise ConfigError(
                f"Synchronizer itself supports a single worker, but there are {workers}. Use ParameterAveraging or "
                "another subclass"
            )
        if stages > 1 and self.schedule is not None and self.schedule.measures:
            raise ConfigError(
                f"{type(self).__name__} uses an adaptive schedule, which pipelines do not support because each stage "
                "measures its own drift. Use a fixed averaging_frequency instead"
            )

    def start(self, replica: ReplicaView, communicator: Communicator) -> None:
        """Bind to a replica. This is called once."""
        self.communicator = communicator

    def begin(self, replica: ReplicaView) -> None:
        """Called before a fit, and before an evaluation outside a fit.

        If replicas are identical, this broadcasts the weights, running statistics and shared optimizer state of rank 0,
        because the user may have changed them.
        """
        if self.identical and self.communicator.size > 1:
            for vector in (*self.shared(replica), *replica.params.running):
                self.communicator.broadcast(vector)
            replica.params.publish()

    def shared(self, replica: ReplicaView) -> list[Array]:
        """Return the vectors (P,) of weights and optimizer state that are equal on identical replicas."""
        return [replica.params.master, *(replica.optimizer_state.values() if self.average_updaters else ())]

    def before_update(self, replica: ReplicaView, samples: int) -> None:
        """Called after the gradients of an iteration are computed.

        samples: this worker's batch size. It is 0 if there is no batch, and the gradients are then zero.
        """

    def after_update(self, replica: ReplicaView, iteration: int) -> Average | None:
        """Called after iteration `iteration` (from 0). Return the average, identical on all workers, or None."""
        return None

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        """Called at the end of an epoch or fit. Return the average, or None.

        `moment` is `fit` at the end of a fit, when replicas must become identical; `evaluation` before an evaluation at
        the end of another epoch; otherwise `epoch`.
        """
        return None

    @property
    def identical(self) -> bool:
        """True if all replicas currently hold the same weights. If so, a resumed fit begins with rank 0's weights."""
        return True

    def __str__(self) -> str:
        return f"synchronized by {type(self).__name__}"

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers and host arrays, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""

    def merge(self, state: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Return this replica's averaging weight, and its state after averaging.

        Called when a run is resumed with a different number of workers. `state` is the replica's saved state.
        """
        return 1.0, dict(state)
