"""The jobs of a sweep: a row for each in sweep.csv, and a table on the terminal.

The sweep process records each job that has ended, and reads the results from its folder.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cupynet.config.sweep_table import Column, Screen, as_csv, heading, shortened, show
from cupynet.core.checks import one_line, percent
from cupynet.core.errors import ConfigError, CupynetError, OutputError
from cupynet.core.exits import Console, say_error
from cupynet.core.files import write_whole
from cupynet.core.terminal import near
from cupynet.runs.run import Run, Summary

NAME = "sweep.csv"
NO_RESULT = "-"


@dataclass(frozen=True)
class Job:
    """A job of a sweep that has ended.

    Attributes:
        number: from 0.
        overrides: setting -> value, as written.
        folder: of the run.
        code: exit code.
        error: one line; "" if there was none.
    """

    number: int
    overrides: Mapping[str, str]
    folder: Path
    code: int
    error: str = ""

    @cached_property
    def summary(self) -> Summary | None:
        """The results; None if there are none. A job that was refused has written none, whatever its folder holds."""
        if self.code != ConfigError.exit_code:
            with contextlib.suppress(CupynetError):
                return Run(self.folder).summary()
        return None

    @property
    def split(self) -> str:
        """The images to choose by: `validation` if there are some, else `test`."""
        return "test" if self.accuracy("validation") is None else "validation"

    def accuracy(self, split: str) -> float | None:
        """Return the accuracy on the `validation` or the `test` images; None if it was not measured."""
        if self.summary is None:
            return None
        scores = self.summary.scores
        return scores.validation_accuracy if split == "validation" else scores.test_accuracy


_ended: dict[int, Job] = {}  # the jobs of this process's sweep, by number


def say(text: str) -> None:
    """Print a line with the time, as the console shows log records."""
    Console().handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


def began(number: int, overrides: Sequence[str]) -> None:
    """Print that a job begins, with the settings that not all jobs share."""
    say(f"job {number}: {' '.join(each for each in overrides if each not in sys.argv)}")


def split(overrides: Sequence[str]) -> dict[str, str]:
    """Return setting -> value of a job's overrides, as written."""
    parts = (each.partition("=") for each in overrides)
    return {name.lstrip("+"): value for name, _, value in parts}


def begin() -> None:
    """Forget the jobs of an earlier sweep of this process."""
    _ended.clear()


def ended(sweep: Path, job: Job) -> None:
    """Record that a job has ended in sweep.csv, and print its result. A failure to write is a warning."""
    _ended[job.number] = job
    try:
        write_whole(sweep / NAME, as_csv(Table(jobs()).columns()).encode())
    except OutputError as error:
        say_error(f"warning: {NAME}: {error}")
    if not job.code:
        say(f"job {job.number}: {outcome(job)}")


def jobs() -> list[Job]:
    """Return the jobs that have ended, failed ones last."""
    return sorted(_ended.values(), key=lambda job: (job.code != 0, job.number))


def outcome(job: Job) -> str:
    """Describe the result of a job in a line."""
    found = job.summary
    if job.code in (130, 143) and job.error:
        return one_line(job.error)  # stopped by a signal
    if job.code:
        return f"failed with exit code {job.code}{f': {one_line(job.error)}' if job.error else ''}"
    if found is None:
        return "done"
    accuracy = job.accuracy(job.split)
    reached = "" if accuracy is None else f"{job.split} accuracy {percent(accuracy)}, "
    return f"{reached}{found.cost.images_per_s:,.0f} images/s, trained in {found.cost.train_s:.1f} s"


def finish(sweep: Path) -> int:
    """Print the jobs, the best of them and the command that compares them.

    Returns the exit code of the first job that failed, or 0.
    """
    if _ended:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
            Table(jobs()).show(sweep, Screen())
    return next((_ended[number].code for number in sorted(_ended) if _ended[number].code), 0)


class Table:
    """The table of a sweep's jobs.

    Attributes:
        varied: the settings in which jobs differ, in the order they were written.
        split: the images by which the best job is chosen: `validation` or `test`.
        best: the job of the best accuracy, the fastest of several; None if none has one.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        names = dict.fromkeys(name for job in jobs for name in job.overrides)
        self.varied = [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]
        results = [job for job in jobs if job.code == 0 and job.summary is not None]
        # chosen by validation images if every job has some
        self.split = "validation" if all(job.split == "validation" for job in results) else "test"
        scored = [
            (accuracy, -job.summary.cost.train_s, job)
            for job in results
            if job.summary is not None and (accuracy := job.accuracy(self.split)) is not None
        ]
        self.best = max(scored, key=lambda each: each[:2])[2] if scored else None

    def columns(self) -> list[Column]:
        """Return the table; values in files are exact."""
        jobs, short = self.jobs, shortened(self.varied)
        settings = [
            Column(
                name, heading(short[name]), [job.overrides.get(name, NO_RESULT) for job in jobs],
                [job.overrides.get(name) for job in jobs], weight=8,
            )
            for name in self.varied
        ]  # fmt: skip
        return [
            Column("job", "job", [str(job.number) for job in jobs], [job.number for job in jobs], weight=10),
            *settings,
            self._figure("test_accuracy", "test\naccuracy", percent, 9),
            self._figure("validation_accuracy", "validation\naccuracy", percent, 9),
            self._figure("test_loss", "test\nloss", lambda loss: f"{loss:.4g}", 5),
            self._figure("images_per_s", "images/s", lambda rate: f"{rate:,.0f}", 6),
            self._figure("train_s", "train\ntime", lambda seconds: f"{seconds:.1f} s", 4),
            Column("exit_code", "", [], [job.code for job in jobs]),
            Column("error", "", [], [one_line(job.error) for job in jobs]),
            Column("folder", "", [], [str(job.folder) for job in jobs]),
        ]

    def _figure(self, name: str, title: str, form: Callable[[float], str], weight: int) -> Column:
        values = [None if job.summary is None else job.summary.flat()[name] for job in self.jobs]
        return Column(name, title, [NO_RESULT if v is None else form(v) for v in values], values, weight=weight)

    def show(self, sweep: Path, screen: Screen) -> None:
        """Print the table, failed jobs with their errors, and the best job."""
        columns = [each for each in self.columns() if any(cell != NO_RESULT for cell in each.cells)]
        styles = {
            place: "bold" if job is self.best else "dim"
            for place, job in enumerate(self.jobs)
            if job.code or job is self.best
        }
        left_out = show(columns, styles, screen)
        for job in self.jobs:
            if job.code:
                screen.print(f"job {job.number} {outcome(job)}", soft_wrap=True)
        if left_out:
            screen.print(f"no room for {', '.join(column.key for column in left_out)}: see {NAME}")
        if self.best is not None:
            settings = " ".join(f"{name}={self.best.overrides.get(name)}" for name in self.varied)
            accuracy = percent(self.best.accuracy(self.split) or 0.0)
            screen.print(f"best: job {self.best.number} ({settings}), {self.split} accuracy {accuracy}", soft_wrap=True)
            command = shlex.join(["cupynet", "compare", near(sweep)])
            screen.print(f"Compare the jobs: {command}", soft_wrap=True)
