"""The jobs of a sweep: a row for each in sweep.csv, and a table on the terminal.

Each job that has ended leaves a small file in the sweep's folder, whichever process it ran in. The table is made from
these files and from the jobs' folders.
"""

from __future__ import annotations

import contextlib
import json
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
from cupynet.core.files import write_json, write_whole
from cupynet.core.terminal import near
from cupynet.runs.run import Run, Summary

NAME = "sweep.csv"
ENDED = ".jobs"  # folder of a file for each job that has ended
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
    def accuracy(self) -> float | None:
        """The accuracy on the validation images if there are some, else on the test images."""
        return self.accuracy_on(self.split)

    @property
    def split(self) -> str:
        """The images to choose by: `validation` if there are some, else `test`."""
        return "test" if self.accuracy_on("validation") is None else "validation"

    def accuracy_on(self, split: str) -> float | None:
        """The accuracy on the `validation` or the `test` images; None if it was not measured."""
        scores = None if self.summary is None else self.summary.scores
        found: float | None = getattr(scores, f"{split}_accuracy", None)
        return found


def say(text: str) -> None:
    """Print a line with the time, as the console shows log records."""
    Console().handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))


def began(number: int, overrides: Sequence[str]) -> None:
    """Print that a job begins, and the settings that the command line does not say of all jobs."""
    say(f"job {number}: {' '.join(each for each in overrides if each not in sys.argv)}")


def split(overrides: Sequence[str]) -> dict[str, str]:
    """Return setting -> value of a job's overrides, as written."""
    parts = (each.partition("=") for each in overrides)
    return {name.lstrip("+"): value for name, _, value in parts}


def begin(sweep: Path) -> None:
    """Remove the records of an earlier sweep in this folder. OSError."""
    folder = sweep / ENDED
    if folder.is_symlink():
        folder.unlink()
    for path in folder.glob("*.json"):
        path.unlink()


def ended(sweep: Path, job: Job) -> None:
    """Record that a job has ended, in a file of its own and in sweep.csv, and print its result.

    A failure to write is a warning.
    """
    content = {"number": job.number, "overrides": dict(job.overrides), "folder": str(job.folder.absolute())}
    content |= {"code": job.code, "error": one_line(job.error)}
    try:
        (sweep / ENDED).mkdir(exist_ok=True)
        write_json(sweep / ENDED / f"{job.number}.json", content)
        _write(sweep, jobs_of(sweep))
    except (OSError, OutputError) as error:
        say_error(f"warning: {NAME}: {one_line(error)}")
    if not job.code:
        say(f"job {job.number}: {outcome(job)}")


def _write(sweep: Path, jobs: Sequence[Job]) -> None:
    write_whole(sweep / NAME, as_csv(Table(jobs).columns()).encode())


def jobs_of(sweep: Path) -> list[Job]:
    """Return the jobs that have ended, failed ones last."""
    found = []
    for path in (sweep / ENDED).glob("*.json"):
        content = json.loads(path.read_text())
        content["folder"] = Path(near(Path(content["folder"])))
        found.append(Job(**content))
    return sorted(found, key=lambda job: (job.code != 0, job.number))


def outcome(job: Job) -> str:
    """Return the result of a job in a line."""
    found = job.summary
    if job.code:
        return f"failed with exit code {job.code}{f': {job.error}' if job.error else ''}"
    if found is None:
        return "done"
    reached = "" if job.accuracy is None else f"{job.split} accuracy {percent(job.accuracy)}, "
    return f"{reached}{found.cost.images_per_s:,.0f} images/s, trained in {found.cost.train_s:.1f} s"


def finish(sweep: Path) -> int:
    """Print the jobs, the best of them and the command that compares them.

    Returns the exit code of the first job that failed, or 0.
    """
    jobs = jobs_of(sweep)
    if jobs:
        with contextlib.suppress(OutputError):  # each job has warned of it
            _write(sweep, jobs)  # jobs that ended at the same time may have left out each other's rows
        with contextlib.suppress(OSError, ValueError):  # of the terminal
            Table(jobs).show(sweep, Screen())
    return next((job.code for job in sorted(jobs, key=lambda job: job.number) if job.code), 0)


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
        judged = [
            (accuracy, -job.summary.cost.train_s, job)
            for job in results
            if job.summary is not None and (accuracy := job.accuracy_on(self.split)) is not None
        ]
        self.best = max(judged, key=lambda each: each[:2])[2] if judged else None

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
            Column("error", "", [], [job.error for job in jobs]),
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
            accuracy = percent(self.best.accuracy_on(self.split) or 0.0)
            screen.print(f"best: job {self.best.number} ({settings}), {self.split} accuracy {accuracy}", soft_wrap=True)
            command = shlex.join(["cupynet", "compare", near(sweep)])
            screen.print(f"Compare the jobs: {command}", soft_wrap=True)
