"""What happens beside training: a callback is told of events; `History` writes them down."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from cupynet.core.errors import ConfigError, OutputError
from cupynet.runs.run import Run
from cupynet.training.evaluation import FEW_CLASSES
from cupynet.training.events import EpochRecord, Report, TrainerView


class Callback:
    """Told of events on rank 0; on every worker where `every_rank` is True, each worker then having one of its own.

    Rank 0 uses the object it was given, the others use copies made before `start`. Each event does nothing by default.
    With `needs_validation` True a fit is refused that evaluates nothing, or the test images, epoch by epoch. With
    `last` True it is told of each event after the others.
    """

    every_rank = False
    last = False
    needs_validation = False

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        """Once for each trainer, when it is made. run: where files belong; None where nothing is written."""

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Before the first iteration of a `fit`."""

    def on_iteration_end(self, trainer: TrainerView) -> None:
        """After each round: this replica's update, the average if there was one, the report if one was due."""

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        """Every `report_every` iterations."""

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        """After a complete epoch and its evaluation; not after one that a stop broke off."""

    def on_stop(self, trainer: TrainerView) -> None:
        """A stop ends a fit early: after its last round, before the average that it ends with."""

    def before_finish(self, trainer: TrainerView) -> None:
        """After the last round of a fit, before its last average and evaluation.

        A place to change weights, see `TrainerView`: each replica's own, which may differ, and are averaged then; an
        outer step follows where it follows every average.
        """

    def after_finish(self, trainer: TrainerView) -> None:
        """After the last average of a fit and the end of its last epoch, where a stop ended it early too.

        The other place to change weights, on every worker alike: those of the result, which no average and no outer
        step moves any more. Where they were changed, they are evaluated again.
        """

    def on_fit_end(self, trainer: TrainerView) -> None:
        """After all that, where a stop ended training early too; not after an error."""

    def on_diverged(self, trainer: TrainerView, text: str) -> None:
        """After a fit that a number ended which is not finite, on whatever worker; text: what was told of it.

        The last place to change weights: all workers have left the fit, and nothing can be exchanged any more.
        """

    def close(self) -> None:
        """Let go of what is held; after an error too, even one in `start`."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on exactly: numbers, and arrays on the host, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, before the next `fit`, which goes on with the same."""


class History(Callback):
    """Appends to `history.jsonl`: one JSON object per report and per epoch, each line flushed before training goes on.

    Args:
        path: of the file; that of the run by default.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = None if path is None else Path(path)
        self.path = self._given
        self._file: TextIO | None = None

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        path = self._given
        if path is None and run is not None:
            path = run.history_path
        if path is None:
            raise ConfigError("History needs a path where there is no run folder: History('history.jsonl')")
        self.path = path
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        self._write(report_row(report))

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self._write(epoch_row(record))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state(self) -> dict[str, Any]:
        return {"bytes": 0 if self._file is None else os.fstat(self._file.fileno()).st_size}

    def restore(self, state: dict[str, Any]) -> None:
        """Rows that were written after the state was taken are cut off: they are going to be written again."""
        if self._file is not None:
            self._file.truncate(min(int(state["bytes"]), os.fstat(self._file.fileno()).st_size))
            self._file.seek(0, os.SEEK_END)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror})") from error


def report_row(report: Report) -> dict[str, Any]:
    """A report as a row of a history: by name, what is no finite number is None."""
    row: dict[str, Any] = _finite({"kind": "report", **asdict(report)})
    return row


def epoch_row(record: EpochRecord) -> dict[str, Any]:
    """The end of an epoch as a row of a history. `confusion`, rows the actual class, is there for few classes alone."""
    row: dict[str, Any] = {"kind": "epoch", "epoch": record.epoch, "iteration": record.iteration}
    row |= {name: getattr(record, name) for name in ("loss", "losses", "learning_rate", "images_per_s")}
    row |= {"samples": record.samples, "train_s": record.train_s, "bytes_sent": record.bytes_sent}
    row |= {name: getattr(record.spent, name) for name in ("compute_s", "data_s", "averaging_s", "waiting_s")}
    if record.evaluation is not None:
        split = record.split
        row |= {f"{split}_accuracy": record.evaluation.accuracy, f"{split}_loss": record.evaluation.loss}
        if record.evaluation.classes <= FEW_CLASSES:
            row["confusion"] = record.evaluation.confusion.tolist()
    finite: dict[str, Any] = _finite(row)
    return finite


class Rows(Callback):
    """The history of this wrapper, kept in memory.

    Attributes:
        kept: rows as `History` writes them.
    """

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        self.kept.append(report_row(report))

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self.kept.append(epoch_row(record))


def _finite(value: Any) -> Any:
    """`value` for JSON: what is not a finite number is None there, in dictionaries and lists too."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
