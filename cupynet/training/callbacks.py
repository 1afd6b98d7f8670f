"""What happens beside training: a callback is told of events and never changes them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cupynet.errors import OutputError

if TYPE_CHECKING:
    from cupynet.training.metrics import Evaluation
    from cupynet.training.trainer import Trainer


@dataclass(frozen=True)
class Report:
    """How training went since the last report.

    Attributes:
        iteration, epoch: updates of this replica so far; complete epochs so far.
        learning_rate: of the last iteration.
        loss: mean over this replica's samples since the last report.
        score_after_averaging: mean over all replicas' samples between the last two averages; NaN if there was none.
        images_per_s: of all replicas together.
        compute_s, data_s, averaging_s: this worker's seconds in steps, waiting for batches, and in averages.
        divergence: the largest relative distance of a replica from the mean at an average; NaN if there was none.
    """

    iteration: int
    epoch: int
    learning_rate: float
    loss: float
    score_after_averaging: float
    images_per_s: float
    compute_s: float
    data_s: float
    averaging_s: float
    divergence: float


@dataclass(frozen=True)
class EpochRecord:
    """The end of an epoch.

    Attributes:
        epoch: complete epochs so far.
        iteration: updates of this replica so far.
        samples: (S,) how many samples all replicas trained on in this epoch.
        train_s: seconds of its rounds, evaluation excluded.
        split: `test` or `validation`, what the evaluation was made on.
        evaluation: None where this epoch was not evaluated.
    """

    epoch: int
    iteration: int
    samples: int
    train_s: float
    split: str
    evaluation: Evaluation | None


class Callback:
    """Told of events on rank 0, once per round; on every worker where `every_rank` is True. Each event does nothing by
    default.
    """

    every_rank = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first iteration of `fit`."""

    def on_iteration_end(self, trainer: Trainer) -> None:
        """After each round: this replica's update, and the average if there was one."""

    def on_report(self, trainer: Trainer, report: Report) -> None:
        """Every `report_every` iterations, after `on_iteration_end`."""

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        """After a complete epoch and its evaluation; not after one that a signal broke off."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last average, also where a signal ended training early; not after an error."""

    def close(self) -> None:
        """Let go of what is held; after an error too."""


class History(Callback):
    """Writes `history.jsonl`: one JSON object per report and per epoch, each line on disk before training goes on.

    Args:
        path: of the file; what it holds is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        try:
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror})") from error

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._write({"kind": "report", **asdict(report)})

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        row: dict[str, Any] = {"kind": "epoch", "epoch": record.epoch, "iteration": record.iteration}
        row |= {"samples": record.samples, "train_s": record.train_s}
        if record.evaluation is not None:
            split = record.split
            row |= {f"{split}_accuracy": record.evaluation.accuracy, f"{split}_loss": record.evaluation.loss}
        self._write(row)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.close()

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
