"""The jobs of a sweep: a row for each in sweep.csv, and a table on the terminal.

The sweep process records each job that has ended, and reads the results from its folder.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cupynet.config.sweep_table import ABSENT, Column, Screen, as_csv, column, heading, shortened, show
from cupynet.core.checks import one_line, percent
from cupynet.core.errors import CupynetError, OutputError
from cupynet.core.exits import Console, say_error
from cupynet.core.files import write_whole
from cupynet.core.terminal import near
from cupynet.runs.run import Run, Summary

NAME = "sweep.csv"
FIGURES = (  # name, title, format
    ("test_accuracy", "test\naccuracy", percent),
    ("validation_accuracy", "validation\naccuracy", percent),
    ("test_loss", "test\nloss", "{:.4g}".format),
    ("images_per_s", "images/s", "{:,.0f}".format),
    ("train_s", "train\ntime", "{:.1f} s".format),
)


@dataclass(frozen=True)
class Job:
    """A job of a sweep that has ended.

    Attributes:
        number: from 0.
        overrides: of the job, as typed.
        folder: of the run.
        code: exit code.
        error: one line; "" if there was none.
    """

    number: int
    overrides: Sequence[str]
    folder: Path
    code: int
    error: str = ""

    @cached_property
    def settings(self) -> dict[str, str]:
        """Setting -> value, as typed."""
        parts = (each.partition("=") for each in self.overrides)
        return {name.lstrip("+"): value for name, _, value in parts}

    @cached_property
    def summary(self) -> Summary | None:
        """The results; None if the job failed, whatever its folder holds."""
        if not self.code:
            with contextlib.suppress(CupynetError):
                return Run(self.folder).summary()
        return None

    @property
    def accuracy(self) -> float | None:
        """The accuracy on the validation images if there are some, else on the test images."""
        if self.summary is None:
            return None
        scores = self.summary.scores
        return scores.test_accuracy if scores.validation_accuracy is None else scores.validation_accuracy

    def __str__(self) -> str:
        if self.code:
            return f"ended with exit code {self.code}: {one_line(self.error)}"
        return "done" if self.accuracy is None else f"accuracy {percent(self.accuracy)}"


_ended: list[Job] = []  # the jobs of this process's sweep


def say(text: str) -> None:
    """Print a line with the time, as the console shows log records."""
    Console().handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


def began(number: int, overrides: Sequence[str]) -> None:
    """Print that a job begins, with the settings that not all jobs share."""
    say(f"job {number}: {' '.join(each for each in overrides if each not in sys.argv)}")


def ended(sweep: Path, job: Job) -> None:
    """Record that a job has ended in sweep.csv, and print its result. A failure to write is a warning."""
    _ended.append(job)
    jobs = sorted(_ended, key=lambda each: each.number)
    table = [
        *columns(jobs),
        column("exit_code", [job.code for job in jobs]),
        column("error", [one_line(job.error) for job in jobs]),
        column("folder", [str(job.folder) for job in jobs]),
    ]
    try:
        write_whole(sweep / NAME, as_csv(table).encode())
    except OutputError as error:
        say_error(f"warning: {NAME}: {error}")
    if not job.code:
        say(f"job {job.number}: {job}")


def columns(jobs: Sequence[Job]) -> list[Column]:
    """Return the numbers, the settings that differ and the results."""
    names = dict.fromkeys(name for job in jobs for name in job.settings)
    varied = [name for name in names if len({job.settings.get(name) for job in jobs}) > 1]
    short = shortened(varied)
    found = [column("job", [job.number for job in jobs])]
    for name in varied:
        values = [job.settings.get(name) for job in jobs]
        found.append(column(name, values, title=heading(short[name])))
    results = [{} if job.summary is None else job.summary.flat() for job in jobs]
    for name, title, form in FIGURES:
        found.append(column(name, [result.get(name) for result in results], form, title))
    return found


def finish(sweep: Path) -> int:
    """Print the jobs, the best of them and the command that compares them.

    Returns the exit code of the first job that failed, or 0.
    """
    jobs = sorted(_ended, key=lambda each: each.number)
    scored = [job for job in jobs if job.accuracy is not None]
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
        screen = Screen()
        if jobs:
            show([each for each in columns(jobs) if {*each.cells} != {ABSENT}], screen, f"see {NAME}")
        for job in jobs:
            if job.code:
                screen.print(f"job {job.number} {job}", soft_wrap=True)
        if scored:
            best = max(scored, key=lambda job: job.accuracy or 0.0)
            command = shlex.join(["cupynet", "compare", near(sweep)])
            screen.print(f"best: job {best.number}, {best}. Compare the jobs: {command}", soft_wrap=True)
    _ended.clear()
    return next((job.code for job in jobs if job.code), 0)
