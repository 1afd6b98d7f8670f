"""Scalars kept in device memory, so that steps can be launched without host synchronization."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Control(IntEnum):
    """Indices into the controls, which are float64.

    Set by the host: the learning-rate factor (RATE) and the other numbers of the optimizer's rule in this iteration
    (FIRST, SECOND, THIRD, see `UpdateScalars.numbers`). Changed by steps: the loss scale of the next gradient and of
    the last (SCALE, USED), whether the last step was applied (GO), the step that halted, counted from 1 (HALTED, 0 for
    none), the steps since the host read the controls (STEPS), the sum of losses, the samples and the hits of applied
    steps (LOSSES, SAMPLES, HITS), the steps since the loss scale changed (STEADY), and the skipped steps (SKIPPED).
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
    HITS = 11
    STEADY = 12
    SKIPPED = 13


GIVEN = (Control.RATE, Control.FIRST, Control.SECOND, Control.THIRD)  # set by the host for the next step


@dataclass(frozen=True)
class Scaling:
    """Dynamic loss scaling: the scale doubles after `grow_after` steps without overflow; 0 keeps it fixed."""

    grow_after: int = 0
    least: float = 1.0
    most: float = 1.0
