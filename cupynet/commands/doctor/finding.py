"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass

ROOM = 1 << 30  # bytes, of disk or memory, that are enough for a run: checkpoints of LeNet have 5 MB


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        part: of the machine.
        state: `ok`, `note` or `problem`.
        text: the finding itself.
        way_out: what to do about it; "" if there is nothing to do.
        code: exit code of training; 0 unless it is a problem.
    """

    part: str
    state: str
    text: str
    way_out: str = ""
    code: int = 0

    def __str__(self) -> str:
        return f"{self.text}: {self.way_out}" if self.way_out else self.text
