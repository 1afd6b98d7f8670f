"""Reads the folder of a run: finished, still training or killed, whole or in part.

Its files are untrusted and may be of another version. A file that can be read is used; its values are not checked here.
The page leaves out sections whose values are invalid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupynet.config.schema import BenchSettings, PlanSettings, RateSettings, Settings, TuneSettings, own_names
from cupynet.core.errors import ConfigError, CupynetError, described, exit_code
from cupynet.core.files import read_object
from cupynet.core.lock import at_work
from cupynet.core.wording import one_line
from cupynet.runs.run import Run

MOST_CHARACTERS = 1 << 20  # of the stored settings that are searched
OF_OTHERS = {name for kind in (BenchSettings, PlanSettings, RateSettings, TuneSettings) for name in own_names(kind)}
OTHER_COMMANDS = re.compile(rf"^({'|'.join(OF_OTHERS - {*own_names(Settings)})}):", re.MULTILINE)
RECORD = re.compile(r"^\d{4}-\d\d-\d\d \S+ (\w+) [\w.]+: (?:job \d+: )?(.*)$", re.MULTILINE)  # of a log


@dataclass
class RunData:
    """The contents of a run's folder.

    Attributes:
        run: the folder.
        running: True if a process is training in it now.
        start: started.json; empty if there is none.
        summary: summary.json; empty if there is none.
        rows: the rows of history.jsonl.
        reports, epochs: the rows of each kind.
        error: the error that ended the run, or "".
        code: the exit code of that error; None if it was not stored, as in runs of earlier versions.
        damaged: the files that could not be read, and why.
    """

    run: Run
    running: bool = False
    start: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    code: int | None = None
    damaged: list[str] = field(default_factory=list)

    def read(self, path: Path, how: Callable[[Path], Any]) -> Any:
        """Read a file; None if there is none. A file that cannot be read is added to `damaged`."""
        try:
            return how(path) if is_plain(path) else None
        except (CupynetError, OSError) as error:
            self.damaged.append(one_line(error).replace(f"{self.run.folder}{os.sep}", ""))
            return None

    def section(self, build: Callable[[RunData], Any]) -> Any:
        """Build a part of the page; None if it fails because of invalid values."""
        try:
            return build(self)
        except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            name = build.__name__.strip("_").replace("_", " ")
            self.damaged.append(f"{name}: {type(error).__name__}: {one_line(error)}")
            return None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value of the summary, or of the start if the summary does not have it."""
        found = self.summary.get(name, self.start.get(name))
        return default if found is None else found


def read_run(folder: str | Path, *, over: bool = False, error: Exception | None = None) -> RunData:
    """Read the folder of a run, except weights and pictures.

    Args:
        folder: the folder of the run.
        over: True if the run has ended, even if its process still locks the folder.
        error: the error that ended the run, if its exit code is not stored yet.

    Raises:
        ConfigError: `folder` is not the folder of a run.
    """
    run = Run(folder)
    found = any(map(is_plain, (run.summary_path, run.started_path, run.history_path)))
    if not found and (not is_plain(run.settings_path) or is_other_command(run)):
        raise ConfigError(f"{folder}: is not the folder of a run: name one under outputs/")
    data = RunData(run, running=not over and at_work(run.folder))
    data.start = data.read(run.started_path, read_object) or {}
    data.summary = data.read(run.summary_path, read_object) or {}
    data.rows = data.read(run.history_path, lambda _: run.history()) or []
    data.reports = [row for row in data.rows if row.get("kind") == "report"]
    data.epochs = [row for row in data.rows if row.get("kind") == "epoch"]
    if error is None:
        data.error = data.read(run.folder / "train.log", _last_error) or ""
        data.code = (data.read(run.failed_path, read_object) or {}).get("exit_code")
    else:
        data.error, data.code = described(error), exit_code(error)
    return data


def is_other_command(run: Run) -> bool:
    """Return True for the folder of a search, a benchmark, a forecast or a test of learning rates."""
    try:
        with run.settings_path.open(encoding="utf-8", errors="replace") as file:
            return OTHER_COMMANDS.search(file.read(MOST_CHARACTERS)) is not None
    except OSError:
        return False


def is_plain(path: Path) -> bool:
    """Return True for a regular file. Reading a pipe or device may never end; a link may leave the folder."""
    return os.path.isfile(path) and not os.path.islink(path)  # False for invalid names


def read_text(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text(encoding="utf-8", errors="replace")


def _last_error(path: Path) -> str:
    """Return the error at the end of a log; "" if the last record is not one, as when the run was resumed or killed."""
    *_, (level, text) = [("", ""), *RECORD.findall(read_text(path))]
    return text if level == "ERROR" else ""
