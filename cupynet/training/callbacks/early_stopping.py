"""Early stopping: end a fit that no longer improves, and restore its best weights.

Epochs are judged by evaluations on validation images, whose result all workers know. Each worker keeps its own weights
at moments when all replicas are identical; a stage of a pipeline keeps its part.

See Prechelt, "Early stopping - but when?" (1998); the conditions are those of Deeplearning4j's
EarlyStoppingConfiguration.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.core.checks import counted, flag, integer, number, one_of
from cupynet.training.callbacks.base import Callback
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import EpochRecord, Report, Stop, StopReason
from cupynet.training.trainer_view import TrainerView

log = logging.getLogger(__name__)

DIRECTIONS = {  # of the figures that can be monitored
    "loss": "min",
    "accuracy": "max",
    "top_n_accuracy": "max",
    "precision": "max",
    "recall": "max",
    "f1": "max",
}
CONDITIONS = ("patience", "best_score", "max_epochs", "max_time_s", "max_score", "invalid_score")


@dataclass(frozen=True)
class EarlyStoppingResult:
    """The result of early stopping in one fit.

    Attributes:
        reason: the condition that ended the fit (`patience`, `best_score`, `max_epochs`, `max_time_s`, `max_score`,
            `invalid_score`); `epochs` if all epochs are complete; `stopped` by `stop` or a signal; `diverged` if a loss
            or a weight was not finite.
        details: the same in words.
        monitor: the monitored figure.
        scores: its value by evaluated epoch, counted from 1 over the whole training.
        best_epoch, best_score: of the best weights; None if no epoch had a finite score.
        epochs: complete epochs of this fit.
        restored: whether the model holds the best weights now.
    """

    reason: str
    details: str
    monitor: str
    scores: dict[int, float]
    best_epoch: int | None
    best_score: float | None
    epochs: int
    restored: bool

    def __str__(self) -> str:
        if self.best_epoch is None:
            return f"{self.details}; no epoch has a finite score"
        restored = "restored" if self.restored else "not restored"
        return f"{self.details}; best {self.monitor} {self.best_score:.4g} after epoch {self.best_epoch}, {restored}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; a score that is not finite becomes None."""
        scores = {str(epoch): score if math.isfinite(score) else None for epoch, score in self.scores.items()}
        return {**asdict(self), "scores": scores}


