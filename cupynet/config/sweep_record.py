"""Records the jobs of a sweep in sweep.csv, and prints a table of them.

Each job is recorded in a file in the sweep's folder, because it may run in another process. The files are removed when
the sweep ends, unless a job was killed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from cupynet.config.resume import check_untaken
from cupynet.core.errors import CupynetError, OutputError
from cupynet.core.files import read_object, write_json, write_whole
from cupynet.core.lock import Hold
from cupynet.core.logs import Console
from cupynet.core.table import ABSENT, Column, Screen, as_csv, column, setting_columns, show
from cupynet.core.terminal import near, say_error
from cupynet.core.wording import one_line, percent
from cupynet.runs.layout import SWEEP_TABLE as NAME
from cupynet.runs.run import Run, Summary

RECORDS = ".jobs"
FIGURES = (  # name, title, format
    ("test_accuracy", "test\naccuracy", percent),
    ("validation_accuracy", "validation\naccuracy", percent),
    ("test_loss", "test\nloss", "{:.4g}".format),
    ("images_per_s", "images/s", "{:,.0f}".format),
    ("train_s", "train\ntime", "{:.1f} s".format),
)


@dataclass(frozen=True)
class Job:
    """A job of a sweep."""

    number: int  # from 0
    overrides: Sequence[str]  # as typed
    folder: Path
    code: int | None  # exit code; None before the job ends
    error: str = ""  # a one-line message

    @cached_property
    def settings(self) -> dict[str, str]:
        parts = (each.partition("=") for each in self.overrides)
        return {name.lstrip("+"): value for name, _, value in parts}

    @cached_property
    def summary(self) -> Summary | None:
        """The results; None if the job failed or is running, even if its folder has results."""
        if self.code == 0:
            with contextlib.suppress(CupynetError):
                return Run(self.folder).summary()
        return None

    @property
    def data(self) -> str | None:
        if self.summary is None:
            return None
        setup = self.summary.setup
        return f"{setup.dataset} (fallback)" if setup.fallback else setup.dataset

    @property
    def accuracy(self) -> float | None:
        """The validation accuracy if there are validation images, else the test accuracy."""
        validation = self.accuracy_on("validation")
        return self.accuracy_on("test") if validation is None else validation

    def accuracy_on(self, split: str) -> float | None:
        return None if self.summary is None else getattr(self.summary.scores, f"{split}_accuracy")

    def __str__(self) -> str:
        if self.code:
            return f"ended with exit code {self.code}: {one_line(self.error)}"
        return "done" if self.accuracy is None else f"accuracy {percent(self.accuracy)}"


_ended: list[Job] = []  # jobs that ended in this process, in case their records cannot be written
_hold: Hold | None = None  # lock on the folder of the sweep; not in `_Trace`, which Hydra's launchers pickle


def begin(sweep: Path) -> None:
    """Create the folder of a sweep and lock it until `finish`. Raise ConfigError if it contains a run or a sweep."""
    global _hold
    try:
        sweep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{sweep}: cannot be created ({error.strerror})") from error
    _hold = Hold(sweep)
    _ended.clear()
    if _hold.warning:
        say_error(f"warning: {_hold.warning}")
    try:
        check_untaken(sweep)
    except BaseException:
        _release()
        raise
    say(f"jobs run in subfolders of {sweep}")


def _release() -> None:
    global _hold
    if _hold is not None:
        _hold.release()
        _hold = None


def say(text: str) -> None:
    Console().handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


def began(sweep: Path, job: Job, shared: Sequence[str]) -> None:
    """Record the start of a job, and print its settings except `shared` ones."""
    own = " ".join(each for each in job.overrides if each not in shared)
    say(f"job {job.number}: {own}")
    with contextlib.suppress(OutputError):  # `ended` warns
        _record(sweep, job)


def ended(sweep: Path, job: Job) -> None:
    """Record the end of a job, update sweep.csv, and print the result if the job succeeded. Warn if writing fails."""
    _ended.append(job)
    try:
        _record(sweep, job)
        _write(sweep, [each for each in _jobs(sweep) if each.code is not None])
    except OutputError as error:
        say_error(f"warning: {NAME}: {error}")
    if not job.code:
        say(f"job {job.number}: {job}")


def _record(sweep: Path, job: Job) -> None:
    with contextlib.suppress(OSError):  # `write_json` reports it
        (sweep / RECORDS).mkdir(exist_ok=True)
    write_json(sweep / RECORDS / f"{job.number}.json", {**asdict(job), "folder": str(job.folder)})


def _jobs(sweep: Path) -> list[Job]:
    found = {}
    for path in (sweep / RECORDS).glob("*.json"):
        with contextlib.suppress(CupynetError, TypeError, KeyError):
            known = read_object(path)
            found[known["number"]] = Job(**{**known, "folder": Path(known["folder"])})
    found |= {job.number: job for job in _ended}
    return [found[number] for number in sorted(found)]


def _write(sweep: Path, jobs: Sequence[Job]) -> None:
    table = [
        *columns(jobs),
        column("exit_code", [job.code for job in jobs]),
        column("error", [one_line(job.error) for job in jobs]),
        column("folder", [str(job.folder) for job in jobs]),
    ]
    write_whole(sweep / NAME, as_csv(table))


def columns(jobs: Sequence[Job]) -> list[Column]:
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    varied = [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]
    found = [column("job", [job.number for job in jobs])]
    found += setting_columns({name: [job.settings.get(name) for job in jobs] for name in varied})
    data = {job.data: job.summary.setup.fallback for job in jobs if job.summary is not None}
    if len(data) > 1 or any(data.values()):
        found.append(column("dataset", [job.data for job in jobs], title="data", right=False))
    results = [{} if job.summary is None else job.summary.flat() for job in jobs]
    for name, title, form in FIGURES:
        found.append(column(name, [result.get(name) for result in results], form, title))
    return found


def finish(sweep: Path, planned: Sequence[Sequence[str]] = (), command: Sequence[str] = ()) -> int:
    """Print a table of the jobs and the commands of jobs that did not start, name the best job, and unlock the folder.

    planned: the overrides of all jobs. command: the command without overrides.

    Return the exit code of the first failed job, or 0. A killed job counts as failed.
    """
    lost = "its process was killed"
    begun = _jobs(sweep)
    jobs = [replace(job, code=1, error=lost) if job.code is None else job for job in begun]
    if jobs:
        with contextlib.suppress(OutputError):  # `ended` already warned
            _write(sweep, jobs)
            if jobs == begun:  # otherwise a job may still be running without its launcher
                shutil.rmtree(sweep / RECORDS, ignore_errors=True)
    try:
        _print(sweep, jobs, planned, command)
    except ValueError:  # stdout was closed
        pass
    except OSError as error:  # the terminal was closed, or the disk is full
        if error.errno == errno.ENOSPC:
            say_error(f"warning: the table cannot be printed ({error.strerror}). It is in {near(sweep / NAME)}")
    _ended.clear()
    _release()
    return next((job.code for job in jobs if job.code), 0)


def _print(sweep: Path, jobs: Sequence[Job], planned: Sequence[Sequence[str]], command: Sequence[str]) -> None:
    scored = [job for job in jobs if job.accuracy is not None]
    screen = Screen()
    table = [each for each in columns(jobs) if {*each.cells} != {ABSENT}]
    if jobs and len(table) > 1:
        show(table, screen, f"see {NAME}")
    for job in jobs:
        if job.code:
            screen.print(f"job {job.number} {job}", soft_wrap=True)
    numbers = {job.number for job in jobs}
    for number, overrides in enumerate(planned):
        if jobs and number not in numbers:
            screen.print(f"not started: job {number}: {shlex.join([*command, *overrides])}", soft_wrap=True)
    if best := _best(scored):
        compare = shlex.join(["cupynet", "compare", near(sweep)])
        screen.print(f"best: {best}. Compare the jobs: {compare}", soft_wrap=True)


def _best(jobs: Sequence[Job]) -> str:
    """Name the job with the highest validation accuracy or, unless all jobs have one, the highest test accuracy."""
    for split in ("validation", "test"):
        found = [(accuracy, job) for job in jobs if (accuracy := job.accuracy_on(split)) is not None]
        if found and len(found) == len(jobs):
            accuracy, best = max(found, key=itemgetter(0))
            return f"job {best.number}, {split} accuracy {percent(accuracy)} on {best.data}"
    return ""
