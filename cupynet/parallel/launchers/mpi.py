"""MPI launcher: each process is one worker of an MPI job.

A rank that fails notifies the others, which raise `PeerFailed` at their next collective or `check`. At the end of the
program, all ranks wait for each other, so that one rank reports the failure and all exit with its exit code. If a rank
does not arrive, the others abort the job.
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
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import TypeVar

import numpy as np

from cupynet.backend import usable_cores
from cupynet.core.errors import ConfigError, exit_code
from cupynet.core.mpiexec import disagreement, started
from cupynet.parallel.communicators.base import Communicator, PeerFailed, SerialCommunicator, timed_out
from cupynet.parallel.communicators.mpi import GRACE_S, RUNNING, MpiCommunicator, Ranks, library
from cupynet.parallel.launchers.base import Launcher, note_worker

T = TypeVar("T")

START_S = 60.0  # timeout for MPI startup
ABORT_S = 5.0  # timeout for MPI_Abort
DRAIN_S = 0.5  # time for mpiexec to read the last output

log = logging.getLogger(__name__)


class MpiJob:
    """The MPI job of this process, created by `job`.

    Attributes:
        seats: local rank of each rank.
        sharing: number of ranks, including this one, that may run on a core of this rank.
    """

    def __init__(self) -> None:
        mpi = self._mpi = library()
        world = mpi.COMM_WORLD
        self.library: str = mpi.get_vendor()[0]
        self.rank, self.size, self.exit_code = world.Get_rank(), world.Get_size(), 0
        self.ranks, self._comm = Ranks(mpi, world.Dup()), world.Dup()
        machine = world.Split_type(mpi.COMM_TYPE_SHARED)
        cores = set(usable_cores())
        self.on_machine: int = machine.Get_size()
        self.seats: tuple[int, ...] = tuple(world.allgather(machine.Get_rank()))
        self.sharing = sum(not cores.isdisjoint(others) for others in machine.allgather(cores))
        self._met: bool | None = None  # True if all ranks have reached the end of the program; None if unknown
        if self.size > 1:
            atexit.register(self._leave)
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught

    def communicator(self) -> Communicator:
        """Return a communicator for all ranks, with a new traffic counter."""
        return SerialCommunicator() if self.size == 1 else MpiCommunicator(self._comm, self.ranks)

    def agree(self, settings: Mapping[str, object]) -> None:
        """Raise ConfigError on every rank if settings differ between ranks."""
        texts = self.communicator().gather_json(json.dumps(settings, default=repr))
        all_settings = [json.loads(text) for text in texts]
        for rank, settings_of_rank in enumerate(all_settings):
            for key in all_settings[0] | settings_of_rank:
                first, other = all_settings[0].get(key, "missing"), settings_of_rank.get(key, "missing")
                if first != other:
                    raise ConfigError(
                        f"is {json.dumps(first)} on rank 0 but {json.dumps(other)} on rank {rank}. All ranks must have "
                        "the same settings and version of cupynet",
                        setting=key,
                    )

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        first: str = self.communicator().gather_json(text)[0]
        return first

    def announce(self, error: BaseException) -> None:
        """Notify the other ranks that this rank failed with `error`, unless another rank caused the error."""
        if not isinstance(error, PeerFailed):
            self.ranks.announce(exit_code(error))

    def speaks(self, error: BaseException) -> bool:
        """Wait for all ranks and set `exit_code`. Return True if this is the lowest failed rank, which then reports."""
        self.announce(error)
        if self._met is None:
            self._met = self.ranks.end()
        first = self.ranks.first_failed()
        self.exit_code = exit_code(error) if first is None else int(self.ranks.codes[first])
        return first == self.rank and not isinstance(error, PeerFailed)

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Replace sys.excepthook, so that one rank prints the exception and all exit with that rank's exit code."""
        if self.speaks(error):
            self._excepthook(kind, error, traceback)
        raise SystemExit(self.exit_code)

    def _leave(self) -> None:
        """Finalize MPI at the end of the program, or abort the job if a rank does not arrive."""
        if self._mpi.Is_finalized():
            return
        if self._met is None:
            self._met = self.ranks.end()
        if self._met:
            with _limited(GRACE_S):
                self._mpi.Finalize()
            return
        ranks = self.ranks
        reporter, code = ranks.first_failed(), 1
        if reporter is not None:
            code = int(ranks.codes[reporter]) or 1
        else:
            reporter = int(np.flatnonzero(ranks.codes != RUNNING)[0])
            if reporter == self.rank:
                log.error("%s", timed_out(self.rank, ranks.timeout_s, "the other ranks at the end of the program"))
        if reporter != self.rank:
            time.sleep(GRACE_S)  # the rank that reports the failure aborts the job
        _drain()
        with _limited(ABORT_S):
            self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)  # Abort returns if mpiexec cannot be reached


@contextmanager
def _limited(seconds: float, file: int | None = None) -> Iterator[None]:
    """Kill this process if an MPI call, which may hold the GIL, takes too long. Write tracebacks to `file`, if any."""
    with open(os.devnull, "w") as devnull:
        faulthandler.dump_traceback_later(seconds, exit=True, file=devnull if file is None else file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def job() -> MpiJob:
    """Return the job of this process, starting MPI if necessary.

    Raise ConfigError if MPI is unavailable, or if its rank or size contradicts the launcher.
    """
    mpi_job = _start()
    reason = disagreement(mpi_job.rank, mpi_job.size, mpi_job.library)
    if reason:
        error = ConfigError(reason)
        mpi_job.announce(error)
        raise error
    return mpi_job


@cache
def _start() -> MpiJob:
    """Start MPI. If that fails, kill this process when its program ends.

    mpiexec does not notice that a rank exits before it has started MPI, and the other ranks would wait for it.
    """
    process = started()
    timeout_s = START_S + 2 * bool(process and process.rank)  # rank 0 times out first, and alone reports the error
    try:
        with _limited(timeout_s, file=2):
            return MpiJob()
    except BaseException:
        if process is not None:
            atexit.register(_die)
        raise


def _die() -> None:
    """Kill this process with a signal, so that mpiexec ends the others."""
    _drain()
    os.kill(os.getpid(), signal.SIGKILL)


def _drain() -> None:
    """Wait until mpiexec has read the last output, which it may drop on an abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(DRAIN_S)


class MpiLauncher(Launcher):
    """Runs one worker per MPI rank; this process is one of them. After a failure, the whole job ends with this program.

    Args:
        timeout_s: see `Launcher`. Ranks also wait this long for each other at the end of the program, so it must exceed
            the time that one rank works alone after the last fit.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        super().__init__(timeout_s)
        self._job = job()
        self.workers, self.first, self.sharing = self._job.size, self._job.rank, self._job.sharing
        self._job.ranks.timeout_s = self.timeout_s
        self._communicator = self._job.communicator()

    def agree(self, settings: Mapping[str, object]) -> None:
        self._job.agree(settings)

    def _run(self, task: Callable[[Communicator], T]) -> T | None:
        try:
            result = task(self._communicator)
        except BaseException as error:
            note_worker(error, self._job.rank)
            self._job.announce(error)
            with suppress(Exception):  # only the original failure is reported
                self._communicator.abandon()
            raise
        return result if self._job.rank == 0 else None

    def _release(self) -> None:
        self._communicator.close()
