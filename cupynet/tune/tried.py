"""A trial of a search, as it is known, and what may become of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COMPLETE, PRUNED, DIVERGED, NO_MEMORY = "complete", "pruned", "diverged", "out of memory"
FAILED, INTERRUPTED, REPEATED = "failed", "interrupted", "repeated"


@dataclass(frozen=True)
class Tried:
    """One trial, as it is known.

    Attributes:
        number: from 0, its folder's name.
        values: setting -> value, as it is written on a command line.
        outcome: complete, pruned, diverged, out of memory, failed, interrupted, or repeated: the same settings as those
            of a trial before, whose figure it has; None while it is going on.
        reason: in a line, where it is not complete.
        figure: what is searched for, of the last evaluation; None where there was none.
        epochs: that were complete.
        wall_s: seconds that it took.
    """

    number: int
    values: dict[str, Any]
    outcome: str | None
    reason: str
    figure: float | None
    epochs: int
    wall_s: float
