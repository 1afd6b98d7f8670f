"""What happens beside training: a callback is told of events; `History` writes them down."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from cupynet.errors import ConfigError, OutputError
from cupynet.runs import Run
from cupynet.training.records import EpochRecord, Report, TrainerView


class Callback:
    """Told of events on rank 0; on every worker where `every_rank` is True, each worker then having one of its own.

    Rank 0 uses the object it was given, the others use copies made before `start`. Each event does nothing by default.
    """

    every_rank = False

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

    def before_finish(self, trainer: TrainerView) -> None:
        """After the last round of a fit, before its last average and evaluation.

        The only place to change weights, see `TrainerView`.
        """

    def on_fit_end(self, trainer: TrainerView) -> None:
        """After the last average, where a stop ended training early too; not after an error."""

    def close(self) -> None:
        """Let go of what is held; after an error too, even one in `start`."""


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
        self._write({"kind": "report", **asdict(report)})

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        row: dict[str, Any] = {"kind": "epoch", "epoch": record.epoch, "iteration": record.iteration}
        row |= {"samples": record.samples, "train_s": record.train_s}
        if record.evaluation is not None:
            split = record.split
            row |= {f"{split}_accuracy": record.evaluation.accuracy, f"{split}_loss": record.evaluation.loss}
        self._write(row)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        finite = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        try:
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror})") from error
