"""Early stopping (Prechelt 1998, "Early stopping - but when?") with the conditions of Deeplearning4j."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from numpy.typing import NDArray

from cupynet.core.checks import flag, instance, integer, mode_of, number, one_of
from cupynet.core.files import for_json
from cupynet.core.wording import counted
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord, IterationRecord, StopReason
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)

CONDITIONS = ("patience", "best_score", "max_epochs", "max_time_s", "max_score", "invalid_score")


@dataclass(frozen=True)
class EarlyStoppingResult:
    """The result of early stopping in one fit.

    Attributes:
        reason: the condition that ended the fit (see `EarlyStopping`), `epochs` if all epochs are complete, `stopped`
            after a request or a signal, or `diverged`.
        details: an explanation for the user.
        scores: the monitored metric in each evaluated epoch. Epochs are numbered from 1 over all fits.
        best_epoch, best_score: epoch and score of the best weights; None if no epoch had a finite score.
        epochs: completed epochs of this fit.
        restored: True if the model now has the best weights.
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
        """Return a JSON-serializable dictionary; non-finite scores become None."""
        return for_json({**asdict(self), "scores": {str(epoch): score for epoch, score in self.scores.items()}})  # type: ignore[no-any-return]


@dataclass
class _State:
    """The state of early stopping in a fit, saved in checkpoints."""

    epochs: int = 0
    scores: dict[int, float] = field(default_factory=dict)  # by epoch
    best_epoch: int = 0  # 0 before the first finite score
    reference: float = math.nan  # the last score that was an improvement
    waited: int = 0  # evaluations since then
    met: str = ""  # the first condition that was met, with details
    limit: Any = None  # its value when it was met
    spent_s: float = 0.0  # seconds of the fit in earlier processes
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)  # of the best epoch, on the host


