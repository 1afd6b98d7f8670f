"""Scalars kept in device memory, so that steps can be launched without host synchronization."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Control(IntEnum):
    """Indices of the controls. `Recorder.steer` supplies the first four; steps update the others on the device."""

    RATE = 0  # learning-rate factor
    FIRST = 1  # further scalars of the update rule (see `UpdateScalars.numbers`)
    SECOND = 2
    THIRD = 3
    SCALE = 4  # loss scale of the next gradient
    USED = 5  # loss scale of the last gradient
    GO = 6  # 1 if the last step was applied
    HALTED = 7  # number of the step that halted, counted from 1, or 0 if none did
    STEPS = 8  # steps since `Recorder.begin`
    LOSSES = 9  # sum of the losses in applied steps
    SAMPLES = 10  # number of samples in applied steps
    HITS = 11  # number of correct predictions in applied steps
    STEADY = 12  # steps since the loss scale changed
    SKIPPED = 13  # skipped steps


@dataclass(frozen=True)
class Scaling:
    """Dynamic loss scale between `least` and `most`.

    The scale is halved on overflow, and doubled after `grow_after` steps without overflow. It is fixed if `grow_after`
    is 0.
    """

    grow_after: int = 0
    least: float = 1.0
    most: float = 1.0
