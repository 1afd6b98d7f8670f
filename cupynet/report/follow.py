"""Keeps the page of a run fresh while it trains: the process that `cupynet.training.ReportPage` starts.

It is told by a line on stdin that there is more to show (`more`), or that the run is over (`last`), and ends with that
line or with the end of stdin, which comes too when the training process is killed.

While the run goes on pages are made by a second process, a fork of this one, which works when nobody else wants to and
takes less than a hundredth of the time that passes: what it is told in between is shown later. The last page is
waited for, so this one makes it itself, with all that it needs imported long before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from cupynet.checks import one_line
from cupynet.errors import ConfigError, CupynetError
from cupynet.lock import at_work
from cupynet.report import charts
from cupynet.report.make import Maker

SHARE = 0.002  # of the time passed, for the page
DRAWING = 0.005  # and for its charts
FIRST_S = 5.0  # until the first charts: there is little to be seen in them before
LONGEST_S = 120  # for all that is left when the run is over
LETTING_GO_S = 3.0  # after the end of stdin, until the run's folder is free: its log is complete then


class Pace:
    """How often something may be done, so that it takes no more than a share of the time passed.

    Args:
        share: of the time since it may be done.
        first_s: seconds from now until then.
    """

    def __init__(self, share: float, first_s: float = 0.0) -> None:
        self._share, self._began, self._spent_s = share, time.monotonic() + first_s, 0.0

    def wait_s(self) -> float:
        """How long until it may be done again."""
        due = self._began + self._spent_s / self._share
        return max(due - time.monotonic(), 0.0)

    def spend(self, seconds: float) -> None:
        """It was done, and took so long."""
        self._spent_s += seconds


def follow(folder: Path, niceness: int) -> None:
    """Make pages of the run in `folder` as stdin says, until its end; then say on stdout how that went."""
    for name in ("SIGINT", "SIGHUP"):  # they are for the training process
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    charts.warm_up()
    tell, drawing = _fork(folder, niceness) if hasattr(os, "fork") else (None, None)
    told, over = b"", False
    while piece := os.read(0, 4096):
        told = (told + piece)[-16:]
        if over := b"last\n" in told:
            break
        if tell is not None:
            with contextlib.suppress(OSError):  # it has enough to do, or has died: there is the last page still
                os.write(tell, b"\n")
    if drawing is not None:
        with contextlib.suppress(OSError):
            os.kill(drawing, signal.SIGKILL)  # files appear whole or not at all
    _finish(Maker(folder), drawing, over=over)


def _gone(folder: Path, number: int) -> None:
    """Wait until a process that was killed is no more, and nothing it has begun is left."""
    os.waitpid(number, 0)
    for part in folder.glob(f".*.{number}.part"):
        part.unlink(missing_ok=True)


def _fork(folder: Path, niceness: int) -> tuple[int, int]:
    """Start the process that makes pages meanwhile: where it is told that there is more to show, and its number."""
    here, there = os.pipe()
    os.set_blocking(there, False)
    number = os.fork()
    if number:
        os.close(here)
        return there, number
    try:
        os.close(there)
        with contextlib.suppress(OSError):
            os.nice(niceness)
        for descriptor in (0, 1):  # the other's: who waits for its end must not wait for this one
            os.close(descriptor)
        _meanwhile(Maker(folder), here)
    finally:
        os._exit(0)


def _meanwhile(maker: Maker, told: int) -> None:
    """Make pages until nobody is there any more to tell.

    The first is of what the run sets out to do, when it begins; it does not put off that with the first figures.
    """
    page, drawing = Pace(SHARE), Pace(DRAWING, FIRST_S)
    more, first = False, True
    while True:
        ready, _, _ = select.select([told], [], [], min(page.wait_s(), drawing.wait_s()) if more else None)
        if ready:
            if not os.read(told, 4096):
                return
            more = True
        elif more:
            draws, began = drawing.wait_s() == 0, time.process_time()
            with contextlib.suppress(CupynetError):  # of a full disk, say: the last page tells
                maker.make(draw=draws, picture=False)
            if not first:
                (drawing if draws else page).spend(time.process_time() - began)
            more = first = False


def _finish(maker: Maker, drawing: int | None, *, over: bool) -> None:
    """The last page.

    Args:
        maker: of it.
        drawing: the other process, which has been killed; it may take its time to go, with so low a priority.
        over: the run has said that it is; else its process is gone, or on its way out after an error.
    """
    if hasattr(signal, "alarm"):
        signal.alarm(LONGEST_S)
    until = time.monotonic() + LETTING_GO_S
    while not over and at_work(maker.folder, patient=False) and time.monotonic() < until:
        time.sleep(0.05)
    try:
        maker.make(over=True, ready=None if drawing is None else lambda: _gone(maker.folder, drawing))
        answer = f"done: {maker.missing}" if maker.missing else "done"
    except ConfigError:  # the folder is gone, or nothing was written there
        answer = "done"
    except Exception as error:
        answer = one_line(error) or type(error).__name__
    with contextlib.suppress(OSError, ValueError):
        print(answer, flush=True)
