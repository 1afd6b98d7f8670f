"""Outer optimizers. At each averaging step, delta = mean - common weights serves as the negative gradient."""

from __future__ import annotations

from typing import Any

from cupynet.backend.array import Array
from cupynet.core.checks import number, object_named
from cupynet.parallel.synchronizers.replica_view import ReplicaView, by_name, take_by_name


class OuterOptimizer:
    """Computes new common weights from the previous ones and the mean, identically on all workers."""

    def __str__(self) -> str:
        return type(self).__name__

    def start(self, replica: ReplicaView) -> None:
        """Allocate the state for the weights of `replica`. This is called once."""

    def step(self, common: Array, mean: Array) -> None:
        """Overwrite `mean` (P,) with the new common weights. `common` (P,) are the previous common weights."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: host arrays, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


class SlowMo(OuterOptimizer):
    """Slow momentum (Wang et al. 2019, 1910.00643): u = momentum · u + (mean - common); common += learning_rate · u.

    In the paper, u is divided by the learning rate of the replicas. Here u includes it, as in `Momentum`. For a
    constant learning rate, the two are equivalent. Learning rate 1 and momentum 0 give the mean.
    """

    def __init__(self, learning_rate: float = 1.0, momentum: float = 0.5) -> None:
        name = type(self).__name__
        self.learning_rate = number(f"{name} learning_rate", learning_rate, above=0)
        self.momentum = number(f"{name} momentum", momentum, minimum=0, below=1)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.learning_rate:g}, {self.momentum:g})"

    def start(self, replica: ReplicaView) -> None:
        self._replica = replica
        self._velocity = replica.backend.allocate(replica.params.master.shape, replica.params.master.dtype)
        self._velocity[...] = 0

    def step(self, common: Array, mean: Array) -> None:
        mean -= common
        self._move(self._velocity, mean)
        mean *= self.learning_rate
        mean += common

    def _move(self, velocity: Array, delta: Array) -> None:
        """Overwrite `delta` with the step for a learning rate of 1."""
        velocity *= self.momentum
        velocity += delta
        delta[...] = velocity

    def state(self) -> dict[str, Any]:
        return {"velocity": by_name(self._replica, self._velocity)}

    def restore(self, state: dict[str, Any]) -> None:
        take_by_name(self._replica, self._velocity, state["velocity"])
        self._replica.params.clear_frozen(self._velocity)  # layers that were trained when the state was saved


class DiLoCo(SlowMo):
    """DiLoCo (Douillard et al. 2023, 2311.08105): u = mu · u + delta; common += learning_rate · (delta + mu · u).

    This is Nesterov momentum with mu = `momentum`. The defaults are from the paper, which averages hundreds of times at
    long intervals. With only a few dozen averaging steps, use less momentum.
    """

    def __init__(self, learning_rate: float = 0.7, momentum: float = 0.9) -> None:
        super().__init__(learning_rate, momentum)

    def _move(self, velocity: Array, delta: Array) -> None:
        velocity *= self.momentum
        velocity += delta
        delta += self.momentum * velocity


NAMES: dict[str, type[OuterOptimizer]] = {"slowmo": SlowMo, "diloco": DiLoCo}


def outer_optimizer_of(value: str | OuterOptimizer | None) -> OuterOptimizer | None:
    example = "DiLoCo(0.7, 0.9), or slowmo or diloco"
    return None if value is None else object_named("outer_optimizer", value, NAMES, OuterOptimizer, example)