class EarlyStopping(Callback):
    """Ends a fit by conditions on an evaluated figure, the time or the loss; then restores the best weights.

    Any condition that is met ends the fit, on all workers after the same round. Each `fit` is judged by itself, unless
    `restore` was called before it. After a DivergedError the model is given the best weights too. The optimizer's state
    is not restored.

    Args:
        monitor: `loss`, `accuracy`, `top_n_accuracy`, `precision`, `recall` or `f1` of the validation images.
        direction: `min` or `max`, what is better; `auto`: min for the loss, max for the others.
        patience: end after this many evaluations in a row without improvement; None for never.
        min_improvement: an improvement must be larger than this.
        best_score: end once the figure is this good; None for never.
        max_epochs: end after this many complete epochs of the fit; None for no limit.
        max_time_s: end after this many seconds of the fit, evaluations included; None for no limit.
        max_score: end if the training loss of a report is above this: the score of the last average, or of any one
            replica if there is none; None for no limit.
        invalid_score: end if the figure is NaN or infinite. Such a figure is never the best.
        restore_best: give the model the best weights at the end of the fit.
        restore_when_stopped: also after `stop` or a signal. Not by default: an interrupted fit can be continued only
            with the weights that it had.

    Attributes:
        result: of the last fit; None before its end, and after an error other than DivergedError.

    Raises:
        ConfigError: an argument is not valid.
    """

    every_rank = True
    needs_validation = True

    def __init__(
        self,
        monitor: str = "loss",
        direction: str = "auto",
        patience: int | None = 5,
        min_improvement: float = 0.0,
        best_score: float | None = None,
        max_epochs: int | None = None,
        max_time_s: float | None = None,
        max_score: float | None = None,
        invalid_score: bool = True,
        restore_best: bool = True,
        restore_when_stopped: bool = False,
    ) -> None:
        self.monitor = one_of("monitor", monitor, DIRECTIONS)
        direction = one_of("direction", direction, ("auto", "min", "max"))
        self.direction = DIRECTIONS[monitor] if direction == "auto" else direction
        none = ", or null for none"
        self.patience = None if patience is None else integer("patience", patience, 1, none)
        self.min_improvement = number("min_improvement", min_improvement, minimum=0)
        self.best_score = None if best_score is None else number("best_score", best_score, also=none)
        self.max_epochs = None if max_epochs is None else integer("max_epochs", max_epochs, 1, none)
        self.max_time_s = (
            None if max_time_s is None else number("max_time_s", max_time_s, above=0, unit="seconds", also=none)
        )
        self.max_score = None if max_score is None else number("max_score", max_score, above=0, also=none)
        self.invalid_score = flag("invalid_score", invalid_score)
        self.restore_best = flag("restore_best", restore_best)
        self.restore_when_stopped = flag("restore_when_stopped", restore_when_stopped)
        self.result: EarlyStoppingResult | None = None
        self._continues = False  # the next fit continues a restored one
        self._forget(0)

    def _forget(self, epoch: int) -> None:
        """Begin a fit after `epoch` complete epochs."""
        self.result = None
        self._first = epoch  # complete epochs before this fit
        self._epochs = 0  # of this fit
        self._scores: dict[int, float] = {}
        self._best_epoch = 0  # 0: none yet
        self._best = self._reference = math.nan  # the best score, and the last one that was an improvement
        self._waited = 0  # evaluations since then
        self._weights: dict[str, NDArray[Any]] = {}  # of the best epoch, on the host, by name
        self._whole: dict[str, NDArray[Any]] = {}  # those of the user's model, in a pipeline
        self._met = ""  # the condition that was met, and how
        self._elapsed_s, self._began = 0.0, time.monotonic()  # before this process, and since

    # events ---------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: TrainerView) -> None:
        if self._continues:
            self._continues, self._began = False, time.monotonic()
            if self._met:  # before it was saved: this fit is over
                trainer.stop(self._met, StopReason.EARLY)
        else:
            self._forget(trainer.epoch)

    def on_iteration_end(self, trainer: TrainerView) -> None:
        self._check_time(trainer)

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        loss = report.loss if math.isnan(report.score_after_averaging) else report.score_after_averaging
        if self.max_score is not None and loss > self.max_score:
            self._end(trainer, "max_score", f"the training loss is {loss:.4g}, above {self.max_score:g}", anybody=True)

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self._epochs = record.epoch - self._first
        if record.evaluation is not None:
            self._judge(trainer, record.epoch, record.evaluation)
        if self.max_epochs is not None and self._epochs >= self.max_epochs:
            self._end(trainer, "max_epochs", f"complete epochs: {self._epochs}")
        self._check_time(trainer)

    def after_finish(self, trainer: TrainerView) -> None:
        reason, details = self._reason(trainer.stopped)
        self._conclude(trainer, reason, details, restore=reason != "stopped" or self.restore_when_stopped)

    def on_diverged(self, trainer: TrainerView, text: str) -> None:
        if self._whole:
            trainer.whole.load_weights(self._whole)
        self._conclude(trainer, "diverged", text, restore=True)

    def _conclude(self, trainer: TrainerView, reason: str, details: str, *, restore: bool) -> None:
        """Restore the best weights, if there are any, and log the result."""
        restored = restore and bool(self._weights)
        if restored:
            trainer.model.load_weights(self._weights)
        self.result = EarlyStoppingResult(
            reason,
            details,
            self.monitor,
            dict(self._scores),
            self._best_epoch or None,
            self._best if self._best_epoch else None,
            self._epochs,
            restored,
        )
        if trainer.rank == 0:
            log.info("early stopping: %s", self.result)

    # conditions -----------------------------------------------------------------------------------------------------

    def _judge(self, trainer: TrainerView, epoch: int, evaluation: Evaluation) -> None:
        """Compare an epoch with those before it."""
        score = self._scores[epoch] = float(getattr(evaluation, self.monitor))
        if not math.isfinite(score):
            self._waited += 1
            if self.invalid_score:
                self._end(trainer, "invalid_score", f"the {self.monitor} is {score} after epoch {epoch}")
        else:
            if not self._best_epoch or self._gain(score, self._best) > 0:
                self._best_epoch, self._best = epoch, score
                self._keep(trainer)
            if math.isnan(self._reference) or self._gain(score, self._reference) > self.min_improvement:
                self._reference, self._waited = score, 0
            else:
                self._waited += 1
            if self.best_score is not None and self._gain(score, self.best_score) >= 0:
                self._end(trainer, "best_score", f"the {self.monitor} is {score:.4g} after epoch {epoch}")
        if self.patience is not None and self._waited >= self.patience:
            self._end(trainer, "patience", f"no better {self.monitor} in {counted(self._waited, 'evaluation')}")

    def _gain(self, score: float, other: float) -> float:
        return score - other if self.direction == "max" else other - score

    def _keep(self, trainer: TrainerView) -> None:
        """Copy this worker's weights, as they are evaluated."""
        if self.restore_best:
            self._weights = trainer.model.weights()
            if trainer.rank == 0 and trainer.whole is not trainer.model:  # a worker that diverges can send none
                self._whole = trainer.whole.weights()

    def _check_time(self, trainer: TrainerView) -> None:
        if self.max_time_s is not None and trainer.rank == 0 and self._seconds() >= self.max_time_s:
            self._end(trainer, "max_time_s", f"{self.max_time_s:g} seconds are over")

    def _seconds(self) -> float:
        return self._elapsed_s + time.monotonic() - self._began

    def _end(self, trainer: TrainerView, condition: str, how: str, *, anybody: bool = False) -> None:
        """Ask all workers to stop, from rank 0; with `anybody` from any rank."""
        self._met = self._met or f"{condition}: {how}"
        if trainer.rank == 0 or anybody:
            trainer.stop(self._met, StopReason.EARLY)

    def _reason(self, stop: Stop | None) -> tuple[str, str]:
        """Return why the fit has ended, as a name and in words."""
        if stop is None and not self._met:
            return "epochs", f"all epochs are complete ({self._epochs})"
        text = self._met if stop is None else stop.text
        condition = text.partition(":")[0]
        if condition in CONDITIONS and (stop is None or stop.reason == StopReason.EARLY):
            return condition, text
        return "stopped", f"stopped by {text}"

    # resuming -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "first": self._first,
            "epochs": self._epochs,
            "scored": np.array(list(self._scores), np.int64),
            "scores": np.array(list(self._scores.values()), np.float64),
            "best_epoch": self._best_epoch,
            "best": self._best,
            "reference": self._reference,
            "waited": self._waited,
            "met": np.frombuffer(self._met.encode(), np.uint8).copy(),
            "elapsed_s": self._seconds(),
            "weights": dict(self._weights),
            "whole": dict(self._whole),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._forget(int(state["first"]))
        self._epochs, self._waited = int(state["epochs"]), int(state["waited"])
        self._scores = dict(zip(state["scored"].tolist(), state["scores"].tolist(), strict=True))
        self._best_epoch, self._best = int(state["best_epoch"]), float(state["best"])
        self._reference, self._elapsed_s = float(state["reference"]), float(state["elapsed_s"])
        self._weights, self._whole = dict(state["weights"]), dict(state["whole"])
        self._met = state["met"].tobytes().decode()
        self._continues = True
