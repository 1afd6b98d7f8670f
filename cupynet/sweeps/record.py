"""What came out of the jobs of a sweep: a line for each, `sweep.csv`, and a table at the end."""

from __future__ import annotations

import contextlib
import gc
import logging
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet.checks import one_line, percent
from cupynet.errors import CupynetError, OutputError
from cupynet.exits import Console, say_error
from cupynet.files import write_whole
from cupynet.runs import Run, Summary
from cupynet.sweeps.processes import Command, SideBySide
from cupynet.sweeps.shares import shares
from cupynet.sweeps.table import Column, Screen, as_csv, heading, shortened, show

if TYPE_CHECKING:
    from cupynet.experiment import Experiment

NAME = "sweep.csv"
NO_RESULT = "-"


@dataclass
class Job:
    """One job of a sweep.

    Attributes:
        number: from 0, its folder's name.
        overrides: what its command line asks for: setting -> value, as they were written.
        folder: of the run.
        code: that it ended with; None while it has not.
        error: why, in a line; "" where all went well.
        summary: what came of it; None where nothing did.
        before: the time of the summary that was in its folder when it began, of an older sweep; None where none was.
    """

    number: int
    overrides: dict[str, str]
    folder: Path
    code: int | None = None
    error: str = ""
    summary: Summary | None = field(default=None, repr=False)
    before: int | None = field(default=None, repr=False)

    @property
    def accuracy(self) -> float | None:
        """What it is judged by: validation images where some were held out, else test images."""
        found = self.summary
        if found is None:
            return None
        return found.test_accuracy if found.validation_accuracy is None else found.validation_accuracy


