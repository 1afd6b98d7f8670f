"""The job that mpiexec started, and the launcher that makes this process one of its workers.

A rank that fails notifies the others. They receive the notice while they wait, raise `PeerFailed` and end too. At the
end of the program every rank waits for all others, so that one rank reports the failure and all exit with its code. If
a rank does not arrive, the others abort the job.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import TypeVar

import numpy as np

from cupynet.backend import usable_cores
from cupynet.core.checks import number
from cupynet.core.errors import ConfigError, CupynetError, annotate, exit_code
from cupynet.core.mpiexec import started
from cupynet.parallel.communicators.base import Communicator, PeerFailed
from cupynet.parallel.communicators.mpi import GRACE_S, MpiCommunicator, Ranks, library
from cupynet.parallel.communicators.serial import SerialCommunicator
from cupynet.parallel.communicators.timeout import timed_out

T = TypeVar("T")

START_S = 60.0  # for all ranks to start MPI
ABORT_S = 5.0  # for MPI to abort the job
DRAIN_S = 0.5  # for mpiexec to read the last output

log = logging.getLogger(__name__)


class MpiJob:
    """All ranks of this job, seen from this one. Get it by `job()`.

    Attributes:
        rank, size: this process's number, and the number of processes.
        exit_code: of all ranks, after `speaks`.
        seats: the number of each rank on its machine.
        machines: the name of each rank's machine.
        sharing: the number of ranks that share this rank's cores, including itself.
    """

    def __init__(self) -> None:
        mpi = self._mpi = library()
        world = mpi.COMM_WORLD
        self.rank, self.size, self.exit_code = world.Get_rank(), world.Get_size(), 0
        self._ranks, self._comm = Ranks(mpi, world.Dup()), world.Dup()
        here = world.Split_type(mpi.COMM_TYPE_SHARED)
        first = mpi.Group.Translate_ranks(here.Get_group(), [0], world.Get_group())[0]
        facts = [first, mpi.Get_processor_name(), here.Get_rank(), sorted(usable_cores())]
        found = [json.loads(text) for text in self._gather(json.dumps(facts))]
        self._first_there = [each[0] for each in found]  # the lowest rank on each rank's machine
        self.machines: list[str] = [each[1] for each in found]
        self.seats: tuple[int, ...] = tuple(each[2] for each in found)
        cores = set(facts[3])
        self.sharing = sum(each[0] == first and not cores.isdisjoint(each[3]) for each in found)
        self._met: bool | None = None  # True if all ranks have reached the end of the program; None if unknown
        if self.size == 1:
            self._ranks.close()
        else:
            atexit.register(self._leave)
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught

    def communicator(self) -> Communicator:
        """Return a communicator of all ranks, which counts what it sends from 0."""
        return SerialCommunicator() if self.size == 1 else MpiCommunicator(self._comm, self._ranks)

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others."""
        return self._ranks.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._ranks.timeout_s = seconds

    def agree(self, settings: Mapping[str, object]) -> None:
        """Raise ConfigError, on every rank, if the ranks were given different settings."""
        given = [json.loads(text) for text in self._gather(json.dumps(settings, default=repr))]
        for key in dict.fromkeys(key for each in given for key in each):
            ranks: dict[str, list[str]] = {}
            for rank, each in enumerate(given):
                ranks.setdefault(json.dumps(each[key]) if key in each else "missing", []).append(str(rank))
            if len(ranks) > 1:
                found = ", ".join(f"{value} on rank {', '.join(there)}" for value, there in ranks.items())
                raise ConfigError(f"{key}: is {found}: all ranks must have the same settings and version of cupynet")

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        return self._gather(text)[0]

    def first_word(self, text: str) -> str:
        """Return the first text that is not empty, by rank, on every rank; "" if all are."""
        return next(filter(None, self._gather(text)), "")

    def where(self) -> str:
        """Describe which rank is on which machine: `n01 (0, 1), n02 (2, 3)`."""
        there: dict[int, list[str]] = {}
        for rank, first in enumerate(self._first_there):
            there.setdefault(first, []).append(str(rank))
        return ", ".join(f"{self.machines[first]} ({', '.join(ranks)})" for first, ranks in there.items())

    def _gather(self, text: str) -> list[str]:
        """Return every rank's text."""
        texts = self.communicator().all_gather(np.frombuffer(text.encode(), np.uint8))
        return [each.tobytes().decode() for each in texts]

    def announce(self, error: BaseException) -> None:
        """Notify the other ranks that this one failed with `error`, unless it stops because of another rank."""
        if not isinstance(error, PeerFailed) and self.rank not in self._ranks.failed:
            self._ranks.announce(exit_code(error))

    def speaks(self, error: BaseException, code: int | None = None) -> bool:
        """Return True if this rank, which ends with `error`, is the one to report it: the lowest that failed.

        Waits for the other ranks, and sets `exit_code`.

        Args:
            code: the exit code, if it is not that of `error`.
        """
        self.announce(error)
        if code is not None and self.rank in self._ranks.failed:
            self._ranks.failed[self.rank] = code
        if self._met is None:
            self._met = self._ranks.end()
        first = self._ranks.first_failed()
        self.exit_code = exit_code(error) if first is None else self._ranks.failed[first]
        return first == self.rank and not isinstance(error, PeerFailed)

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Take the place of sys.excepthook: one rank shows the exception, and all leave with its exit code."""
        if self.speaks(error):
            self._excepthook(kind, error, traceback)
        raise SystemExit(self.exit_code)

    def _leave(self) -> None:
        """End MPI at the end of the program, or abort the job if a rank does not arrive."""
        if self._mpi.Is_finalized():
            return
        if self._met is None:
            self._met = self._ranks.end()
        if self._met:
            self._ranks.close()
            with _limited(GRACE_S):
                self._mpi.Finalize()
            return
        if self._ranks.first_failed() is None:
            error = timed_out(self.rank, self.timeout_s, "the other ranks at the end of the program")
            if self.speaks(error):
                log.error("%s", error)
        if self._ranks.first_failed() != self.rank:
            time.sleep(GRACE_S)  # the rank that reports the failure aborts the job
        _drain()
        code = self._ranks.failed[min(self._ranks.failed)] or 1
        with _limited(ABORT_S):
            self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)  # it returns if mpiexec cannot be reached


@contextmanager
def _limited(seconds: float, file: int | None = None) -> Iterator[None]:
    """End this process if a call to MPI that blocks does not return in time.

    Such a call holds the interpreter's lock, so only the thread of faulthandler can do it.

    file: where to print the traceback; nowhere by default.
    """
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere if file is None else file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@cache
def job() -> MpiJob:
    """Return this process's job, and start MPI if that has not been done.

    Raises:
        ConfigError: MPI cannot be used. This process then kills itself at the end of its program, because mpiexec does
            not notice if a rank leaves before it has started MPI, and the others would wait for it.
    """
    process = started()
    try:
        with _limited(START_S + 2 * bool(process and process[0]), file=2):  # rank 0 first, and then mpiexec ends all
            return MpiJob()
    except BaseException:
        if process is not None:
            atexit.register(_die)
        raise


def _die() -> None:
    """End this process by a signal, so that mpiexec ends the others."""
    _drain()
    os.kill(os.getpid(), signal.SIGKILL)


def _drain() -> None:
    """Give mpiexec time to read the last output: at an abort it may drop the rest."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(DRAIN_S)


