"""What keeps replicas together: the base class.

A synchronizer is described by its constructor and bound by `start`, so that a configuration can name one. What is
needed between fits (residuals, momentum) lives on it from `start` on. Every method is called on every worker in every
round, whether that worker had a batch or not: each may hold collective operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError, DivergedError
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.synchronizers.replica_view import ReplicaView

Moment: TypeAlias = Literal["epoch", "evaluation", "fit"]


@dataclass(frozen=True)
class Average:
    """What one average found; the same on every worker.

    Attributes:
        score: mean loss of all samples that the replicas trained on since the last average; NaN where it was not
            asked for or nobody has it.
        divergence: the largest relative distance |w_r - mean| / |mean| of a replica from the mean, of those that count
            in it; NaN where it was not measured.
        by_layer: the same for the weights of each layer of the network, by its name; empty where it was not measured.
    """

    score: float
    divergence: float
    by_layer: Mapping[str, float] = field(default_factory=dict)


class Synchronizer:
    """Keeps replicas together. This one, used as it is, does nothing: for one replica alone.

    A subclass overrides what it needs. Gradients averaged in every iteration, so that all replicas stay one:

        class GradientMean(Synchronizer):
            def before_update(self, replica, samples):
                self.communicator.allreduce_mean([replica.params.grad], samples)
                return True

    Attributes:
        communicator: the way to the other replicas; exists after `start`.
        frequency: iterations between averages, or `epoch`, or `end`; None where no such rule is followed.
        measures: whether replicas decide by what they measure after which iterations they meet. The stages of a
            pipeline would decide differently, and wait for each other for ever: together they are refused.
    """

    communicator: Communicator
    frequency: int | str | None = None
    measures: bool = False

    def check(self, workers: int, stages: int = 1) -> None:
        """Refuse to keep so many replicas together, of so many stages each, where that cannot work.

        Asked once, before anything is started. A subclass with rules of its own asks `super` too.

        Raises:
            ConfigError: several workers and this class itself, which does nothing; or stages that would each decide
                for themselves when to meet.
        """
        if type(self) is Synchronizer and workers > 1:
            raise ConfigError(
                f"Synchronizer keeps nothing together, and there are {workers} workers: take ParameterAveraging or "
                "another subclass"
            )
        if self.measures and stages > 1:
            raise ConfigError(
                f"{type(self).__name__} decides by what it measures when to average, and each stage of a pipeline "
                "measures something else: give it a number of iterations"
            )

    def start(self, replica: ReplicaView, communicator: Communicator) -> None:
        """Bind to a worker's replica, once, when it has been made."""
        self.communicator = communicator

    def begin(self, replica: ReplicaView) -> None:
        """Before a fit, and before an evaluation outside of one.

        Replicas that should be identical now take over rank 0's weights, which somebody may have changed.
        """
        if self.identical and self.communicator.size > 1:
            for vector in (*self.shared(replica), *replica.params.running):
                self.communicator.broadcast(vector)
            replica.params.publish()

    def shared(self, replica: ReplicaView) -> list[Array]:
        """The flat vectors (P,) that replicas have in common whenever they are identical, beside the buffers."""
        return [replica.params.master, *replica.optimizer_state.values()]

    def before_update(self, replica: ReplicaView, samples: int) -> bool:
        """After the gradients of a round: whether the optimizer is to move the weights.

        samples: how many this worker's gradients are of; 0 without a batch, and the gradients are zero.
        """
        return samples > 0

    def looks(self, iteration: int) -> bool:
        """Whether `after_update` looks at the replica after this iteration, from 0, or at what was counted.

        Where it does not, and replicas share no gradients, a GPU may run ahead of the host: `before_update` is then
        called for several rounds at once, before the next `after_update` that looks, and before `finish`.
        """
        return True

    def after_update(self, replica: ReplicaView, iteration: int) -> Average | None:
        """After iteration `iteration` (from 0). What was averaged, if anything: the same on every worker."""
        return None

    def changed(self, replica: ReplicaView) -> None:
        """Somebody has changed weights at the end of a fit, before `finish`, of each replica its own.

        Their mean is what counts: here all replicas take it. A subclass whose `finish` does so anyway may wait for it.
        """
        self.communicator.allreduce_mean([*self.shared(replica), *replica.params.running], 1)
        replica.params.publish()

    def finish(self, replica: ReplicaView, moment: Moment) -> Average | None:
        """At the end of an `epoch`, of an epoch that is to be evaluated (`evaluation`), and of a `fit`.

        What was averaged, if anything. After a `fit` all replicas must be identical.
        """
        return None

    @property
    def evaluates(self) -> bool:
        """Whether replicas are made identical wherever an epoch is to be evaluated; where not, it is left out."""
        return True

    @property
    def shares_gradients(self) -> bool:
        """Whether replicas use each other's gradients: in half precision all have one loss scale then.

        True unless a subclass knows that each replica makes its own steps: then each finds its own between averages.
        """
        return True

    @property
    def changes_gradients(self) -> bool:
        """Whether `before_update` may change the gradients: their norm is computed again before clipping."""
        return self.shares_gradients

    @property
    def identical(self) -> bool:
        """Whether all replicas hold the same weights now, so that any of them may stand for the model."""
        return True

    def describe(self) -> str:
        """How it keeps replicas together, in a few words for people."""
        return f"kept together by {type(self).__name__}"

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on exactly: numbers, and arrays on the host, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""

    def merge_weight(self, state: Mapping[str, Any]) -> float:
        """What a replica with such a state counts in a mean of all: for one, the samples since they last met."""
        return 1.0

    def merged_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of replicas that have just become one, the mean of all; state: the mean of theirs."""
        return dict(state)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what `restore` would look in vain for something in. ConfigError."""
        lacking = list(_lacking(self.state(), state))
        if lacking:
            workers = self.communicator.size
            raise ConfigError(
                f"this state has no {', '.join(lacking)} for {workers} worker{'s' * (workers > 1)} {self.describe()}: "
                "it was made by another number of workers, or by a synchronizer with other settings"
            )


