from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cupynet.core.errors import ConfigError, CupynetError
from cupynet.core.settings import flat
from cupynet.core.wording import one_line
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord, IterationRecord
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)

SECONDS = ("compute_s", "data_s", "averaging_s", "waiting_s")
REPORTED = {
    "train": ("loss", "accuracy", "score_after_averaging", "learning_rate", "images_per_s"),
    "replicas": ("drift", "bytes_sent"),
    "time": SECONDS,
}
PER_EPOCH = ("epoch", "loss", "accuracy", "learning_rate", "images_per_s", "samples", "train_s", "bytes_sent")
RESULTS = (
    *("validation_accuracy", "test_accuracy", "test_loss", "test_f1"),
    *("images_per_s", "wall_s", "train_s", "compile_s", "evaluate_s", "drift"),
)


class Logger(Callback):
    """Logs metrics with a third-party package, on rank 0. Subclasses implement `_begin`, `_write` and `_end`.

    If one of these methods fails, a warning is logged and the logger is disabled; training continues. The log is opened
    when the first fit starts.

    Attributes:
        package: the package that writes the log.
        extra: the extra of cupynet that installs it.
        folder: the run folder, or None.
        identity: the id of the log, with which a resumed run continues it; "" for a new log. `_begin` sets it if the
            package uses ids.

    Raises:
        ConfigError: the package is not installed.
    """

    package = extra = ""

    def __init__(self) -> None:
        if find_spec(self.package) is None:
            kind = type(self).__name__
            raise ConfigError(f"{kind}: {self.package} is not installed: pip install 'cupynet[{self.extra}]'")
        self.folder: Path | None = None
        self.identity = ""
        self._run: Run | None = None
        self._open = self._failed = False
        self._status = "failed"

    # implemented by subclasses --------------------------------------------------------------------------------------

    def _begin(self, hyperparameters: dict[str, Any], iteration: int) -> None:
        """Open the log. `iteration` is the iteration of the resumed checkpoint, or 0 for a new run."""
        raise NotImplementedError

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        raise NotImplementedError

    def _end(self, status: str, results: dict[str, float]) -> None:
        """Write the results and close the log. `status` is `finished`, `killed` (by a signal) or `failed`."""
        raise NotImplementedError

    # events ---------------------------------------------------------------------------------------------------------

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._run, self.folder = run, None if run is None else run.folder
        self.identity = ""

    def on_fit_start(self, trainer: Trainer) -> None:
        self._status = "failed"  # until the fit ends
        if not self._open:
            self._open = True
            settings = (None if self._run is None else self._run.settings) or {}
            self._attempt(self._begin, hyperparameters(settings), trainer.iteration)

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        self._log(record.iteration, of_iteration(record))

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self._log(record.iteration, of_epoch(record))

    def on_fit_end(self, trainer: Trainer) -> None:
        killed = trainer.stopped is not None and trainer.stopped.urgent
        self._status = "killed" if killed else "finished"

    def close(self) -> None:
        """Close the log with the results of summary.json, if there is one."""
        if not self._open:
            return
        self._open = False
        results: dict[str, Any] = {}
        if self._run is not None and self._run.saved:
            with suppress(CupynetError):
                summary = self._run.summary().flat()
                results = {name: summary[name] for name in RESULTS}
        known = {f"result/{name}": float(value) for name, value in results.items() if value is not None}
        self._attempt(self._end, self._status, known)

    def state(self) -> dict[str, Any]:
        return {"identity": self.identity}

    def restore(self, state: dict[str, Any]) -> None:
        if not self._open:  # an open log keeps its id
            self.identity = str(state["identity"])

    # for subclasses -------------------------------------------------------------------------------------------------

    def _log(self, iteration: int, figures: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        if self._open:
            self._attempt(self._write, iteration, finite)

    def _attempt(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._failed:
            return
        try:
            work(*arguments)
        except Exception as error:  # from the package, the disk or the network
            self._failed = True
            kind = type(self).__name__
            log.warning("%s failed and is disabled (%s: %s)", kind, type(error).__name__, one_line(error))

    def _files(self) -> list[Path]:
        run = self._run
        paths = () if run is None else (run.summary_path, run.weights_path, run.history_path)
        return [path for path in paths if path.is_file()]


def of_iteration(record: IterationRecord) -> dict[str, float]:
    figures = {f"{group}/{name}": getattr(record, name) for group, names in REPORTED.items() for name in names}
    layers = {f"replicas/drift/{layer}": distance for layer, distance in record.drift_by_layer.items()}
    return figures | layers


def of_epoch(record: EpochRecord) -> dict[str, float]:
    """Return the metrics of an epoch by their logged names. Seconds, except `train_s`, are sums over all workers."""
    figures = {f"epoch/{name}": getattr(record, name) for name in PER_EPOCH}
    figures |= {f"epoch/{name}": math.fsum(getattr(record.spent, name)) for name in SECONDS}
    if record.evaluation is not None:
        figures |= {f"{record.split}/{name}": value for name, value in record.evaluation.figures().items()}
    return figures


def hyperparameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings to dotted keys. Convert values other than numbers, bools and strings to JSON."""
    plain = (bool, int, float, str)
    return {key: value if isinstance(value, plain) else json.dumps(value) for key, value in flat(settings).items()}
