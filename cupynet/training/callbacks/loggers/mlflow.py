from __future__ import annotations

import logging
import os
import re
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from cupynet.training.callbacks.loggers.base import Logger
from cupynet.training.events import EpochRecord
from cupynet.training.trainer import Trainer

EVERY_S = 5.0  # minimum interval between writes, except at the end of an epoch
CREATED_S = 60.0  # how long to wait while another process creates the tables
# by default MLflow retries for 15 minutes, longer than workers wait for rank 0
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
MAX_METRICS, MAX_PARAMS, MAX_TEXT = 1000, 100, 6000  # limits of MLflow


class MLflow(Logger):
    """Logs hyperparameters, metrics and results as an MLflow run. A resumed run continues the same MLflow run.

    Args:
        uri: the tracking URI; by default the environment variable MLFLOW_TRACKING_URI or, if it is unset,
            `sqlite:///mlflow.db` in the current folder.
        experiment: the name of the MLflow experiment, which is created if necessary.
        name: the name of the MLflow run; by default the name of the run folder.
        artifacts: also upload weights, summary and history.
    """

    package, extra = "mlflow", "mlflow"
    outside = ("uri",)

    def __init__(
        self, uri: str | None = None, experiment: str = "cupynet", name: str | None = None, artifacts: bool = False
    ) -> None:
        super().__init__()
        self.uri, self.experiment, self.name, self.artifacts = uri, experiment, name, artifacts
        self._last = 0
        self._waiting: list[Any] = []
        self._written = 0.0

    def _begin(self, hyperparameters: dict[str, Any], iteration: int) -> None:
        for variable, value in {"MLFLOW_DISABLE_TELEMETRY": "true", **PATIENCE}.items():
            os.environ.setdefault(variable, value)
        # SQLAlchemy 2.1 warns about MLflow's own tables
        warnings.filterwarnings("ignore", message="The ``noload`` loader strategy", category=DeprecationWarning)
        for noisy in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(noisy).setLevel(logging.WARNING)  # by default these log a line for every table
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        with ExitStack() as locked:
            if uri.startswith("sqlite:///"):
                path = Path(uri.removeprefix("sqlite:///"))
                with path.open("ab"):  # fail at once, because MLflow would retry for minutes
                    pass
                # MLflow fails if several processes create the tables concurrently
                lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=CREATED_S, fallback_to_soft=False)
                with suppress(OSError):  # after CREATED_S, or if the file system does not support locks
                    locked.enter_context(lock)
            self._create(uri, hyperparameters)

    def _create(self, uri: str, hyperparameters: dict[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        if self.identity:
            self._client.update_run(self.identity, status="RUNNING")
            return
        name = self.name or (None if self.folder is None else self.folder.name)
        tags = {} if self.folder is None else {"run_folder": str(self.folder)}
        try:
            experiment = self._client.create_experiment(self.experiment)
        except MlflowException:  # the experiment already exists
            experiment = self._client.get_experiment_by_name(self.experiment).experiment_id
        self.identity = self._client.create_run(experiment, run_name=name, tags=tags).info.run_id
        params = [Param(_valid(key), str(value)[:MAX_TEXT]) for key, value in hyperparameters.items()]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self.identity, params=params[first : first + MAX_PARAMS])

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        self._last = iteration
        now = int(1000 * time.time())
        self._waiting += [Metric(_valid(name), value, now, iteration) for name, value in figures.items()]
        if time.monotonic() - self._written > EVERY_S:
            self._flush()

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        super().on_epoch_end(trainer, record)
        self._attempt(self._flush)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), MAX_METRICS):
            self._client.log_batch(self.identity, metrics=waiting[first : first + MAX_METRICS])
        self._written = time.monotonic()

    def _end(self, status: str, results: dict[str, float]) -> None:
        self._write(self._last, results)
        self._flush()
        for path in self._files() if self.artifacts else ():
            self._client.log_artifact(self.identity, str(path))
        self._client.set_terminated(self.identity, status.upper())


def _valid(name: str) -> str:
    """Replace characters that MLflow refuses in names, which names of layers and functions may contain."""
    return re.sub(r"[^\w.\- :/]", "_", name)
