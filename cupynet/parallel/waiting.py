"""How long a worker waits for others, and what it says when it gives up."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from cupynet.checks import setting
from cupynet.errors import annotate
from cupynet.parallel.communicator import WorkerTimeout

LOOK_S = 0.1  # of the time between two looks no more than this counts
DEEPEST = 20  # calls of a stack that are shown, the innermost
CONNECTIONS = {f"cupynet.parallel.{name}" for name in ("communicator", "threads", "mpi", "team")}  # between workers

_looking = threading.Lock()  # of who looks at other threads


class Patience:
    """Time that runs out for one who looks, again and again, whether something has happened.

    Only time in which one could have seen it counts: of the time between two looks at most `LOOK_S`. Whoever was
    stopped for an hour (Ctrl-Z, a machine that was suspended) has not waited for an hour, and those it waits for may
    have stood still as well.

    Args:
        seconds: how much of it there is; may be infinite.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._looked = time.monotonic()

    @property
    def pause_s(self) -> float:
        """How long to wait, at most, until the next look."""
        return max(min(self._left_s, LOOK_S), 0.0)

    def over(self) -> bool:
        """Whether it has run out. To be asked at every look."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked, LOOK_S)
        self._looked = now
        return self._left_s <= 0


def given_up(
    late: Sequence[int], name: int, timeout_s: float, threads: Mapping[int, int] | None = None
) -> WorkerTimeout:
    """The error of worker `name`, which has waited for the workers `late`. Notes say where it waited, and a note of
    several lines where each of the others is: the calls it is in.

    threads: which threads of this process the workers are, as far as they are any; others cannot be looked at.
    """
    numbers = ", ".join(map(str, late))
    error = WorkerTimeout(
        f"worker {numbers} has not arrived where worker {name} waited for it for {timeout_s:g} s "
        f"and is taken for dead: raise {setting('parallel', 'timeout_s')} if it is only slow"
    )
    annotate(error, f"worker {name} waited in {_place(sys._getframe(1))}")
    known = threads or {}
    for rank, calls in _calls({rank: known[rank] for rank in late if rank in known}).items():
        annotate(error, f"worker {rank} is here (its latest call is the last):\n{calls}")
    return error


def _calls(threads: Mapping[int, int]) -> dict[int, str]:
    """The calls that each of these threads is in, as far as they still live."""
    with _nothing_collected():
        frames = sys._current_frames()
        stacks = {
            rank: traceback.format_stack(frames[each], DEEPEST) for rank, each in threads.items() if each in frames
        }
        del frames  # this call's own is among them: a circle
    return {rank: "".join(stack).rstrip() for rank, stack in stacks.items()}


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """One thread at a time looks at others, while no garbage is collected.

    Before Python 3.12 a collection may begin in the middle of `sys._current_frames`, which holds the lock of all
    threads: where it lets another one run that begins, ends or looks too, both wait for ever (python/cpython#106883).
    """
    with _looking:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def _place(frame: FrameType) -> str:
    """The call of a communicator that a frame is part of, and who made it."""
    call, caller = frame, frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "") in CONNECTIONS:
        call, caller = caller, caller.f_back
    if caller is None:
        return call.f_code.co_name
    where = f"{os.path.basename(caller.f_code.co_filename)}, line {caller.f_lineno}, in {caller.f_code.co_name}"
    return f"{call.f_code.co_name} ({where})"
