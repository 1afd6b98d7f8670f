from __future__ import annotations

import json
import math
import os
import uuid
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from cupynet.core.errors import ConfigError, OutputError
from cupynet.core.files import for_json
from cupynet.runs.history import present
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.evaluation import FEW_CLASSES
from cupynet.training.events import EpochRecord, IterationRecord
from cupynet.training.trainer import Trainer

EPOCH = (
    *("epoch", "iteration", "loss", "losses", "accuracy", "learning_rate", "images_per_s", "drift", "drift_by_layer"),
    *("samples", "train_s", "bytes_sent"),
)
ROW = b'{"kind"'  # the beginning of every row


class HistoryWriter(Callback):
    """Appends a JSON object for each report and each epoch to a file.

    A file belongs to one run. A file with other content is refused when training starts, or when a checkpoint of
    another run is restored. However, in the run folder of a `ParallelWrapper`, a new run replaces the history of one
    that left neither a model nor a checkpoint.

    path: the file; by default `history.jsonl` in the run folder or, without a run, in the current folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._kept: int | None = None  # after `restore`: bytes of the file that the next fit keeps
        self._owns = False  # True if the file contains rows of this run only

    @property
    def in_use(self) -> bool:
        return "_file" in vars(self)

    def check_path(self) -> None:
        if self._path is not None:
            _open(self._path).close()

    def check_new(self) -> None:
        if self._path is not None and self._path.is_file() and self._path.stat().st_size:
            raise _taken(self._path)

    def start(self, trainer: Trainer, run: Run | None) -> None:
        path = self._path or (Path("history.jsonl") if run is None else run.history_path)
        in_python = run is not None and run.settings is None
        self._replaces = self._path is None and in_python and not path.is_symlink()
        self._file, self._owns = _open(path), False

    def on_fit_start(self, trainer: Trainer) -> None:
        content = self._content()
        if self._kept is not None:
            self._file.truncate(len(content[: self._kept]))
            self._file.seek(0, os.SEEK_END)
            self._kept = None
        elif content and not self._owns:
            if not (self._replaces and content.startswith(ROW)):
                raise _taken(self._file.name)
            self._file.truncate(0)
        self._owns = True

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        self._write(iteration_row(record))

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self._write(epoch_row(record))

    def close(self) -> None:
        if self.in_use:
            self._file.close()
            del self._file  # file objects cannot be copied

    def state(self) -> dict[str, Any]:
        content = self._content()[: self._kept]
        return {"bytes": len(content), "crc": zlib.crc32(content)}

    def restore(self, state: dict[str, Any]) -> None:
        """Check that the file belongs to this run. The next fit removes the rows written after the state was saved."""
        size = int(state["bytes"])
        if size < 0:
            raise ValueError(f"bytes={size}")
        content, crc = self._content(), state.get("crc")  # earlier versions saved no checksum
        other = crc is not None and len(content) >= size and zlib.crc32(content[:size]) != int(crc)
        if other or (content and not content.startswith(ROW)):
            raise _taken(self._file.name)
        self._kept = size

    def _content(self) -> bytes:
        descriptor = self._file.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def _write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self._file.name}: cannot be written ({error.strerror})") from error


def _taken(path: str | Path) -> ConfigError:
    return ConfigError("contains the history of another run. Remove it, or choose another file", "path", str(path))


def _open(path: Path) -> TextIO:
    if os.path.exists(path) and not os.path.isfile(path):  # both are False for invalid names
        raise OutputError(f"{path}: must be a regular file")
    try:
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error


def iteration_row(record: IterationRecord) -> dict[str, Any]:
    return for_json({"kind": "report", **asdict(record)})  # type: ignore[no-any-return]


def epoch_row(record: EpochRecord) -> dict[str, Any]:
    """Convert an epoch record to a row of the history, with the confusion matrix if there are few classes."""
    row: dict[str, Any] = {"kind": "epoch"} | {name: getattr(record, name) for name in EPOCH}
    if math.isnan(record.accuracy):  # no accuracy in regression
        del row["accuracy"]
    row |= {name: getattr(record.spent, name) for name in ("compute_s", "data_s", "averaging_s", "waiting_s")}
    if record.evaluation is not None:
        figures = record.evaluation.figures(record.evaluation.SHOWN)
        row |= {f"{record.split}_{name}": value for name, value in figures.items()}
        if 0 < record.evaluation.classes <= FEW_CLASSES:
            row["confusion"] = record.evaluation.confusion.tolist()
    return for_json(row)  # type: ignore[no-any-return]


class Rows(Callback):
    """Keeps the rows of `HistoryWriter` in memory and in checkpoints, for `ParallelWrapper.history`.

    Attributes:
        identity: identifies the training run, also after its checkpoints are restored (see `Run.claim`).
    """

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.identity = uuid.uuid4().hex

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        self.kept.append(iteration_row(record))

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self.kept.append(epoch_row(record))

    def state(self) -> dict[str, Any]:
        return {"rows": json.dumps(self.kept), "identity": self.identity}

    def restore(self, state: dict[str, Any]) -> None:
        # earlier versions saved neither
        self.kept = [present(row) for row in json.loads(state.get("rows", "[]"))]
        self.identity = str(state.get("identity", ""))
