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

    Given by the host: the factor of learning rates (RATE) and what else the optimizer's rule asks for in this iteration
    (FIRST, SECOND, THIRD, see `Move.numbers`). Changed by steps: the loss scale of the next gradient and of
    the last (SCALE, USED), whether the last step was made (GO), which one halted, from 1 (HALTED, 0: none did), steps
    since the host looked, and of those that were made the sum of losses and the samples (STEPS, LOSSES, SAMPLES), steps
    since the loss scale was changed (STEADY), and those that were left out (SKIPPED).
    """

    RATE = 0
    FIRST = 1
    SECOND = 2
    THIRD = 3
    SCALE = 4
    USED = 5
    GO = 6
    HALTED = 7
    STEPS = 8
    LOSSES = 9
    SAMPLES = 10
    STEADY = 11
    SKIPPED = 12


GIVEN = (Control.RATE, Control.FIRST, Control.SECOND, Control.THIRD)  # by the host, for the next step


@dataclass(frozen=True)
class Scaling:
    """How the loss scale is found: it doubles after so many steps without an overflow; 0: it stays as it is."""

    grow_after: int = 0
    least: float = 1.0
    most: float = 1.0


class Recorder(Protocol):
    """What lets steps run ahead of the host. It belongs to one backend and is used in its worker's thread."""

    def steered(self) -> AbstractContextManager[None]:
        """A context in which operations take the loss scale and the numbers of the iteration from the controls.

        The optimizer's updates do so, and do nothing but set gradients to zero where the step is left out.
        """

    def first(self) -> AbstractContextManager[None]:
        """A context for what is done for the first time: nobody records in any thread while it lasts."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` asks of the backend, as one thing to be asked for again; nothing of it is done now.

        It must have been done before, so that all memory and kernels are there. Any exception: it cannot be recorded.
        """

    def judge(self, loss: object, squared_norm: object, samples: int, scaling: Scaling) -> None:
        """Whether the step is made: see the kernel of that name in update.cu.

        Args:
            loss: the sum of its losses, 0-d on the device. squared_norm: of its gradient, likewise.
            samples: how many these are of.
        """

    def undo(self, vector: object, kept: object) -> None:
        """Overwrite a vector with what was kept of it, where the step is left out; in the accumulation precision."""

    def steer(self, numbers: tuple[float, float, float, float]) -> None:
        """The factor of the learning rates of the next step, and what else its rule asks for, see `GIVEN`."""

    def read(self) -> dict[Control, float]:
        """The controls, when all that was asked for is done."""

    def begin(self, scale: float, used: float, steady: int) -> None:
        """Let the device forget what steps have found out: it goes on with a loss scale, after so many steady steps.

        scale, used: see `Control`. The last step counts as made.
        """
