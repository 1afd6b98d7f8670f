"""The callback that writes checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from cupynet.core.checks import integer, one_of
from cupynet.core.files import require_folder
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.early_stopping import DIRECTIONS
from cupynet.training.checkpointing import save
from cupynet.training.events import EpochRecord
from cupynet.training.state_tree import Tree
from cupynet.training.trainer import Trainer


class Checkpoint(Callback):
    """Writes checkpoints after epochs, at intervals, and when a stop ends a fit early.

    Training continues from them bit for bit.

    Args:
        every_epochs: complete epochs between checkpoints.
        every_iterations: iterations between additional checkpoints; None for none.
        keep_last: number of newest checkpoints to keep.
        keep_every: keep every n-th checkpoint permanently; None for none.
        best: also keep that of the best evaluated epoch by this figure, such as `accuracy` or `loss`; None for none.
        path: the folder; by default `checkpoints` in the run's folder, the only place where `resume=` looks, or in the
            current folder.

    Raises:
        ConfigError: an argument is not valid.
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
        self.best = None if best is None else one_of("best", best, DIRECTIONS)
        self._path = None if path is None else Path(path)

    def check_path(self) -> None:
        if self._path is not None:
            require_folder(self._path)

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._store = Checkpoints(self._path or (Path("checkpoints") if run is None else run.checkpoints_path))
        self._written = 0
        self._permanent: list[int] = []  # iterations
        self._best_step, self._best_score = -1, math.nan
        if trainer.rank == 0:
            self.check_path()

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self.every_iterations is not None and trainer.iteration % self.every_iterations == 0:
            self._save(trainer)

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        better = False
        if self.best is not None and record.evaluation is not None:
            score = float(getattr(record.evaluation, self.best))
            gain = score - self._best_score if DIRECTIONS[self.best] == "max" else self._best_score - score
            better = math.isfinite(score) and not gain <= 0
            if better:
                self._best_step, self._best_score = trainer.iteration, score
        if better or trainer.epoch % self.every_epochs == 0:
            self._save(trainer)

    def on_stop(self, trainer: Trainer) -> None:
        self._save(trainer)

    def state(self) -> Tree:
        return {
            "written": self._written,
            "for_good": np.array(self._permanent, np.int64),
            "best_step": self._best_step,
            "best_score": self._best_score,
        }

    def restore(self, state: Tree) -> None:
        self._written, self._permanent = int(state["written"]), state["for_good"].tolist()
        self._best_step, self._best_score = int(state["best_step"]), float(state["best_score"])

    def _save(self, trainer: Trainer) -> None:
        step = trainer.iteration
        self._written += 1
        if self.keep_every is not None and self._written % self.keep_every == 0:
            self._permanent.append(step)
        save(self._store, trainer)
        if trainer.rank == 0:
            newest = [each for each in self._store.steps() if each <= step][-self.keep_last :]
            self._store.keep({*newest, *self._permanent, self._best_step})
