"""Runs for MLflow: in a SQLite file, which needs no server, or at its tracking URI.

Figures are written together, every few seconds and at the end of an epoch: a transaction takes 20 ms.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

from cupynet.training.callbacks.loggers.base import Beginning, Logger
from cupynet.training.events import EpochRecord
from cupynet.training.trainer_view import TrainerView

EVERY_S = 5.0  # between two writes
MARKS = ("time/compute_s", "epoch/epoch")  # in every report, and in every epoch
# by default MLflow retries for a quarter of an hour if a server does not answer, longer than workers wait for rank 0
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
MOST_METRICS, MOST_PARAMS, MOST_TEXT = 1000, 100, 6000  # limits of MLflow


class MLflow(Logger):
    """A run of MLflow: hyperparameters, figures by iteration, the result. A resumed run continues it.

    Args:
        uri: MLflow's tracking URI; by default MLFLOW_TRACKING_URI of the environment, else `sqlite:///mlflow.db`, a
            file in the current folder.
        experiment: the name of the experiment.
        name: of the run; that of its folder by default.
        artifacts: also upload weights, summary and history.
    """

    package, extra = "mlflow", "mlflow"

    def __init__(
        self, uri: str | None = None, experiment: str = "cupynet", name: str | None = None, artifacts: bool = False
    ) -> None:
        super().__init__()
        self.uri, self.experiment, self.name, self.artifacts = uri, experiment, name, artifacts
        if self._where().startswith("sqlite:"):
            self._needs("sqlalchemy")
        self._client: Any = None
        self._known: dict[str, int] = {}  # of a resumed run: the last logged iterations
        self._last = 0
        self._id = ""
        self._waiting: list[Any] = []
        self._written = 0.0

    def _begin(self, beginning: Beginning) -> None:
        for variable, value in {"MLFLOW_DISABLE_TELEMETRY": "true", **PATIENCE}.items():
            os.environ.setdefault(variable, value)
        # SQLAlchemy 2.1 warns about MLflow's own tables
        warnings.filterwarnings("ignore", message="The ``noload`` loader strategy", category=DeprecationWarning)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for noisy in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(noisy).setLevel(logging.WARNING)  # they log each table
        uri = self._where()
        if uri.startswith("sqlite:///"):
            with Path(uri.removeprefix("sqlite:///")).open("ab"):  # MLflow would retry for minutes
                pass
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        if beginning.identity:
            self._id = beginning.identity
            self._client.update_run(self._id, status="RUNNING")
            for mark in MARKS:
                there = self._client.get_metric_history(self._id, mark)
                self._known[mark] = max((metric.step for metric in there), default=0)
            return
        folder = beginning.folder
        name = self.name or (None if folder is None else folder.name)
        tags = {} if folder is None else {"run_folder": str(folder)}
        self._id = self._client.create_run(self._experiment(), run_name=name, tags=tags).info.run_id
        params = [Param(key, str(value)[:MOST_TEXT]) for key, value in beginning.hyperparameters.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])

    def _where(self) -> str:
        return self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"

    def _experiment(self) -> str:
        """Return the id of the experiment, which another run may be creating at the same time."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self.experiment))
            except MlflowException:
                found = self._client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        self._last = iteration
        if any(iteration <= self._known.get(name, 0) for name in figures):
            return  # logged before the run was resumed
        now = int(1000 * time.time())
        self._waiting += [Metric(name, value, now, iteration) for name, value in figures.items()]
        if time.monotonic() - self._written > EVERY_S:
            self._flush()

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        super().on_epoch_end(trainer, record)
        self._attempt(self._flush)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), MOST_METRICS):
            self._client.log_batch(self._id, metrics=waiting[first : first + MOST_METRICS])
        self._written = time.monotonic()

    def _end(self, status: str, results: dict[str, float]) -> None:
        self._write(self._last, results)
        self._flush()
        for path in self._files() if self.artifacts else ():
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, status.upper())

    def state(self) -> dict[str, Any]:
        """Write all figures before the checkpoint: a resumed run does not log them again."""
        if self._begun:
            self._attempt(self._flush)
        return super().state()

    def identity(self) -> str:
        return self._id
