"""Keeps `report.html` of a run fresh, without taking time from it: another process draws, this one says when.

What it shows, it reads from the run's folder: cupynet/report/.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys

from cupynet.checks import flag, integer, number, one_line
from cupynet.runs import Run
from cupynet.training.callbacks import Callback
from cupynet.training.records import EpochRecord, Report, TrainerView

log = logging.getLogger(__name__)

_left_alone: list[subprocess.Popen[bytes]] = []  # processes that end by themselves, soon; somebody must look when
DONE = "done"  # how the process begins when the last page is there; anything else is what went wrong


class ReportPage(Callback):
    """A page with the curves of the run while it goes on, and with its results when it is over.

    Pages are made by another process (cupynet/report/follow.py), which ends when this one does, however that ends. A
    run does not end with it: what goes wrong there is told once.

    Args:
        wait_s: for the last page when the run is over.
        niceness: of what draws while the run goes on, see nice(1): 19 only works where nobody else wants to.
        enabled: whether anything is done at all.
    """

    last = True  # History has written by then what is to be shown

    def __init__(self, wait_s: float = 10.0, niceness: int = 19, *, enabled: bool = True) -> None:
        self.enabled, self.niceness = flag("enabled", enabled), integer("niceness", niceness, 0, most=19)
        self.wait_s = number("wait_s", wait_s, minimum=0)
        self._run: Run | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        if run is not None:
            self.begin(run)

    def begin(self, run: Run) -> None:
        """Start the other process, if it was not: while data are loaded there is a core to spare for its imports."""
        if not self.enabled or self._run is not None:
            return
        self._run = run
        _left_alone[:] = [child for child in _left_alone if child.poll() is None]
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "cupynet.report", f"--follow={self.niceness}", str(run.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # held open it would keep a pipe's reader waiting: `| tee`, mpiexec
                start_new_session=True,  # Ctrl-C is for this process; the other ends when its stdin does
                env={**os.environ, **one_thread},
            )
            assert self._child.stdin is not None
            os.set_blocking(self._child.stdin.fileno(), False)
        except (OSError, ValueError) as error:
            self._give_up(str(error))

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._say(b"more\n")

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        self._say(b"more\n")

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self._say(b"more\n")

    def close(self) -> None:
        """Ask for the last page and wait for it; where an error ends the run, leave it to be made."""
        try:
            self._finish()
        finally:
            self._run = None

    def _finish(self) -> None:
        failing = sys.exc_info()[1] is not None
        if not failing:
            self._say(b"last\n")
        child, self._child = self._child, None
        if child is None:
            return
        answer = None if failing else _answer(child, self.wait_s)
        if answer is None:
            _leave_alone(child)
            if not failing:  # else it finds the error in the log, a moment from now
                log.warning("the report page is not ready after %g s: it comes later", self.wait_s)
            return
        done, _, lacks = answer.partition(": ")
        if done != DONE:
            self._give_up(answer or f"exit code {child.returncode}")
        elif lacks:
            log.info("%s", lacks)

    def _say(self, line: bytes) -> None:
        """Tell the other process; never waits for it."""
        child = self._child
        if child is None or child.stdin is None:
            return
        try:
            os.write(child.stdin.fileno(), line)
        except BlockingIOError:
            pass  # it has enough to do
        except OSError:  # it is gone
            self._child = None
            answer = _answer(child, 1.0)
            if answer is None:
                _leave_alone(child)
            self._give_up(answer or f"exit code {child.returncode}")

    def _give_up(self, why: str) -> None:
        log.warning("the report page is given up: %s; python -m cupynet.report %s makes it", one_line(why), self._run)


def _answer(child: subprocess.Popen[bytes], wait_s: float) -> str | None:
    """All that it says until its end, which is a line, once it is told no more; None where that takes longer."""
    try:
        return child.communicate(timeout=wait_s)[0].decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        return None


def _leave_alone(child: subprocess.Popen[bytes]) -> None:
    """Let go of its pipes: it ends by itself."""
    for pipe in filter(None, (child.stdin, child.stdout)):
        with contextlib.suppress(OSError):
            pipe.close()
    _left_alone.append(child)
