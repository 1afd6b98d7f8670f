"""Find runs in folders and read their settings and results.

Files are untrusted. Their contents are never instantiated or executed, and a damaged file affects only its own run.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cupynet import config
from cupynet.config.equal_settings import ALONE, SYNCHRONIZER
from cupynet.config.overrides import name_of
from cupynet.core.checks import finite
from cupynet.core.errors import ConfigError, CupynetError
from cupynet.core.terminal import printable
from cupynet.core.wording import one_line
from cupynet.reporting.folder import RunData, is_other_command, is_plain, read_run
from cupynet.runs.run import PRUNED, Run

UNRESOLVED = (("workers", None), ("backend.name", "auto"))  # settings whose values are chosen when the run begins


class Epoch(NamedTuple):
    iteration: float
    train_s: float  # cumulative training time in seconds, excluding evaluations
    accuracy: dict[str, float | None]  # by split, `test` and `validation`; None if not evaluated


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare."""

    folder: Path
    name: str  # path relative to the common parent of all runs
    settings: dict[str, Any]  # settings with an effect, by dotted key
    choices: dict[str, str]  # chosen file of each configuration group with an effect
    unused: frozenset[str]  # keys of settings without effect
    typed: dict[str, str]  # values on the command line, by key; empty for runs in Python
    summary: dict[str, Any]  # fields of `Summary`; empty if there are no results
    trouble: str  # why there is no valid result, or ""
    epochs: list[Epoch]

    def lacks(self, key: str) -> bool:
        """Return True if a setting or group is unknown or has no effect in this run, so that it is not compared."""
        if key in config.GROUPS:
            return key not in self.choices
        idle = key in self.unused or (self.alone and key.startswith(ALONE))
        return idle or (bool(self.trouble) and key not in self.settings)

    @property
    def alone(self) -> bool:
        """True if the run has a single replica and a synchronizer of this package, which then does nothing."""
        return SYNCHRONIZER in self.unused

    def time_to(self, accuracy: float, split: str) -> float | None:
        """Return the training time in seconds until an evaluation reached `accuracy`, or None if none did."""
        return next((epoch.train_s for epoch in self.epochs if (epoch.accuracy[split] or 0.0) >= accuracy), None)


def find(paths: Sequence[str]) -> list[ComparedRun]:
    """Read the runs in folders, each run once. Raise ConfigError if a path contains no run.

    Paths may be folders of runs or sweeps, parent folders of these, or glob patterns.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        matches = [path] if os.path.isdir(path) else sorted(glob.glob(path), key=natural)
        runs = [run for match in matches for run in _runs(match)]
        if not runs:
            raise ConfigError(f"{path}: contains no run. Choose the folder of a run or sweep, such as outputs/latest")
        for run in runs:
            folders.setdefault(run.resolve(), run)
    absolute = [Path(os.path.abspath(run)) for run in folders.values()]
    common = absolute[0].parent if len(absolute) == 1 else os.path.commonpath(absolute)
    names = [printable(os.path.relpath(run, common)) for run in absolute]
    return [read(run, name) for run, name in zip(folders.values(), names, strict=True)]


def natural(text: str) -> list[Any]:
    """Return a sort key in which numbers compare by value, so that job 10 comes after job 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def is_run(folder: Path) -> bool:
    """Return True for the folder of a run. Other commands store settings too, but no summary."""
    run = Run(folder)
    return is_plain(run.summary_path) or (is_plain(run.settings_path) and not is_other_command(run))


def _runs(folder: str) -> Iterator[Path]:
    for path, subfolders, _ in os.walk(folder):
        subfolders[:] = sorted((name for name in subfolders if not name.startswith(".")), key=natural)
        if is_run(Path(path)):
            subfolders.clear()
            yield Path(path)


def read(folder: Path, name: str) -> ComparedRun:
    """Read a run, even if it is damaged or incomplete."""
    data, trouble = read_run(folder), ""
    settings: dict[str, Any] = {}
    choices: dict[str, str] = {}
    summary: dict[str, Any] = {}
    unused: frozenset[str] = frozenset()
    try:
        if is_plain(data.run.settings_path):
            settings, choices = config.stored_settings(folder)
        if is_plain(data.run.summary_path):
            summary = data.run.summary().flat()
        settings, choices, unused = _in_effect(settings, choices, summary or data.start)
    except CupynetError as error:
        trouble = f"damaged: {one_line(error).replace(f'{folder}{os.sep}', '')}"
    trouble = printable(trouble or _trouble(data, settings, summary))
    return ComparedRun(folder, name, settings, choices, unused, _typed(folder), summary, trouble, _epochs(data.epochs))


def _typed(folder: Path) -> dict[str, str]:
    try:
        overrides = [each for each in config.overrides_of(folder) if "=" in each]
    except CupynetError:  # a damaged file
        return {}
    return {name_of(each): each.partition("=")[2] for each in overrides}


def _in_effect(
    settings: dict[str, Any], choices: dict[str, str], setup: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str], frozenset[str]]:
    """Return the settings and chosen files that have an effect in a run, and the keys of all other settings.

    These depend on the actual `workers` and `backend` in `setup`. Before a run begins, `setup` is empty, and all
    settings except `UNRESOLVED` are returned.
    """
    workers, backend = setup.get("workers"), setup.get("backend")
    if not isinstance(workers, int) or not isinstance(backend, str):
        set_here = {key: value for key, value in settings.items() if (key, value) not in UNRESOLVED}
        return set_here, {name: choice for name, choice in choices.items() if name != "backend"}, frozenset()
    choices = {name: backend if name == "backend" else choice for name, choice in choices.items()}
    if config.is_alone(settings, workers):
        choices.pop("parallel", None)
    effective = config.effective(settings, workers, backend)
    return effective, choices, frozenset(settings.keys() - effective.keys())


def _trouble(data: RunData, settings: dict[str, Any], summary: dict[str, Any]) -> str:
    if not summary:
        return "still training" if data.running else f"failed: {data.error}" if data.error else "unfinished"
    if data.outdated:
        return "still training" if data.running else "unfinished: the results predate the resume"
    if summary["stop_reason"] in ("signal", "request", "diverged") or str(summary["stopped_by"]).startswith(PRUNED):
        return f"stopped: {one_line(summary['stopped_by'])}"
    return "a smoke test (fast_dev_run) without meaningful results" if settings.get("fast_dev_run") else ""


def _epochs(rows: Sequence[dict[str, Any]]) -> list[Epoch]:
    epochs: list[Epoch] = []
    train_s = 0.0
    for row in rows:
        train_s += finite(row.get("train_s")) or 0.0
        accuracy = {split: finite(row.get(f"{split}_accuracy")) for split in ("test", "validation")}
        epochs.append(Epoch(finite(row.get("iteration")) or 0.0, train_s, accuracy))
    return epochs
