from __future__ import annotations

import logging
import math
import uuid
from pathlib import Path

import numpy as np

from cupynet.core.checks import instance, integer, mode_of
from cupynet.core.errors import ConfigError
from cupynet.core.files import require_folder
from cupynet.core.lock import Hold
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.checkpointing import save
from cupynet.training.events import EpochRecord
from cupynet.training.state_tree import Tree
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)


class Checkpoint(Callback):
    """Writes checkpoints after epochs, at intervals, and at the end of a fit.

    Resumed training continues bit for bit. Because old checkpoints are removed, a folder belongs to one run. The folder
    is locked during the run and, if it is outside the run folder, marked with the run's identity.

    Args:
        every_epochs: epochs between checkpoints.
        every_iterations: iterations between additional checkpoints, or None.
        keep_last: number of newest checkpoints to keep.
        keep_every: keep every n-th checkpoint permanently, or None.
        best: also keep the checkpoint of the epoch with the best value of this metric, such as `accuracy` or `loss`, or
            of one of the `metrics`: the lowest value if the name contains "loss" or "error", otherwise the highest.
            None to disable this.
        path: the folder; by default `checkpoints` in the run folder or, without a run, in the current folder. `resume=`
            only finds checkpoints in the run folder.

    Raises:
        ConfigError: an argument is invalid; or, when training starts, the folder belongs to another run.
    """

    every_rank = True
    last = True

    def __init__(
        self,
        every_epochs: int = 1,
        every_iterations: int | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        best: str | None = None,
        path: str | Path | None = None,
    ) -> None:
        self.every_epochs = integer("every_epochs", every_epochs, 1)
        self.every_iterations = None if every_iterations is None else integer("every_iterations", every_iterations, 1)
        self.keep_last = integer("keep_last", keep_last, 1)
        self.keep_every = None if keep_every is None else integer("keep_every", keep_every, 1)
        self.best = None if best is None else instance("best", best, str, "'accuracy'")
        self.path = None if path is None else Path(path)
        self._hold: Hold | None = None
        self._best_of, self._best_step, self._best_score = self.best, -1, math.nan

    @property
    def best_path(self) -> Path | None:
        """Folder of the checkpoint with the best value of the metric; None if there is none."""
        if self._best_step < 0 or self._best_of != self.best:
            return None
        path = self._store.path(self._best_step)
        return path if path.is_dir() else None

    @property
    def in_use(self) -> bool:
        return self._hold is not None

    def check_path(self) -> None:
        if self.path is not None:
            require_folder(self.path)

    def check_new(self) -> None:
        if self.path is not None and Checkpoints(self.path).steps():
            raise _taken(self.path)

    def start(self, trainer: Trainer, run: Run | None) -> None:
        own = None if run is None else run.checkpoints_path
        self._store = Checkpoints(Path(self.path or own or "checkpoints").absolute())  # also after os.chdir
        self._alone = own is None
        self._elsewhere = own is None or self._store.folder.resolve() != own.resolve()
        self._identity, self._claimed = uuid.uuid4().hex, ""  # `_claimed`: stored in the folder by this object
        self._written, self._counted = 0, -1  # number of checkpoints written, and iteration of the last one
        self._saved: tuple[int, int] | None = None  # position of the last checkpoint in this fit
        self._permanent: list[int] = []  # iterations of the checkpoints to keep permanently
        self._best_of, self._best_step, self._best_score = self.best, -1, math.nan
        if trainer.rank == 0:
            require_folder(self._store.folder)
        # the run folder itself is locked already
        if trainer.rank == 0 and (run is None or self._store.folder.resolve() != run.folder.resolve()):
            self._hold = Hold(self._store.folder)
            if self._hold.warning and self._elsewhere:
                log.warning("%s", self._hold.warning)

    def close(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    def on_fit_start(self, trainer: Trainer) -> None:
        if self._best_of != self.best:
            self._best_of, self._best_step, self._best_score = self.best, -1, math.nan
        self._saved, owns = None, trainer.rank == 0 and self._elsewhere
        if owns:
            self._identity = self._claimed = self._claimed or self._owned()
            self._store.claim(self._identity)

    def _owned(self) -> str:
        """Return the identity for the folder; a new one if it is empty. Raise ConfigError if another run owns it."""
        if not self._store.steps():
            return uuid.uuid4().hex  # a run that starts from another run's checkpoint is a different run
        if self._store.owner() != self._identity:
            raise _taken(self._store.folder, in_python=self._alone)
        return self._identity or uuid.uuid4().hex

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self.every_iterations is not None and trainer.iteration % self.every_iterations == 0:
            ends_epoch = trainer.epoch_iteration == trainer.plan.iterations_per_epoch
            if not ends_epoch or not self._is_due(trainer, trainer.epoch + 1):  # otherwise `on_epoch_end` saves
                self._save(trainer)

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        better = False
        if self.best is not None and record.evaluation is not None:
            score = record.evaluation.figure(self.best)
            gain = score - self._best_score if mode_of(self.best) == "max" else self._best_score - score
            better = math.isfinite(score) and not gain <= 0
            if better:
                self._best_step, self._best_score = trainer.iteration, score
        if better or self._is_due(trainer, trainer.epoch):
            self._save(trainer)

    def _is_due(self, trainer: Trainer, epochs: int) -> bool:
        """Return True if a checkpoint is written after this number of epochs."""
        return epochs % self.every_epochs == 0 or epochs == trainer.plan.epochs

    def on_stop(self, trainer: Trainer) -> None:
        self._save(trainer)

    def state(self) -> Tree:
        return {
            "identity": self._identity,
            "written": self._written,
            "counted": self._counted,
            "for_good": np.array(self._permanent, np.int64),
            "best": self._best_of,
            "best_step": self._best_step,
            "best_score": self._best_score,
        }

    def restore(self, state: Tree) -> None:
        self._identity = str(state.get("identity", ""))  # earlier versions did not save this, `counted` or `best`
        self._written, self._counted = int(state["written"]), int(state.get("counted", -1))
        self._permanent = state["for_good"].tolist()
        self._best_step, self._best_score = int(state["best_step"]), float(state["best_score"])
        self._best_of = state.get("best", self.best)

    def _save(self, trainer: Trainer) -> None:
        step, position = trainer.iteration, (trainer.iteration, trainer.epoch)
        if position == self._saved:  # stopped right after a checkpoint
            return
        self._saved = position
        if step != self._counted:  # at the end of an epoch, replace the checkpoint of its last iteration
            self._written, self._counted = self._written + 1, step
            if self.keep_every is not None and self._written % self.keep_every == 0:
                self._permanent.append(step)
        save(self._store, trainer)
        if trainer.rank == 0:
            newest = [each for each in self._store.steps() if each <= step][-self.keep_last :]
            self._store.keep({*newest, *self._permanent, self._best_step})


def _taken(folder: Path, *, in_python: bool = False) -> ConfigError:
    remedies = "remove this folder, or choose another one"
    if in_python:
        remedies = (
            f"resume that run with wrapper.restore({str(folder)!r}), or choose another folder with "
            "Checkpoint(path=...) or the wrapper's run=..."
        )
    return ConfigError(f"contains checkpoints of another run. To fix this, {remedies}", "path", str(folder))
