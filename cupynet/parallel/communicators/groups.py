"""The groups in which the workers of a run cooperate."""

from __future__ import annotations

from dataclasses import dataclass

from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.communicators.serial import SerialCommunicator


@dataclass(frozen=True)
class Groups:
    """The groups of a worker.

    Attributes:
        world: all workers of the run: they fail and stop together.
        replicas: workers with the same weights: batches are divided among them, and they are averaged.
        stages: workers that together hold one replica, in the order of its stages.
    """

    world: Communicator
    replicas: Communicator
    stages: Communicator

    @classmethod
    def of(cls, world: Communicator | None = None) -> Groups:
        """Return groups in which every worker is a whole replica; a single worker without a communicator."""
        world = SerialCommunicator() if world is None else world
        return cls(world, replicas=world, stages=SerialCommunicator())

    @classmethod
    def grid(cls, world: Communicator, stages: int) -> Groups:
        """Return groups of `stages` workers per replica: worker r is stage r % stages of replica r // stages.

        Every worker calls it. ConfigError if the number of workers is no multiple of `stages`.
        """
        if stages == 1:
            return cls.of(world)
        if world.size % stages:
            raise ConfigError(f"stages={stages}: {world.size} workers cannot be divided into replicas of that size")
        replica, stage = divmod(world.rank, stages)
        return cls(world, replicas=world.split(stage, replica), stages=world.split(replica, stage))
