"""What is ordered before what: streams as lines of events, with vector clocks (Lamport 1978, Mattern 1989).

The host runs everything at once, in the order of the calls. What a device would have been free to do
otherwise is known from clocks: each line counts its operations, and knows of every other line up to which count its own
next operation comes after them.
"""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = str(Path(__file__).parent)
OWN_TESTS = "test_"  # files of this folder with such names are users of it


class Label(NamedTuple):
    """An operation, and the line of Python that called it."""

    name: str
    path: str
    line: int
    thread: str

    @property
    def place(self) -> str:
        """The file and line of the call."""
        return f"{self.path}:{self.line}, thread {self.thread}"

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


def label(name: str) -> Label:
    """The operation `name`, called by the first frame outside of the stand-in."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _own(frame.f_code.co_filename):
        frame = frame.f_back
    return Label(name, frame.f_code.co_filename, frame.f_lineno, threading.current_thread().name)


@functools.cache
def _own(path: str) -> bool:
    return path.startswith(HERE) and not path.rpartition("/")[2].startswith(OWN_TESTS)


@dataclass(eq=False)
class Line:
    """A stream as the device has it: operations one after the other.

    Attributes:
        number: its address for those who take addresses; 0 for a null stream.
        key: unlike that of any other line of the machine, null streams included.
        blocking: whether it and the null stream of its device wait for each other.
        clock: line key -> up to which count the next operation comes after that line's.
        pending: collective calls on it that not all ranks have made yet.
        stuck: why its operations do not end until the call that they wait for is aborted; "" if they do.
        behind: stuck lines that it waits for.
        capture: what was recorded since `begin_capture`; None where nothing is captured.
    """

    key: int
    device: int
    number: int
    blocking: bool
    clock: dict[int, int] = field(default_factory=dict)
    count: int = 0
    capture: list[Any] | None = None
    pending: list[Any] = field(default_factory=list)
    stuck: str = ""
    behind: list[Line] = field(default_factory=list)

    @property
    def holding(self) -> list[Line]:
        """The stuck lines that this one waits for, or itself if it is stuck."""
        return [line for line in (self, *self.behind) if line.stuck]

    @property
    def null(self) -> bool:
        """Whether it is the null stream of its device."""
        return self.number == 0

    def join(self, clock: dict[int, int]) -> None:
        """What comes next comes after all that `clock` knows."""
        merge(self.clock, clock)

    def __str__(self) -> str:
        return f"the null stream of device {self.device}" if self.null else f"stream {self.number:#x}"


class Access(NamedTuple):
    """One operation on a line, as memory remembers it."""

    line: Line
    count: int
    label: Label


def merge(into: dict[int, int], clock: dict[int, int]) -> None:
    """The larger count of both, for each line."""
    for key, count in clock.items():
        if into.get(key, 0) < count:
            into[key] = count
