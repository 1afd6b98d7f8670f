"""Runs as they are found in folders: what they were asked for, what came of them, or why nothing did.

What is read may be anybody's: nothing in it is built or run, and what is damaged is said of the run that has it.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from cupynet import config
from cupynet.checks import one_line
from cupynet.errors import ConfigError, CupynetError, DataError
from cupynet.lock import at_work
from cupynet.report.folder import finite, texts
from cupynet.runs import Run, Summary

DEEP = 5  # folders below the one that is named
LOG_BYTES = 1 << 16  # at the end of a log
MOST_HISTORY = 1 << 26  # bytes
ERROR = re.compile(r"\S+ \S+ ERROR [\w.]+: (?:job \d+: )?(.*)")
NUMBERS = ("images_per_s", "train_s", "wall_s", "test_accuracy", "test_loss", "validation_accuracy")
COUNTS = ("seed", "epochs", "batch_size", "iterations", "images")
PLACES = ("workers", "stages")
WORDS = ("dataset", "backend", "dtype")
OPTIONAL = ("test_accuracy", "test_loss", "validation_accuracy")


@dataclass(frozen=True)
class Epoch:
    """A row of the history.

    Attributes:
        epoch, iteration: complete so far.
        train_s: of training so far, evaluations left out.
        accuracy: split -> accuracy, of what was evaluated.
    """

    epoch: int
    iteration: int
    train_s: float
    accuracy: dict[str, float]


@dataclass(frozen=True)
class Found:
    """A run.

    Attributes:
        folder: where it was found; name: what it is called here.
        settings: dotted keys -> values as they were written; choices: which file was taken of each group.
        summary: what came of it; None where nothing did.
        trouble: why it has no result, or is not what was asked for; "" where all is well.
        epochs: its history.
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    choices: dict[str, str]
    summary: Summary | None
    trouble: str = ""
    epochs: list[Epoch] = field(default_factory=list, repr=False)

    def time_to(self, accuracy: float, split: str) -> float | None:
        """Seconds of training until an evaluation was at least so good; None where none was."""
        return next((each.train_s for each in self.epochs if each.accuracy.get(split, -1.0) >= accuracy), None)


def find(paths: Sequence[str]) -> list[Found]:
    """The runs in folders: a run's own, that of a sweep, one with many of these in it, or a pattern for their names.

    Raises:
        ConfigError: there is nothing of that name, it is no folder, or no run is in it.
    """
    folders: dict[Path, Path] = {}  # each once, however it was named
    for path in paths:
        named = [path] if os.path.lexists(path) else sorted(glob.glob(path), key=natural)
        if not named:
            raise ConfigError(f"{path}: is not there: name the folder of a run or of a sweep, such as outputs/latest")
        before = len(folders)
        for name in named:
            if not os.path.isdir(name):
                if path == name:
                    raise ConfigError(f"{path}: is not a folder: name that of a run or of a sweep")
                continue
            for run in sorted(_runs(Path(name)), key=lambda run: natural(str(run))):
                folders.setdefault(run.resolve(), run)
        if len(folders) == before and not any(Path(name).resolve() in folders for name in named):
            raise ConfigError(f"{path}: no run is in it: a run has .hydra/config.yaml or summary.json")
    runs = list(folders.values())
    return [read(run, name) for run, name in zip(runs, _names(runs), strict=True)]


