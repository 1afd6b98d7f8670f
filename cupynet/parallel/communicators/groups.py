"""Who of a run's workers does what together."""

from __future__ import annotations

from dataclasses import dataclass

from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.communicators.serial import SerialCommunicator


@dataclass(frozen=True)
class Groups:
    """The groups a worker belongs to; whatever it does with others goes through one of them.

    Attributes:
        world: all workers of the run: they fail together and stop together.
        replicas: those that hold the same weights: batches are dealt out among them, and they are averaged.
        stages: those that hold one replica between them, first stage first.
    """

    world: Communicator
    replicas: Communicator
    stages: Communicator

    @classmethod
    def of(cls, world: Communicator | None = None) -> Groups:
        """Every worker is a whole replica of its own; without a communicator there is one worker alone."""
        world = SerialCommunicator() if world is None else world
        return cls(world, replicas=world, stages=SerialCommunicator())

    @classmethod
    def grid(cls, world: Communicator, stages: int) -> Groups:
        """Replicas of `stages` workers each: worker r of the world is stage r % stages of replica r // stages.

        Every worker calls it. ConfigError: the workers cannot be shared out like that.
        """
        if stages == 1:
            return cls.of(world)
        if world.size % stages:
            raise ConfigError(f"stages={stages}: {world.size} workers cannot be shared out into replicas of as many")
        replica, stage = divmod(world.rank, stages)
        return cls(world, replicas=world.split(stage, replica), stages=world.split(replica, stage))
