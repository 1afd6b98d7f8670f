"""The processes that run a command: a single one, or the ranks started by mpiexec."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError, exit_code
from cupynet.core.exits import report_error
from cupynet.core.mpiexec import rank, started
from cupynet.core.settings import flat
from cupynet.core.version import __version__

if TYPE_CHECKING:
    from cupynet.parallel import MpiJob

PER_MACHINE = ("data.folder", "devices")  # settings that may differ between ranks


class Ranks:
    """The processes that run a command. A single process has rank 0.

    mpi: returns the job of this process, starting MPI if necessary; None if the command cannot use MPI.
    """

    def __init__(self, mpi: Callable[[], MpiJob] | None) -> None:
        self._mpi = mpi
        self._job: MpiJob | None = None  # until MPI is started, the environment determines the rank

    @property
    def rank(self) -> int:
        return rank() if self._job is None else self._job.rank

    @property
    def alone(self) -> bool:
        return started() is None if self._job is None else self._job.size == 1

    def join(self) -> None:
        """Start MPI, if the command can use it."""
        if self._mpi is not None:
            self._job = self._mpi()

    def agree(self, settings: Settings, *, resumed: bool) -> None:
        """Check that all processes work together with equal settings. Otherwise, raise ConfigError on all ranks."""
        expected, as_ranks = not self.alone, settings.parallel.launcher == "mpi"
        if as_ranks:
            self.join()
        if self.alone:
            return
        if self._job is None or not as_ranks:
            fixed = self._mpi is None or resumed  # a resumed run keeps its launcher
            remedy = "start this command without mpiexec" if fixed else "add parallel.launcher=mpi"
            raise ConfigError(
                f"several processes were started, but they would run independently. To fix this, {remedy}"
            )
        job = self._job
        if not expected:  # each rank has already created its own folder and log
            remedy = f"use the mpiexec of {job.library}, or set PMI_RANK and PMI_SIZE for each rank"
            reason = f"{job.size} ranks were started, but no environment variable indicates this. To fix it, {remedy}"
            raise ConfigError(reason, "parallel.launcher", "mpi")
        job.ranks.timeout_s = settings.parallel.timeout_s
        own = {key: value for key, value in flat(asdict(settings)).items() if key not in PER_MACHINE}
        job.agree({"the version of cupynet": __version__, **own})

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        return text if self.alone or self._job is None else self._job.share(text)

    def report(self, error: BaseException, log: logging.Logger | None = None, label: str = "") -> int | str:
        """Report an error, on one rank only, and return the exit code. See `report_error`."""
        if self.alone or (isinstance(error, SystemExit) and log is None):
            return report_error(error, log, label)
        log = None if self.rank else log
        if self._mpi is None:
            return exit_code(error) if self.rank else report_error(error, log, label)
        try:
            job = self._mpi()
            speaks = job.speaks(error)
        except ConfigError:  # MPI does not work on this rank
            return report_error(error, log, f"rank {self.rank}: ")
        if speaks:
            report_error(error, log, f"rank {self.rank}: " if self.rank else label)
        return job.exit_code