class EarlyStopping(Callback):
    """Ends a fit on all workers when a condition is met, and restores the best weights.

    Each `fit` resets the scores, unless it continues a restored one with the same `monitor` and `mode`. The best
    weights, but not the optimizer state, are restored, even after a DivergedError (except in a pipeline). They are not
    restored after `stop` or a signal, because an interrupted fit can only continue from its last weights. With
    `restore_best_weights`, no other callback, such as WeightAverage, may decide the final weights.

    Args:
        monitor: the validation metric to monitor: `loss`, `accuracy`, `top_n_accuracy`, `precision`, `recall` or `f1`;
            for regression `loss`, `mean_absolute_error`, `r2` or, for binary targets, `accuracy`; or one of the
            `metrics`. The prefixes `validation_` and `val_` are ignored.
        mode: `min` if lower scores are better, `max` if higher scores are better, or `auto`: `min` for names that
            contain "loss" or "error", otherwise `max`.
        patience: stop after this many consecutive evaluations without improvement. Here and below, None disables a
            condition.
        min_delta: a score is an improvement if it is better by more than this.
        best_score: stop when the score is at least this good.
        max_epochs: stop after this many epochs of the fit.
        max_time_s: stop after this many seconds of the fit, including evaluations and time in earlier processes.
        max_score: stop when a reported training loss exceeds this value: the score of the last averaging step or, if
            there is none, the loss of any replica.
        invalid_score: stop when the score is NaN or infinite. Such a score is never the best.
        restore_best_weights: restore the best weights at the end of the fit.

    Attributes:
        result: the result of the last fit; None before it ends, and after an error other than DivergedError.
    """

    every_rank = True
    needs_validation = True

    def __init__(
        self,
        monitor: str = "loss",
        mode: str = "auto",
        patience: int | None = 5,
        min_delta: float = 0.0,
        best_score: float | None = None,
        max_epochs: int | None = None,
        max_time_s: float | None = None,
        max_score: float | None = None,
        invalid_score: bool = True,
        restore_best_weights: bool = True,
    ) -> None:
        self.monitor = instance("monitor", monitor, str, "'loss'")
        self.mode = one_of("mode", mode, ("auto", "min", "max"))
        none = ", or null for none"
        self.patience = None if patience is None else integer("patience", patience, 1, none)
        self.min_delta = number("min_delta", min_delta, minimum=0)
        self.best_score = None if best_score is None else number("best_score", best_score, also=none)
        self.max_epochs = None if max_epochs is None else integer("max_epochs", max_epochs, 1, none)
        self.max_time_s = None if max_time_s is None else number("max_time_s", max_time_s, above=0, also=none)
        self.max_score = None if max_score is None else number("max_score", max_score, above=0, also=none)
        self.invalid_score = flag("invalid_score", invalid_score)
        self.restore_best_weights = flag("restore_best_weights", restore_best_weights)
        self.result: EarlyStoppingResult | None = None
        self._now, self._began = _State(), time.monotonic()

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._now = _State()

    def on_fit_start(self, trainer: Trainer) -> None:
        self.result, self._began = None, time.monotonic()
        if not trainer.resumes(self):
            self._now = _State()
        elif self._now.met:  # before the checkpoint was saved
            met, self._now.met = self._now.met, ""
            if self._now.limit in (None, getattr(self, met.partition(":")[0])):  # otherwise the user has changed it
                self._end(trainer, met)

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self.max_time_s is not None and trainer.rank == 0 and self._elapsed_s() >= self.max_time_s:
            self._end(trainer, f"max_time_s: {self.max_time_s:g} seconds have passed")

    def _elapsed_s(self) -> float:
        return self._now.spent_s + time.monotonic() - self._began

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        loss = record.loss if math.isnan(record.score_after_averaging) else record.score_after_averaging
        if self.max_score is not None and loss > self.max_score:
            self._end(trainer, f"max_score: the training loss is {loss:.4g}, above {self.max_score:g}")

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self._now.epochs += 1
        if record.evaluation is not None:
            self._compare(trainer, record.epoch, record.evaluation.figure(self.monitor))
        if self.max_epochs is not None and self._now.epochs >= self.max_epochs:
            self._end(trainer, f"max_epochs: trained for {counted(self._now.epochs, 'epoch')}")
        self.on_iteration_end(trainer)

    def _compare(self, trainer: Trainer, epoch: int, score: float) -> None:
        now = self._now
        now.scores[epoch] = score
        now.waited += 1
        if math.isfinite(score):
            if not now.best_epoch or self._gain(score, now.scores[now.best_epoch]) > 0:
                now.best_epoch = epoch
                now.weights = trainer.model.weights() if self.restore_best_weights else {}
            if math.isnan(now.reference) or self._gain(score, now.reference) > self.min_delta:
                now.reference, now.waited = score, 0
            if self.best_score is not None and self._gain(score, self.best_score) >= 0:
                self._end(trainer, f"best_score: the {self.monitor} is {score:.4g} after epoch {epoch}")
        elif self.invalid_score:
            self._end(trainer, f"invalid_score: the {self.monitor} is {score} after epoch {epoch}")
        if self.patience is not None and now.waited >= self.patience:
            by = f" by more than {self.min_delta:g}" if self.min_delta else ""
            count = counted(now.waited, "evaluation")
            self._end(trainer, f"patience: the {self.monitor} has not improved{by} in {count}")

    @property
    def _metric(self) -> dict[str, str]:
        """Settings that make scores comparable; not saved by earlier versions."""
        return {"monitor": self.monitor, "mode": mode_of(self.monitor) if self.mode == "auto" else self.mode}

    def _gain(self, score: float, other: float) -> float:
        return score - other if self._metric["mode"] == "max" else other - score

    def _end(self, trainer: Trainer, condition: str) -> None:
        if not self._now.met:
            self._now.met, self._now.limit = condition, getattr(self, condition.partition(":")[0])
        trainer.stop(self._now.met, StopReason.EARLY)

    def after_finish(self, trainer: Trainer) -> bool:
        stop = trainer.stopped
        text = self._now.met if stop is None else stop.text
        condition = text.partition(":")[0]
        if stop is not None and (stop.interrupts or condition not in CONDITIONS):  # another reason stopped the fit
            return self._conclude(trainer, "stopped", f"stopped ({text})", restore=False)
        if text:
            return self._conclude(trainer, condition, text)
        return self._conclude(trainer, "epochs", f"all epochs are complete ({self._now.epochs})")

    def on_diverged(self, trainer: Trainer, text: str) -> None:
        has_all_weights = trainer.replica.whole is trainer.model  # a pipeline stage does not
        self._conclude(trainer, "diverged", text, restore=has_all_weights)

    def _conclude(self, trainer: Trainer, reason: str, details: str, *, restore: bool = True) -> bool:
        """Restore the best weights if `restore`. Return True if the weights have changed."""
        now, changed = self._now, False
        # a restored state may have weights even if they are not needed
        restored = restore and self.restore_best_weights and bool(now.weights)
        if restored:
            last = trainer.model.weights()
            trainer.model.load_weights(now.weights)
            changed = any((last[name] != best).any() for name, best in now.weights.items())
        best = now.best_epoch or None, now.scores.get(now.best_epoch)
        self.result = EarlyStoppingResult(reason, details, self.monitor, dict(now.scores), *best, now.epochs, restored)
        if trainer.rank == 0:
            log.info("early stopping: %s", self.result)
        return changed

    def state(self) -> dict[str, Any]:
        scores = {str(epoch): score for epoch, score in self._now.scores.items()}
        return vars(self._now) | {"scores": scores, "spent_s": self._elapsed_s(), **self._metric}

    def restore(self, state: dict[str, Any]) -> None:
        self._began = time.monotonic()
        if {name: state.get(name, value) for name, value in self._metric.items()} != self._metric:
            self._now = _State(epochs=int(state["epochs"]), spent_s=float(state["spent_s"]))
            if state["met"].startswith("max_"):  # a condition without scores
                self._now.met, self._now.limit = state["met"], state["limit"]
            return
        self._now = _State(
            epochs=int(state["epochs"]),
            scores={int(epoch): float(score) for epoch, score in state["scores"].items()},
            best_epoch=int(state["best_epoch"]),
            reference=float(state["reference"]),
            waited=int(state["waited"]),
            met=str(state["met"]),
            limit=state.get("limit"),  # absent in older checkpoints
            spent_s=float(state.get("spent_s", 0.0)),
            weights=dict(state["weights"]),
        )
