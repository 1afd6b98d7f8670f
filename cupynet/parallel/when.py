"""When replicas are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from cupynet.checks import integer
from cupynet.parallel.synchronizers import Moment


@dataclass(frozen=True)
class When:
    """The rule of when replicas are averaged.

    frequency: after iterations k, 2k, 3k ... of the whole training; `epoch`: after each epoch; `end`: after the last.
    """

    frequency: int | str

    def __post_init__(self) -> None:
        if self.frequency not in ("epoch", "end"):
            whole = integer("averaging_frequency", self.frequency, 1, ", epoch or end")
            object.__setattr__(self, "frequency", whole)

    def __str__(self) -> str:
        named = {"epoch": "after every epoch", "end": "at the end", 1: "in every iteration"}
        return named.get(self.frequency, f"every {self.frequency} iterations")

    def after(self, iteration: int) -> bool:
        """Whether iteration `iteration` (from 0) is followed by an average."""
        return isinstance(self.frequency, int) and (iteration + 1) % self.frequency == 0

    def at(self, moment: Moment) -> bool:
        """Whether a moment asks for an average: a fit always, an evaluation unless the frequency is `end`."""
        return {"fit": True, "evaluation": self.frequency != "end", "epoch": self.frequency == "epoch"}[moment]
