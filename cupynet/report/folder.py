"""What a run's folder holds, for whoever shows it: a run that is over, goes on or was killed, whole or in parts.

Everything may have been written by anybody, or by another version: each file counts where it can be read, and of it
each value that is what it should be. What is missing is None or empty; `damaged` says which files could not be read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cupynet.checks import one_line
from cupynet.errors import ConfigError, CupynetError, DataError
from cupynet.files import load_weights
from cupynet.lock import at_work
from cupynet.runs import Run

MOST_TEXT = 1 << 20  # characters of a file of text that are read
MOST_WEIGHTS = 64 << 20  # bytes of a file of weights that is read to show a picture of some
MOST_ROWS = 10_000  # of a history, about: 25 to each point of a chart
REPORT = b'{"kind": "report"'  # how the row of one begins
T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """A run as its folder shows it.

    Attributes:
        run: the folder.
        running: whether a process is at work there now. checkpoints: whether it has some.
        start: started.json, summary: summary.json; empty where there is none.
        reports, epochs: the rows of history.jsonl.
        filters: the weights of the first convolution, (K_h, K_w, C, O), and its name.
        examples: (M, H, W, C) uint8, the images of the mistakes in the summary.
        overrides: the settings of its command line; None where they cannot be told. config_dir: that of --config-dir.
        config: the text of its configuration. errors: lines of its log that are errors, warnings: those that are.
        damaged: what could not be read, and why.
    """

    run: Run
    running: bool
    checkpoints: bool = False
    start: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    filters: tuple[str, Any] | None = None
    examples: Any = None
    overrides: list[str] | None = None
    config_dir: str | None = None
    config: str = ""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def text(self, name: str) -> str | None:
        """A value of the summary, else of the start, if it is a text."""
        value = self.summary.get(name, self.start.get(name))
        return value if isinstance(value, str) else None

    def number(self, name: str) -> float | None:
        """A value of the summary, else of the start, if it is a finite number."""
        return finite(self.summary.get(name, self.start.get(name)))

    def strings(self, name: str) -> list[str]:
        """A value of the summary, else of the start, if it is a list of texts."""
        return texts(self.summary.get(name, self.start.get(name)))

    def mapping(self, name: str) -> dict[str, Any]:
        """A value of the summary, else of the start, if it is a dictionary."""
        return mapping(self.summary.get(name, self.start.get(name)))


def look(folder: str | Path, *, over: bool = False) -> Seen:
    """What is in a run's folder. over: the run is known to be over, whatever its process still has in hand there.

    Raises:
        ConfigError: this is not the folder of a run.
    """
    run, damaged = Run(folder), []

    def read(path: Path, how: Callable[[Path], T]) -> T | None:
        try:
            return how(path) if path.is_file() and not path.is_symlink() else None
        except (CupynetError, OSError, ValueError, RecursionError) as error:
            damaged.append(f"{path.name}: {one_line(error)}")
            return None

    known = (run.summary_path, run.started_path, run.history_path, run.folder / ".hydra" / "config.yaml")
    if not any(path.is_file() for path in known):
        raise ConfigError(f"{folder}: is not the folder of a run: name one under outputs/")
    start, summary = read(run.started_path, _object) or {}, read(run.summary_path, _object) or {}
    rows = read(run.history_path, _rows) or []
    log = read(run.folder / "train.log", _lines) or []
    return Seen(
        run=run,
        running=not over and at_work(run.folder, patient=False),
        checkpoints=any(each.name[5:].isdecimal() for each in run.checkpoints_path.glob("step-*")),
        start=start,
        summary=summary,
        reports=[row for row in rows if row.get("kind") == "report"],
        epochs=[row for row in rows if row.get("kind") == "epoch"],
        filters=read(run.weights_path, lambda path: _filters(path, start)),
        examples=read(run.examples_path, _examples),
        overrides=_overrides(run.folder, start),
        config_dir=start.get("config_dir") if isinstance(start.get("config_dir"), str) else None,
        config=read(run.folder / ".hydra" / "config.yaml", _text) or "",
        errors=[line.partition(" ERROR ")[2] for line in log if " ERROR " in line],
        warnings=[line.partition(" WARNING ")[2] for line in log if " WARNING " in line],
        damaged=damaged,
    )


def finite(value: Any) -> float | None:
    """`value` if it is a number, and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(value: Any) -> list[float]:
    """`value` if it is a list of finite numbers, else nothing."""
    found = [finite(each) for each in value] if isinstance(value, list) else []
    return [each for each in found if each is not None] if None not in found else []


def texts(value: Any) -> list[str]:
    """`value` if it is a list of texts, else nothing."""
    return value if isinstance(value, list) and all(isinstance(each, str) for each in value) else []


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(MOST_TEXT)


def _lines(path: Path) -> list[str]:
    """A log from where its run was gone on with last, if it was."""
    with path.open("rb") as file:
        content = file.read(MOST_TEXT // 2)
        rest = max(0, os.fstat(file.fileno()).st_size - len(content))
        if rest > MOST_TEXT // 2:  # what it began and what it ended with
            content += b"\n"
            file.seek(-MOST_TEXT // 2, os.SEEK_END)
        content += file.read(MOST_TEXT // 2)
    lines = content.decode("utf-8", "replace").splitlines()
    begins = [number for number, line in enumerate(lines) if " going on after iteration " in line]
    return lines[begins[-1] :] if begins else lines


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise DataError(f"expected an object, found {type(found).__name__}")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows as far as they are whole: the last of a run that goes on may be half-written.

    Where they are very many, all epochs and some of the reports: more would take hundreds of megabytes beside the run.
    """
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        step = 1 + sum(1 for _ in file) // MOST_ROWS
        file.seek(0)
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            if number % step and line.startswith(REPORT):
                continue
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _filters(path: Path, start: dict[str, Any]) -> tuple[str, Any] | None:
    """The first weight that is a convolution's: in the order of the layers where it is known, else of the names."""
    if path.stat().st_size > MOST_WEIGHTS:
        return None
    weights = load_weights(path)
    layers = start.get("layers")
    names = [str(mapping(layer).get("layer", "")) for layer in layers] if isinstance(layers, list) else []
    place = {name: index for index, name in enumerate(names) if not name.startswith(" ")}  # the others are in these
    found = [name for name, array in weights.items() if getattr(array, "ndim", 0) == 4]
    found.sort(key=lambda name: (place.get(name.rpartition(".")[0].split(".")[0], len(place)), name))
    return (found[0], weights[found[0]]) if found else None


def _examples(path: Path) -> Any:
    if path.stat().st_size > MOST_WEIGHTS:
        raise DataError(f"expected at most {MOST_WEIGHTS:,} bytes")
    images = load_weights(path).get("images")
    if images is None or images.ndim != 4 or images.dtype.str != "|u1" or 0 in images.shape:
        raise DataError("expected images (M, H, W, C) of bytes")
    return images


def _overrides(folder: Path, start: dict[str, Any]) -> list[str] | None:
    """The settings of the command line, which an old run has in Hydra's file alone."""
    if "overrides" in start:
        return texts(start["overrides"]) if isinstance(start["overrides"], list) else None
    try:
        from cupynet.config import overrides_of  # brings Hydra

        return overrides_of(folder)
    except (CupynetError, OSError):
        return None
