from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from cupynet.core.checks import one_of
from cupynet.training.callbacks.loggers.base import Logger

log = logging.getLogger(__name__)


class WandB(Logger):
    """Logs hyperparameters, metrics and results as a Weights & Biases run. A resumed run keeps its id.

    Args:
        project: the name of the W&B project.
        name: the name of the W&B run; by default the name of the run folder.
        mode: `offline` to write files for `wandb sync`, or `online` to upload during training (requires `wandb login`).
        path: the folder for W&B's files; by default the run folder or, without a run, the current folder.
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

    def _begin(self, hyperparameters: dict[str, Any], iteration: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        folder = self.path or self.folder or Path()
        mode: Any = self.mode
        if mode == "online" and not wandb.api.api_key:
            log.warning("WandB: not logged in. The run is saved in %s; upload it with `wandb sync`", folder)
            mode = "offline"
        folder.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb.init(
            project=self.project,
            name=self.name or (None if self.folder is None else self.folder.name),
            id=self.identity or None,
            resume="allow" if self.identity and mode == "online" else None,
            mode=mode,
            dir=str(folder),
            config=hyperparameters,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", disable_code=True, disable_git=True, x_disable_stats=True
            ),
        )
        self.identity = self._wandb.id
        self._wandb.define_metric("*", step_metric="iteration")  # W&B's own step must never decrease

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        self._wandb.log({"iteration": iteration, **figures})

    def _end(self, status: str, results: dict[str, float]) -> None:
        self._wandb.summary.update(results)
        for path in self._files() if self.artifacts else ():
            self._wandb.save(str(path), base_path=str(path.parent), policy="now")
        self._wandb.finish(exit_code=0 if status == "finished" else 1)
