"""Keeps the page of a run fresh while it trains: the process that `cupynet.training.ReportPage` starts.

It is told by a line on stdin that there is more to show (`more`), or that the run is over (`last`), and ends with the
line or with the end of stdin, which comes too when the training process is killed. It works when nobody else wants
to, and takes about a hundredth of the time that passes: what it is told in between is shown later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from cupynet.checks import one_line
from cupynet.errors import ConfigError, CupynetError
from cupynet.lock import at_work
from cupynet.report.make import Maker

SHARE = 0.005  # of the time passed, for the page, and as much for its charts
ALLOWANCE_S = 0.3  # in advance, so that the first is there soon
LONGEST_S = 60.0  # for all that is left when the run is over
LETTING_GO_S = 3.0  # after the end of stdin, until the run's folder is free: its log is complete then


class Pace:
    """How often something may be done, so that it takes no more than a share of the time passed.

    Args:
        share: of the time since this was made.
        allowance_s: seconds that may be spent before.
    """

    def __init__(self, share: float, allowance_s: float) -> None:
        self._share, self._allowance_s = share, allowance_s
        self._began, self._spent_s = time.monotonic(), 0.0

    def wait_s(self) -> float:
        """How long until it may be done again."""
        due = self._began + (self._spent_s - self._allowance_s) / self._share
        return max(due - time.monotonic(), 0.0)

    def spend(self, seconds: float) -> None:
        """It was done, and took so long."""
        self._spent_s += seconds


def follow(folder: Path) -> None:
    """Make pages of the run in `folder` as stdin says, until its end; then say on stdout how that went."""
    _step_back()
    maker, page, drawing = Maker(folder), Pace(SHARE, ALLOWANCE_S), Pace(SHARE, ALLOWANCE_S)
    told, more, over = b"", True, False
    while True:
        wait_s = page.wait_s() if more else None
        ready, _, _ = select.select([0], [], [], wait_s)
        if ready:
            piece = os.read(0, 4096)
            told = (told + piece)[-64:]
            more, over = True, b"last\n" in told
            if over or not piece:
                break
            continue
        draws = drawing.wait_s() == 0
        began = time.process_time()
        with contextlib.suppress(CupynetError):  # of a full disk, say: the last page tells
            maker.make(draw=draws, picture=False)
        spent = time.process_time() - began
        (drawing if draws else page).spend(spent)
        more = False
    _finish(maker, over=over)


def _finish(maker: Maker, *, over: bool) -> None:
    """The last page. over: the run has said that it is; else its process is gone, or on its way out after an error."""
    if hasattr(signal, "alarm"):
        signal.alarm(round(LONGEST_S))
    until = time.monotonic() + LETTING_GO_S
    while not over and at_work(maker.folder, patient=False) and time.monotonic() < until:
        time.sleep(0.05)
    try:
        maker.make(over=True)
        answer = f"done: {maker.missing}" if maker.missing else "done"
    except ConfigError:  # the folder is gone, or nothing was written there
        answer = "done"
    except Exception as error:
        answer = one_line(error) or type(error).__name__
    with contextlib.suppress(OSError, ValueError):
        print(answer, flush=True)


def _step_back() -> None:
    """Work when nobody else wants to, and leave signals to the training process."""
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
    with contextlib.suppress(OSError):  # Linux may weigh sessions against each other first: this one is its own
        Path("/proc/self/autogroup").write_text("19")
    sys.stdout.flush()