class MpiLauncher:
    """Makes this process one of the workers, as many as there are ranks.

    After a failure nothing more can be run, and the whole job ends when this program does.

    Args:
        timeout_s: how long a worker waits for the others, in seconds. It also applies at the end of the program, so it
            must be longer than the work of a single rank after the last fit.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._job, self._usable, self._running = job(), True, False
        self.workers, self.first, self.sharing = self._job.size, self._job.rank, self._job.sharing
        self._job.timeout_s = number("timeout_s", timeout_s, above=0, unit="seconds")
        self._communicator = self._job.communicator()

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """See `Launcher.run`. Raises RuntimeError after a failure or `close`, and while another task is running."""
        if not self._usable:
            raise RuntimeError("these workers have failed, been interrupted or closed: create a new ParallelWrapper")
        if self._running:
            raise RuntimeError("these workers are busy: a task cannot begin in the middle of another")
        self._running = True
        try:
            result = task(self._communicator)
        except BaseException as error:
            self._usable = False
            if not isinstance(error, CupynetError) and not getattr(error, "__notes__", None):
                annotate(error, f"worker {self._job.rank}")
            self._job.announce(error)
            raise
        finally:
            self._running = False
        return result if self._job.rank == 0 else None

    def close(self) -> None:
        """Release NCCL together with the other workers, unless there was a failure."""
        if self._usable:
            self._communicator.close()
        self._usable = False