class Sweep:
    """The jobs of a sweep, as they begin and end; everything that fails here is told once and ends nothing.

    Args:
        folder: the sweep's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[int, Job] = {}
        self._expected: list[dict[str, str]] = []
        self._devices: set[int] = set()  # that jobs would use which name none
        self._own: set[int] = set()  # jobs that name theirs
        self._used: set[int] = set()  # devices of any of the jobs
        self._most_workers = 1
        self._here = True  # jobs are done in this process
        self._console, self._told = Console(), False

    def expected(self, jobs: Sequence[Sequence[str]]) -> None:
        """All of the jobs, where they are known before the first begins: their overrides."""
        self._expected = [asked(job) for job in jobs]
        self._say(f"{len(jobs)} job{'s' * (len(jobs) != 1)}, each into a folder of {self.folder}")

    def checked(self, number: int, experiment: Experiment) -> None:
        """A job will be able to run, as the `experiment`."""
        placement = experiment.placement
        self._most_workers = max(self._most_workers, placement.ranks)
        self._used |= set(placement.devices)
        if experiment.settings.devices is None:
            self._devices |= set(placement.devices)
        else:
            self._own.add(number)

    def side_by_side(
        self,
        program: Sequence[str],
        jobs: Sequence[tuple[int, Sequence[str], Path, Sequence[str]]],
        at_once: int | None,
    ) -> int:
        """Do jobs as processes of their own, several at once.

        Args:
            program: the words of a command line before its settings.
            jobs: of each its number, its overrides, its folder and the arguments of its command line.
            at_once: how many; None for one per device, or on a CPU one per core up to 4.

        Returns:
            The signal that ended all of it; 0 where none came.
        """
        self._here = False
        parts = shares(at_once, len(jobs), sorted(self._devices))
        if len(parts) > 1:
            self._say(f"{len(parts)} at once, each with {parts[0]}")
            cores = len(parts[0].cores) or parts[0].threads or 1
            if not self._devices and self._most_workers > cores:
                self._say(
                    f"warning: up to {self._most_workers} workers share {cores} core{'s' * (cores != 1)}: compare "
                    "accuracy, not images/s"
                )
        work = SideBySide(program, self, parts)
        work.run([Command(*job, own_devices=job[0] in self._own) for job in jobs])
        return work.signal

    def began(self, number: int, overrides: Sequence[str], folder: Path) -> None:
        """A job begins."""
        self.jobs[number] = Job(number, asked(overrides), folder, before=_written(folder))
        self._say(f"job {number}: {self._called(self.jobs[number])}")

    def ended(self, number: int, code: int, error: str = "") -> Job:
        """A job has ended; what is known of it."""
        job = self.jobs[number]
        job.code, job.error = code, one_line(error)
        if _written(job.folder) != job.before:
            with contextlib.suppress(CupynetError):
                job.summary = Run(job.folder).summary()
        if job.summary is not None and code == 0:
            self._say(f"job {number}: {_outcome(job.summary)}")
        self._write()
        if self._here:
            self._free()
        return job

    def code(self, number: int) -> int | None:
        """What a job ended with; None where it was not begun."""
        return self.jobs[number].code if number in self.jobs else None

    def result(self, number: int) -> float | None:
        """What a sweeper is to choose by: the accuracy of a job that came to its end."""
        job = self.jobs.get(number)
        return None if job is None or job.code else job.accuracy

    def close(self) -> None:
        """All is over: the table."""
        if not self.jobs:
            return
        try:
            self._show(Screen())
        except Exception as error:  # of the stream, or of what draws
            if not isinstance(error, BrokenPipeError):
                say_error(f"warning: the table of the sweep cannot be shown ({one_line(error)}): see {NAME}")

    @property
    def varied(self) -> list[str]:
        """The settings that not all jobs have alike, in the order they were written."""
        jobs = self._expected or [job.overrides for job in self.jobs.values()]
        names = list(dict.fromkeys(name for job in jobs for name in job))
        return [name for name in names if len({job.get(name) for job in jobs}) > 1]

    @property
    def best(self) -> Job | None:
        """The finished job of the best accuracy, of several the one that trained fastest; None where there is none."""
        done = [job for job in self.jobs.values() if job.code == 0 and self._judged(job) is not None]
        return min(done, key=lambda job: (-(self._judged(job) or 0.0), _summary(job).train_s), default=None)

    @property
    def _split(self) -> str:
        """Which images choose between the jobs: those that all finished ones were judged by."""
        found = [job.summary for job in self.jobs.values() if job.code == 0 and job.summary is not None]
        return "validation" if all(each.validation_accuracy is not None for each in found) else "test"

    def _judged(self, job: Job) -> float | None:
        return None if job.summary is None else getattr(job.summary, f"{self._split}_accuracy")

    def _called(self, job: Job) -> str:
        """A job by what is its own."""
        names = self.varied or list(job.overrides)
        return " ".join(f"{name}={job.overrides[name]}" for name in names if name in job.overrides)

    def _say(self, text: str) -> None:
        self._console.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))

    def _write(self) -> None:
        """What is known so far, in a file: a sweep that is killed has it too."""
        try:
            write_whole(self.folder / NAME, as_csv(self._columns()).encode())
        except OutputError as error:
            if not self._told:
                self._told = True
                say_error(f"warning: {error}: the sweep goes on without it")

    def _free(self) -> None:
        """Leave the next job no memory that this one had: models are in circles, and pools keep what was freed."""
        gc.collect()
        if self._used:
            from cupynet.backend import cuda

            cuda.trim_pools(sorted(self._used), 0, 0)

    def _ordered(self) -> list[Job]:
        """Those that failed come last."""
        return sorted(self.jobs.values(), key=lambda job: (job.code != 0, job.number))

    def _columns(self) -> list[Column]:
        """The table; what stands in files is exact and unrounded."""
        jobs, short = self._ordered(), shortened(self.varied)
        settings = [
            Column(
                name, heading(short[name]), [job.overrides.get(name, NO_RESULT) for job in jobs],
                [job.overrides.get(name) for job in jobs], weight=8,
            )
            for name in self.varied
        ]  # fmt: skip
        found = [job.summary for job in jobs]
        figures = [
            _figure("test_accuracy", "test\naccuracy", percent, found, 9),
            _figure("validation_accuracy", "validation\naccuracy", percent, found, 9),
            _figure("test_loss", "test\nloss", lambda loss: f"{loss:.4g}", found, 5),
            _figure("images_per_s", "images/s", lambda rate: f"{rate:,.0f}", found, 6),
            _figure("train_s", "train\ntime", lambda seconds: f"{seconds:.1f} s", found, 4),
        ]
        outcome = ["" if job.code == 0 else f"{job.code}: {job.error}" if job.error else f"{job.code}" for job in jobs]
        return [
            Column("job", "job", [str(job.number) for job in jobs], [job.number for job in jobs], weight=10),
            *settings,
            *figures,
            Column("exit_code", "", [""] * len(jobs), [job.code for job in jobs], weight=0),
            Column("error", "failed with", outcome, [job.error for job in jobs], right=False, weight=0),
            Column("folder", "", [""] * len(jobs), [str(job.folder) for job in jobs], weight=0),
        ]

    def _show(self, screen: Screen) -> None:
        jobs, best = self._ordered(), self.best
        columns = [column for column in self._columns() if any(cell not in ("", NO_RESULT) for cell in column.cells)]
        columns = [column for column in columns if column.key != "error"]
        styles = {place: "bold" if job is best else "dim" for place, job in enumerate(jobs) if job is best or job.code}
        left = show(columns, styles, screen)
        for job in jobs:
            if job.code:
                screen.print(
                    f"job {job.number} failed: exit code {job.code}{f': {job.error}' if job.error else ''}",
                    soft_wrap=True,
                )
        if left:
            screen.print(f"no room for {', '.join(column.key for column in left)}: see {NAME}")
        if best is not None:
            reached = percent(self._judged(best) or 0.0)
            screen.print(
                f"best: job {best.number} ({self._called(best)}), {self._split} accuracy {reached}",
                soft_wrap=True,
            )
        screen.print(f"python -m cupynet.compare {shlex.quote(str(self.folder))}", soft_wrap=True)


def asked(overrides: Sequence[str]) -> dict[str, str]:
    """Setting -> value of a job's command line, as they were written."""
    parts = (each.partition("=") for each in overrides)
    return {name.lstrip("+"): value for name, _, value in parts}


def _written(folder: Path) -> int | None:
    """When the summary in a folder was written, in nanoseconds; None where there is none."""
    try:
        return Run(folder).summary_path.stat().st_mtime_ns
    except OSError:
        return None


def _summary(job: Job) -> Summary:
    assert job.summary is not None
    return job.summary


def _outcome(summary: Summary) -> str:
    split = "test" if summary.validation_accuracy is None else "validation"
    accuracy = getattr(summary, f"{split}_accuracy")
    judged = "" if accuracy is None else f"{split} accuracy {percent(accuracy)}, "
    return f"{judged}{summary.images_per_s:,.0f} images/s, trained in {summary.train_s:.1f} s"


def _figure(
    name: str, title: str, form: Callable[[float], str], found: Sequence[Summary | None], weight: int
) -> Column:
    """A column of one of the figures of a summary."""
    values = [None if summary is None else getattr(summary, name) for summary in found]
    return Column(name, title, [NO_RESULT if v is None else form(v) for v in values], values, weight=weight)
