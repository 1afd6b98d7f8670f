"""Runs for Weights & Biases: in a file in the run's folder, which `wandb sync` uploads, or online."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from cupynet.core.checks import one_of
from cupynet.training.callbacks.loggers.base import Beginning, Logger

log = logging.getLogger(__name__)


class WandB(Logger):
    """A run of Weights & Biases: hyperparameters, figures by iteration, the result. A resumed run has the same id.

    Args:
        project: the name of the project.
        name: of the run; that of its folder by default.
        mode: `offline`, a file for `wandb sync`; or `online`, uploaded during training, after `wandb login`.
        path: the folder for its files; by default that of the run, or the current one.
        artifacts: also upload weights, summary and history.
    """

    package = extra = "wandb"

    def __init__(
        self,
        project: str = "cupynet",
        name: str | None = None,
        mode: str = "offline",
        path: str | Path | None = None,
        artifacts: bool = False,
    ) -> None:
        super().__init__()
        self.project, self.name, self.artifacts = project, name, artifacts
        self.mode = one_of("mode", mode, ("offline", "online"))
        self.path = None if path is None else Path(path)
        self._wandb: Any = None
        self._id = ""

    def _begin(self, beginning: Beginning) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        folder = self.path or beginning.folder or Path()
        mode: Any = self.mode
        if mode == "online" and not wandb.api.api_key:
            log.warning("WandB: not logged in (`wandb login`): the run stays in %s; `wandb sync` uploads it", folder)
            mode = "offline"
        folder.mkdir(parents=True, exist_ok=True)
        own = wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True, x_disable_stats=True)
        self._wandb = wandb.init(
            project=self.project,
            name=self.name or (None if beginning.folder is None else beginning.folder.name),
            id=beginning.identity or None,
            resume="allow" if beginning.identity and mode == "online" else None,
            mode=mode,
            dir=str(folder),
            config=beginning.hyperparameters,
            reinit="create_new",
            settings=own,
        )
        self._id = self._wandb.id
        self._wandb.define_metric("*", step_metric="iteration")  # its own steps must never go back

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        self._wandb.log({"iteration": iteration, **figures})

    def _end(self, status: str, results: dict[str, float]) -> None:
        self._wandb.summary.update(results)
        for path in self._files() if self.artifacts else ():
            self._wandb.save(str(path), base_path=str(path.parent), policy="now")
        self._wandb.finish(exit_code=0 if status == "finished" else 1)

    def _abandon(self) -> None:
        if self._wandb is not None:
            self._wandb.finish(exit_code=1)

    def identity(self) -> str:
        return self._id