def _lacking(own: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    """The names, with dots, of what is in `own` and not in `state`."""
    for name, value in own.items():
        if name not in state:
            yield name
        elif isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _lacking(value, state[name]))


def is_finite(*vectors: Array) -> bool:
    """Whether every element of all of them is finite; one pass over each, without a temporary vector."""
    return all(math.isfinite(float(vector.sum())) for vector in vectors)


def distance(backend: Backend, pairs: Iterable[tuple[Array, Array]]) -> float:
    """|vector - mean| / |mean| of a vector of that backend which is given in parts, each with the mean's."""
    apart = length = 0.0
    for vector, mean in pairs:
        apart += float(backend.squared_norm(vector - mean))
        length += float(backend.squared_norm(mean))
    return math.sqrt(apart / max(length, 1e-30))


def refuse_divergence(finite: Sequence[float], iteration: int | None, what: str = "replica") -> None:
    """Raise on every worker alike if any replica's is not finite: it must not be averaged into the others.

    finite: by replica, which is a worker only where replicas are not cut into stages.
    """
    bad = [str(rank) for rank, fine in enumerate(finite) if not fine]
    if bad:
        when = "at the end of an epoch" if iteration is None else f"after iteration {iteration + 1}"
        several = len(bad) > 1
        whose = f"replica{'s' * several} {', '.join(bad)}"
        verb, kept = ("are", "were") if several else ("is", "was")
        if what != "replica":
            whose = f"the {what}{'s' * several} of {whose}"
        spared = f" and {kept} not averaged into the others" if len(bad) < len(finite) else ""
        raise DivergedError(f"{whose} {verb} not finite {when}{spared}: lower learning_rate, or train in a wider dtype")
