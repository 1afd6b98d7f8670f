"""Reads a command line: rejects unknown options, and finds the run to resume."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cupynet.config import resume
from cupynet.config.composing import opened
from cupynet.config.overrides import is_override, last_value, quoted, without
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError
from cupynet.core.mpiexec import started
from cupynet.core.terminal import UNWRITABLE
from cupynet.core.version import __version__
from cupynet.core.wording import nearest

MULTIRUN = {"-m", "--multirun"}
# Hydra's options; long options may be abbreviated, and short options may be joined with their values
LONG = [
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
]
SHORT, VALUED = ("-h", "-r", "-m", "-sc"), ("-c", "-p", "-i")


@dataclass(frozen=True)
class Request:
    """A command line."""

    arguments: Sequence[str] = ()  # overrides and options for Hydra
    resumed: Path | None = None  # the run or checkpoint to resume, if any
    changes: Sequence[str] = ()  # overrides to apply to the stored settings of the resumed run

    @property
    def is_sweep(self) -> bool:
        return not MULTIRUN.isdisjoint(self.arguments)


def checked(arguments: Sequence[str]) -> list[str]:
    """Check the options, and return the arguments with the options last, as Hydra's parser expects.

    For --version, print cupynet's version instead of Hydra's, and raise SystemExit.
    """
    given = sorted(arguments, key=lambda each: not is_override(each))
    for option in (each.partition("=")[0] for each in given if each.startswith("-")):
        longer = [each for each in LONG if option.startswith("--") and each.startswith(option)]
        if longer == ["--version"]:
            print(f"cupynet {__version__}")
            raise SystemExit(0)
        if not longer and option not in SHORT and option[:2] not in VALUED:
            reason = f"unknown option{nearest(option, LONG)} (see --help). Settings have no dashes: epochs=3"
            raise ConfigError(reason, option)
    if started() is not None and MULTIRUN & set(given):
        raise ConfigError("sweeps do not support mpiexec. Start each job with its own mpiexec", "-m")
    return given


def read(given: Sequence[str], schema: type[Settings], rank: int) -> Request:
    """Read a checked command line. Raise SystemExit if there is nothing left to resume.

    The overrides for a resumed run become `changes`, which Hydra does not see.
    """
    arguments, changes, resumed = opened(given), [], None
    value = resume.asked(arguments)
    if MULTIRUN & set(arguments):
        arguments = resume.without_latest(arguments)
    if value is not None:
        resumed = _find(value, arguments, schema, rank)
        arguments = without(arguments, "resume")
    if resumed is not None:
        kept = without(arguments, "hydra.run.dir")
        settings = [each for each in kept if is_override(each) and not each.lstrip("+~").startswith("hydra")]
        folder = quoted(resume.run_of(resumed))
        arguments = [f"hydra.run.dir={folder}", *(each for each in kept if each not in settings)]
        changes = [*settings, f"resume={quoted(resumed)}"]
    if rank:  # only rank 0 has a folder and a log
        arguments = ["hydra.run.dir=.", "hydra/job_logging=none", *without(arguments, "hydra.run.dir")]
    return Request(arguments, resumed, changes)


def _find(value: str, given: Sequence[str], schema: type[Settings], rank: int) -> Path | None:
    """Return the run or checkpoint to resume, or None to start a new run."""
    if schema is not Settings:
        raise ConfigError("only cupynet train can resume runs. Remove this setting", "resume", value)
    if MULTIRUN & set(given):
        raise ConfigError("resumes a single run. Remove -m", "resume", value)
    resumed, own = resume.find(value, given), last_value(given, "hydra.run.dir")
    if resumed is not None:
        return resumed
    if own is not None and resume.finished(Path(own)):
        _say(f"resume=latest: the run in {own} ended without a checkpoint", rank)
        raise SystemExit(0)
    where = "outputs/" if own is None else own
    _say(f"resume=latest: there is no unfinished run with a checkpoint in {where}. Starting a new run", rank)
    return None


def _say(text: str, rank: int) -> None:
    """Print a line on rank 0. The run continues if stdout is closed or full."""
    if not rank:
        with contextlib.suppress(*UNWRITABLE):
            print(text, flush=True)
