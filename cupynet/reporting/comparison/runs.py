"""Finds runs in folders, and reads their settings and results, or the reason why there are none.

The files are untrusted: nothing in them is instantiated or executed, and a damaged file affects only its run.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cupynet import config
from cupynet.core.checks import LONGEST, one_line, shown
from cupynet.core.errors import ConfigError, CupynetError
from cupynet.core.terminal import printable
from cupynet.reporting.folder import config_path, finite, is_plain, read_run
from cupynet.runs.run import Run

MAX_DEPTH = 5  # levels below the named folder
# The values of a summary that are compared; optional values may be None. An int is at least 0 and below 2**63, a float
# is finite.
REQUIRED: dict[str, type] = {
    **dict.fromkeys(("dataset", "backend"), str),
    **dict.fromkeys(("images_per_s", "train_s"), float),
    **dict.fromkeys(("seed", "epochs", "images", "workers", "stages"), int),
    **{"fallback": bool, "devices": list, "environment": dict},
}
OPTIONAL: dict[str, type] = {
    **dict.fromkeys(("test_accuracy", "test_loss", "validation_accuracy"), float),
    **{"test": dict, "commit": str},
}


class Epoch(NamedTuple):
    """An epoch of a run.

    Attributes:
        iteration: the number of complete iterations.
        train_s: seconds of training so far, without evaluations.
        accuracy: split -> accuracy, if it was evaluated.
    """

    iteration: int
    train_s: float
    accuracy: dict[str, float]


@dataclass(frozen=True)
class ComparedRun:
    """A run.

    Attributes:
        folder: of the run.
        name: the part of its path that differs from the other runs.
        settings: dotted key -> value.
        choices: configuration group -> chosen file.
        summary: the results; empty if there are none.
        trouble: why there is no result, or why it is incomplete; "" otherwise.
        epochs: its history.
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    choices: dict[str, str]
    summary: dict[str, Any]
    trouble: str = ""
    epochs: list[Epoch] = field(default_factory=list, repr=False)

    def time_to(self, accuracy: float, split: str) -> float | None:
        """Return the seconds of training until an evaluation reached an accuracy; None if none did."""
        return next((each.train_s for each in self.epochs if each.accuracy.get(split, -1.0) >= accuracy), None)

    @property
    def test_images(self) -> Any:
        """The number of images of its test; None if it is not known."""
        return (self.summary["test"] or {}).get("samples")


def find(paths: Sequence[str]) -> list[ComparedRun]:
    """Read the runs in folders.

    Args:
        paths: folders of runs or sweeps, folders above them, or patterns.

    Raises:
        ConfigError: a path does not exist, is not a folder, or has no runs.
    """
    folders: dict[Path, Path] = {}  # resolved: each run once
    for path in paths:
        matches = [path] if os.path.lexists(path) else sorted(glob.glob(path), key=natural)
        if not matches:
            raise ConfigError(f"{path}: does not exist: name the folder of a run or of a sweep, such as outputs/latest")
        if matches == [path] and not os.path.isdir(path):
            raise ConfigError(f"{path}: is not a folder: name that of a run or of a sweep")
        runs = [run for match in matches if os.path.isdir(match) for run in _runs(Path(match))]
        if not runs:
            raise ConfigError(f"{path}: contains no run: a run has .hydra/config.yaml or summary.json")
        for run in sorted(runs, key=lambda run: natural(str(run))):
            folders.setdefault(run.resolve(), run)
    found = list(folders.values())
    return [read(run, name) for run, name in zip(found, _names(found), strict=True)]


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key for sorting by the numbers in a text, so that job 10 comes after job 9."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", text)]


def is_run(folder: Path) -> bool:
    """Return True for the folder of a run."""
    return is_plain(config_path(Run(folder))) or is_plain(Run(folder).summary_path)


def _runs(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    for each in inside if depth else ():
        if not each.name.startswith("."):
            yield from _runs(each, depth - 1)


def _names(runs: Sequence[Path]) -> list[str]:
    """Return the parts of the folders' names that differ."""
    if len(runs) == 1:
        return [printable(runs[0].name or str(runs[0]))]
    above = os.path.commonpath([os.path.abspath(run) for run in runs])
    return [printable(os.path.relpath(os.path.abspath(run), above)) for run in runs]


def read(folder: Path, name: str) -> ComparedRun:
    """Read a run, which may be damaged or incomplete."""
    data, trouble = read_run(folder), []
    settings: dict[str, Any] = {}
    choices: dict[str, str] = {}
    if is_plain(config_path(data.run)):
        try:
            settings, choices = config.written(folder)
        except CupynetError as error:
            trouble.append(f"damaged: {one_line(error).replace(f'{folder}{os.sep}', '')}")
    summary = {"stages": 1, **dict.fromkeys(OPTIONAL), **data.summary} if data.summary else {}
    wrong = next((text for text in data.damaged if text.startswith(data.run.summary_path.name)), _wrong(summary))
    if wrong:
        trouble.insert(0, f"damaged: {wrong}")
        summary = {}
    elif not summary:
        trouble.insert(0, "still training" if data.running else f"failed: {data.error}" if data.error else "unfinished")
    else:
        known = ("seed", "dtype", "batch_size")
        settings = settings or {
            **{key: summary.get(key) for key in known},
            "parallel.averaging_frequency": summary.get("averaging_frequency"),
        }
        settings = {**settings, "workers": summary["workers"]}
        if summary.get("stop_reason") in ("signal", "request", "diverged"):
            trouble.append(f"stopped: {one_line(summary.get('stopped_by'))}")
    return ComparedRun(folder, name, settings, choices, summary, printable("; ".join(trouble)), _epochs(data.epochs))


def _wrong(summary: dict[str, Any]) -> str:
    """Return which value of a summary is missing or invalid; "" if none is."""
    for key, kind in (REQUIRED | OPTIONAL).items() if summary else ():
        value: Any = summary.get(key)
        fits = finite(value) is not None if kind is float else type(value) is kind
        if kind is int and fits:
            fits = 0 <= value < LONGEST
        if key not in summary:
            return f"summary.json: has no {key}"
        if (not fits and (key in REQUIRED or value is not None)) or (key == "workers" and value == 0):
            return f"summary.json: {key}={shown(value)}: is not a value of a run"
    return ""


def _epochs(rows: Sequence[dict[str, Any]]) -> list[Epoch]:
    epochs: list[Epoch] = []
    train_s = 0.0
    for row in rows:
        iteration = finite(row.get("iteration"))
        if iteration is not None:
            train_s += finite(row.get("train_s")) or 0.0
            found = {split: finite(row.get(f"{split}_accuracy")) for split in ("test", "validation")}
            known = {split: value for split, value in found.items() if value is not None}
            epochs.append(Epoch(int(iteration), train_s, known))
    return epochs
