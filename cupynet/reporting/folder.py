"""Read run folders, even if they are incomplete.

Files are untrusted and may have been written by other versions. Values are not validated here. The page omits sections
with invalid values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupynet.config.schema import BenchSettings, PlanSettings, RateSettings, Settings, TuneSettings, own_names
from cupynet.core.checks import finite
from cupynet.core.errors import ConfigError, CupynetError, described, exit_code
from cupynet.core.files import read_object
from cupynet.core.lock import at_work
from cupynet.core.wording import one_line
from cupynet.runs.layout import is_outdated, runs_inside
from cupynet.runs.run import Run

MAX_CHARACTERS = 1 << 20  # maximum number of characters of stored settings to search
NAMES = {name for kind in (BenchSettings, PlanSettings, RateSettings, TuneSettings) for name in own_names(kind)}
OTHER_COMMANDS = re.compile(rf"^({'|'.join(NAMES - {*own_names(Settings)})}):", re.MULTILINE)  # their settings
RECORD = re.compile(r"^\d{4}-\d\d-\d\d \S+ (\w+) [\w.]+: (?:job \d+: )?(.*)$", re.MULTILINE)  # a log line


@dataclass
class RunData:
    """Contents of a run folder."""

    run: Run
    running: bool = False  # True if a process is currently training in the folder
    start: dict[str, Any] = field(default_factory=dict)  # started.json; empty if missing
    summary: dict[str, Any] = field(default_factory=dict)  # summary.json; empty if missing
    rows: list[dict[str, Any]] = field(default_factory=list)  # all rows of history.jsonl
    reports: list[dict[str, Any]] = field(default_factory=list)  # rows of the kind `report`
    epochs: list[dict[str, Any]] = field(default_factory=list)  # rows of the kind `epoch`
    error: str = ""  # the error that ended the run; "" if there was none
    code: int | None = None  # exit code of this error; None if unknown, as in runs of earlier versions
    damaged: list[str] = field(default_factory=list)  # descriptions of unreadable files and sections

    def read(self, path: Path, reader: Callable[[Path], Any]) -> Any:
        """Return `reader(path)`, or None if the file is missing or unreadable. Add unreadable files to `damaged`."""
        try:
            return reader(path) if is_plain(path) else None
        except (CupynetError, OSError) as error:
            self.damaged.append(one_line(error).replace(f"{self.run.folder}{os.sep}", ""))
            return None

    def section(self, build: Callable[[RunData], Any]) -> Any:
        """Return a section of the page, or None if values are invalid. Add invalid sections to `damaged`."""
        try:
            return build(self)
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            name = build.__name__.strip("_").replace("_", " ")
            self.damaged.append(f"{name}: {type(error).__name__}: {one_line(error)}")
            return None

    @property
    def last_iteration(self) -> int:
        last = self.rows[-1].get("iteration") if self.rows else self.get("iterations")
        return int(finite(last) or 0)

    @property
    def outdated(self) -> bool:
        """True if the run was resumed after the summary was written, and has not ended since."""
        return is_outdated(self.run.folder, self.summary, self.last_iteration)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value from the summary, or from started.json if the summary lacks it."""
        value = self.summary.get(name, self.start.get(name))
        return default if value is None else value


def read_run(folder: str | Path, *, over: bool = False, error: Exception | None = None) -> RunData:
    """Read the folder of a run, except weights and images. Raise ConfigError if it is not the folder of a run.

    Args:
        over: True if the run has ended, even if its process still holds the lock.
        error: the error that ended the run, if it has not been stored yet.
    """
    run = Run(folder)
    has_results = any(map(is_plain, (run.summary_path, run.started_path, run.history_path)))
    if not has_results and (not is_plain(run.settings_path) or is_other_command(run)):
        reason = f"{folder} is not the folder of a run. Choose one under outputs/"
        raise ConfigError(runs_inside(run.folder) or reason)
    data = RunData(run, running=not over and at_work(run.folder))
    data.start = data.read(run.started_path, read_object) or {}
    data.summary = data.read(run.summary_path, read_object) or {}
    data.rows = data.read(run.history_path, lambda _: run.history()) or []
    data.reports = [row for row in data.rows if row.get("kind") == "report"]
    data.epochs = [row for row in data.rows if row.get("kind") == "epoch"]
    if error is None:
        failed = data.read(run.failed_path, read_object) or {}
        logged = data.read(run.folder / "train.log", _last_error) or ""  # trials of a search have no own log
        data.error, data.code = str(failed.get("error", logged)), failed.get("exit_code")
    else:
        data.error, data.code = described(error), exit_code(error)
    return data


def is_other_command(run: Run) -> bool:
    """Return True for the folder of another command (tune, bench, plan or find_rate)."""
    try:
        with run.settings_path.open(encoding="utf-8", errors="replace") as file:
            return OTHER_COMMANDS.search(file.read(MAX_CHARACTERS)) is not None
    except OSError:
        return False


def is_plain(path: Path) -> bool:
    """Return True for a regular file. Links could lead out of the folder, and reading a pipe could block."""
    return os.path.isfile(path) and not os.path.islink(path)  # isfile returns False for invalid names


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _last_error(path: Path) -> str:
    """Return the error in the last record of a log, or "" if this record is not an error."""
    *_, (level, text) = [("", ""), *RECORD.findall(read_text(path))]
    return text if level == "ERROR" else ""