def natural(text: str) -> list[tuple[int, int, str]]:
    """For sorting: numbers by what they count, so that job 10 comes after job 9."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", text)]


def is_run(folder: Path) -> bool:
    """Whether a run has been in a folder."""
    return (folder / ".hydra" / "config.yaml").is_file() or (folder / "summary.json").is_file()


def _runs(folder: Path, deep: int = DEEP) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    for each in inside if deep else ():
        if not each.name.startswith("."):
            yield from _runs(each, deep - 1)


def _names(runs: Sequence[Path]) -> list[str]:
    """What is different in the names of folders."""
    if len(runs) == 1:
        return [runs[0].name or str(runs[0])]
    above = os.path.commonpath([os.path.abspath(run) for run in runs])
    return [os.path.relpath(os.path.abspath(run), above) for run in runs]


def read(folder: Path, name: str) -> Found:
    """A run, whatever is left of it."""
    run, trouble = Run(folder), []
    settings: dict[str, Any] = {}
    choices: dict[str, str] = {}
    if (folder / ".hydra" / "config.yaml").is_file():
        try:
            settings, choices = config.written(folder)
        except CupynetError as error:
            trouble.append(_within(error, folder))
    summary = None
    try:
        summary = run.summary()
        _check(summary, run)
    except ConfigError:
        trouble.insert(0, _unfinished(folder))
    except DataError as error:
        summary = None
        trouble.insert(0, _within(error, folder))
    if summary is not None:
        settings = {**(settings or _of(summary)), "workers": summary.workers}
        if summary.stop_reason in ("signal", "request", "diverged"):
            trouble.append(f"stopped: {one_line(summary.stopped_by)}")
    return Found(folder, name, settings, choices, summary, "; ".join(trouble), _history(run))


def _within(error: CupynetError, folder: Path) -> str:
    """An error, which need not name the folder again."""
    return f"damaged: {one_line(error).replace(f'{folder}{os.sep}', '')}"


def _check(summary: Summary, run: Run) -> None:
    """Refuse a summary whose figures are none. DataError."""
    for names, kind, least in ((NUMBERS, float, -math.inf), (COUNTS, int, 0), (PLACES, int, 1)):
        for name in names:
            value = getattr(summary, name)
            known = finite(value)
            good = known is not None and known >= least and (kind is float or isinstance(value, int))
            if not good and not (value is None and name in OPTIONAL):
                raise DataError(f"{run.summary_path}: {name}={value!r:.40}: is no figure of a run")
    words = all(isinstance(getattr(summary, name), str) for name in WORDS)
    told = isinstance(summary.commit, str | None) and isinstance(summary.fallback, bool) and texts(summary.devices)
    if not words or not told or not isinstance(summary.environment, dict) or not isinstance(summary.test, dict | None):
        raise DataError(f"{run.summary_path}: is not the summary of a run")


def _of(summary: Summary) -> dict[str, Any]:
    """Settings that a run without stored ones is known to have had."""
    return {
        "seed": summary.seed,
        "dtype": summary.dtype,
        "batch_size": summary.batch_size,
        "parallel.averaging_frequency": summary.averaging_frequency,
    }


def _unfinished(folder: Path) -> str:
    """Why a run has no summary."""
    if at_work(folder, patient=False):
        return "going on"
    try:
        with _plain(folder / "train.log") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
            lines = log.read(LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        lines = []
    told = [found[1] for line in lines if (found := ERROR.fullmatch(line))]
    return f"failed: {one_line(told[-1])}" if told else "unfinished"


def _history(run: Run) -> list[Epoch]:
    """Its epochs, as far as they can be read: a run that was killed has half a row."""
    try:
        with _plain(run.history_path) as file:
            lines = file.read(MOST_HISTORY).decode(errors="replace").splitlines()
    except OSError:
        return []
    epochs: list[Epoch] = []
    train_s = 0.0
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or row.get("kind") != "epoch":
            continue
        iteration = finite(row.get("iteration"))
        if iteration is not None:
            train_s += finite(row.get("train_s")) or 0.0
            found = {split: finite(row.get(f"{split}_accuracy")) for split in ("test", "validation")}
            known = {split: value for split, value in found.items() if value is not None}
            epochs.append(Epoch(int(finite(row.get("epoch")) or 0), int(iteration), train_s, known))
    return epochs


def _plain(path: Path) -> BinaryIO:
    """A file, open. OSError where it is none of this folder: a link may lead to one without an end, a pipe waits."""
    if path.is_symlink() or not path.is_file():
        raise FileNotFoundError(path)
    return path.open("rb")
