"""The order of operations: streams as lines of operations with vector clocks (Lamport 1978, Mattern 1989).

The host runs everything at once, in the order of the calls. Clocks show which operations a device could have reordered:
each line counts its operations, and knows how many operations of every other line precede its own next one.
"""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from numpy.lib import mixins

OWN = (str(Path(__file__).parent), mixins.__file__)  # operators of arrays are in the latter


class Label(NamedTuple):
    """An operation, and the line of Python code that called it."""

    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


def label(name: str) -> Label:
    """Return a label for the operation `name`, called by the first frame outside the stand-in."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    thread = threading.current_thread().name
    return Label(name, f"{frame.f_code.co_filename}:{frame.f_lineno}, thread {thread}")


@functools.cache
def _is_own(path: str) -> bool:
    return path.startswith(OWN) and not Path(path).name.startswith("test_")


@dataclass(eq=False)
class Line:
    """A stream as the device sees it: operations one after the other."""

    key: int  # unique on the machine, even among null streams
    device: int
    number: int  # its address; 0 for a null stream
    clock: dict[int, int] = field(default_factory=dict)  # line key -> number of its operations before the next one here
    count: int = 0
    capture: list[Any] | None = None  # the operations since `begin_capture`; None while nothing is captured
    pending: list[Any] = field(default_factory=list)  # collective calls that some ranks have not made yet

    def __str__(self) -> str:
        return f"stream {self.number:#x} of device {self.device}"


class Access(NamedTuple):
    """One operation on a line, as recorded in memory blocks."""

    line: Line
    number: int
    label: Label


def merge(into: dict[int, int], clock: dict[int, int]) -> None:
    """Merge a clock into another: keep each line's larger count."""
    for key, count in clock.items():
        if into.get(key, 0) < count:
            into[key] = count
