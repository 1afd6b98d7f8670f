"""The outer step: what becomes of the mean of the replicas before they go on from it.

What an average finds is where training went, seen from the weights that the replicas had in common before: the delta
mean - common. A step along it that has a rate and a momentum of its own can make up for averages that are far apart.
"""

from __future__ import annotations

from typing import Any

from cupynet.backend.array import Array
from cupynet.core.checks import guess, instance, number, refusal, shown
from cupynet.parallel.synchronizers.replica_view import ReplicaView, by_name, take_by_name


class Outer:
    """A rule that makes new common weights of the old ones and of the mean; each worker computes the same.

    Its learning rate and momentum are of outer steps: one for each average, whatever lies between two of them. The
    optimizer's own learning rate is inside the deltas, and so inside their momentum.
    """

    def start(self, replica: ReplicaView) -> None:
        """Make what it needs for these weights, once."""

    def step(self, common: Array, mean: Array) -> None:
        """Overwrite `mean`, (P,), with the new common weights; `common`: those before the last period."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it: arrays on the host, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


class Mean(Outer):
    """The mean itself, as in Deeplearning4j."""

    def __str__(self) -> str:
        return "mean"

    def step(self, common: Array, mean: Array) -> None:
        pass


class SlowMo(Outer):
    """u = mu · u + (mean - common); common += rate · u: slow momentum (Wang et al. 2019, 1910.00643).

    There u is divided by the learning rate of the replicas; here it is inside, as in `Momentum`: the same for a
    constant one. Rate 1 and momentum 0 give the mean.

    Args:
        learning_rate: the factor on u.
        momentum: mu.

    Raises:
        ConfigError: an argument cannot work.
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
        """Overwrite `delta` with the step at rate 1."""
        velocity *= self.momentum
        velocity += delta
        delta[...] = velocity

    def state(self) -> dict[str, Any]:
        return {"velocity": by_name(self._replica, self._velocity)}

    def restore(self, state: dict[str, Any]) -> None:
        take_by_name(self._replica, self._velocity, state["velocity"])


class DiLoCo(SlowMo):
    """u = mu · u + delta; common += rate · (delta + mu · u): Nesterov's momentum (Douillard et al. 2023, 2311.08105).

    Args:
        learning_rate: the factor on the step.
        momentum: mu. The defaults are the paper's, for hundreds of averages far apart: a training with a few dozen
            needs less momentum.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(self, learning_rate: float = 0.7, momentum: float = 0.9) -> None:
        super().__init__(learning_rate, momentum)

    def _move(self, velocity: Array, delta: Array) -> None:
        velocity *= self.momentum
        velocity += delta
        delta += self.momentum * velocity


NAMES: dict[str, type[Outer]] = {"mean": Mean, "slowmo": SlowMo, "diloco": DiLoCo}


def outer_step(outer: str | Outer) -> Outer:
    """The rule of that name with its defaults; a rule as it is. Else a ConfigError."""
    if not isinstance(outer, str):
        return instance("outer", outer, Outer, "DiLoCo(0.7, 0.9), or mean, slowmo or diloco")
    if outer not in NAMES:
        raise refusal("outer", shown(outer), f"must be one of {', '.join(NAMES)}, or an Outer{guess(outer, NAMES)}")
    return NAMES[outer]()
