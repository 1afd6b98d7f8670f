"""Steps of training that run ahead of the host: recorded once, asked for many times, looked at now and then.

What such a step must know, and what it finds out, stands in a vector of numbers in the device's memory, its controls:
nobody on the host waits for a step in order to ask for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Control(IntEnum):
    """Places in the controls, which are numbers in double.

    Given by the host: the factor of learning rates (RATE). Changed by steps: the loss scale of the next gradient and of
    the last (SCALE, USED), whether the last step was made (GO), which one halted, from 1 (HALTED, 0: none did), steps
    since the host looked, and of those that were made the sum of losses and the samples (STEPS, LOSSES, SAMPLES), steps
    since the loss scale was changed (STEADY), and those that were left out (SKIPPED).
    """

    RATE = 0
    SCALE = 1
    USED = 2
    GO = 3
    HALTED = 4
    STEPS = 5
    LOSSES = 6
    SAMPLES = 7
    STEADY = 8
    SKIPPED = 9


@dataclass(frozen=True)
class Scaling:
    """How the loss scale is found: it doubles after so many steps without an overflow; 0: it stays as it is."""

    grow_after: int = 0
    least: float = 1.0
    most: float = 1.0


class Recorder(Protocol):
    """What lets steps run ahead of the host. It belongs to one backend and is used in its worker's thread."""

    def steered(self) -> AbstractContextManager[None]:
        """A context in which operations take the loss scale and a factor of the learning rate from the controls.

        The optimizer's updates do so, and do nothing but set gradients to zero where the step is left out.
        """

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` asks of the backend, as one thing to be asked for again; nothing of it is done now.

        It must have been done before, so that all memory and kernels are there. Any exception: it cannot be recorded.
        """

    def judge(self, loss: object, squared_norm: object, samples: int, scaling: Scaling) -> None:
        """Whether the step is made: see the kernel of that name in updates.cu.

        Args:
            loss: the sum of its losses, 0-d on the device. squared_norm: of its gradient, likewise.
            samples: how many these are of.
        """

    def undo(self, vector: object, kept: object) -> None:
        """Overwrite a vector with what was kept of it, where the step is left out; in the accumulation precision."""

    def steer(self, rate: float) -> None:
        """The factor of the learning rates of the next step."""

    def read(self) -> dict[Control, float]:
        """The controls, when all that was asked for is done."""

    def write(self, values: dict[Control, float]) -> None:
        """Overwrite the controls: those that are not named become 0, but for the factor of learning rates."""
