"""The base class of loggers: the figures and their names. A logger that fails never ends a run."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.core.checks import one_line
from cupynet.core.errors import ConfigError, CupynetError
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord, Report, StopReason
from cupynet.training.trainer_view import TrainerView

log = logging.getLogger(__name__)

SECONDS = ("compute_s", "data_s", "averaging_s", "waiting_s")
EVALUATED = ("accuracy", "top_n_accuracy", "precision", "recall", "f1", "loss")
RESULTS = (
    *("validation_accuracy", "test_accuracy", "test_loss", "test_f1"),
    *("images_per_s", "wall_s", "train_s", "compile_s", "evaluate_s", "divergence"),
)


@dataclass(frozen=True)
class Beginning:
    """The arguments of `Logger._begin`.

    Attributes:
        folder: of the run; None if it has none.
        hyperparameters: see `flat`.
        iteration: that of the checkpoint to resume; 0 for a new run.
        identity: `Logger.identity` of the resumed run; "" for a new one.
    """

    folder: Path | None
    hyperparameters: dict[str, Any]
    iteration: int = 0
    identity: str = ""


class Logger(Callback):
    """Passes figures to another package, on rank 0. A subclass overrides `_begin`, `_write`, `_end` and `_abandon`.

    If one of them fails, a warning says so once, and nothing more is logged. Nothing is opened before the first fit.

    Attributes:
        package, extra: the package that writes, and the extra of cupynet that installs it.

    Raises:
        ConfigError: the package is not installed.
    """

    package = extra = ""

    def __init__(self) -> None:
        self._needs(self.package)
        self._run: Run | None = None
        self._begun = self._failed = False
        self._status, self._identity_before, self._results = "failed", "", dict[str, float]()

    def _needs(self, package: str) -> None:
        if find_spec(package) is None:
            kind = type(self).__name__
            raise ConfigError(f"{kind}: {package} is not installed: pip install 'cupynet[{self.extra}]'")

    # overridden by subclasses ---------------------------------------------------------------------------------------

    def _begin(self, beginning: Beginning) -> None:
        """Open the log."""
        raise NotImplementedError

    def _write(self, iteration: int, figures: dict[str, float]) -> None:
        """Write finite figures of an iteration, by name."""
        raise NotImplementedError

    def _end(self, status: str, results: dict[str, float]) -> None:
        """Write the results and close. status: `finished`, `killed` by a signal, or `failed`."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Release resources after a failure; may fail itself."""

    def identity(self) -> str:
        """Return the name of the log, by which a resumed run continues it."""
        return ""

    # events ---------------------------------------------------------------------------------------------------------

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        self._run = run

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._status = "failed"  # until a fit has come to its end
        if not self._begun:
            self._begun = True
            folder = None if self._run is None else self._run.folder
            beginning = Beginning(folder, self._hyperparameters(trainer), trainer.iteration, self._identity_before)
            self._attempt(lambda: self._begin(beginning))

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        self._log(report.iteration, of_report(report))

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self._log(record.iteration, of_epoch(record))
        if record.evaluation is not None:
            self._results = {
                f"{record.split}_{name}": getattr(record.evaluation, name) for name in ("accuracy", "loss")
            }

    def on_fit_end(self, trainer: TrainerView) -> None:
        killed = trainer.stopped is not None and trainer.stopped.reason == StopReason.SIGNAL
        self._status = "killed" if killed else "finished"

    def close(self) -> None:
        """End the log with the results of the run, if there are any."""
        begun, self._begun = self._begun, False
        if begun:
            self._attempt(lambda: self._end(self._status, self._came_to()))

    def state(self) -> dict[str, Any]:
        known = self.identity() if self._begun and not self._failed else self._identity_before
        return {"identity": np.frombuffer(known.encode(), np.uint8).copy()}

    def restore(self, state: dict[str, Any]) -> None:
        self._identity_before = np.asarray(state["identity"], np.uint8).tobytes().decode()

    # how ------------------------------------------------------------------------------------------------------------

    def _log(self, iteration: int, figures: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        if self._begun:
            self._attempt(lambda: self._write(iteration, finite))

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do it, unless something has failed before."""
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # of the package, the disk or the network
            self._failed = True
            kind = type(self).__name__
            log.warning("%s logs nothing more (%s: %s)", kind, type(error).__name__, one_line(error))
            with suppress(Exception):
                self._abandon()

    def _hyperparameters(self, trainer: TrainerView) -> dict[str, Any]:
        if self._run is not None and self._run.settings is not None:
            return flat(self._run.settings)
        backend, model = trainer.backend, trainer.whole
        own = {"workers": trainer.workers, "backend": backend.name, "dtype": backend.policy.name}
        return own | {"seed": model.seed, "parameters": model.params.count}

    def _came_to(self) -> dict[str, float]:
        """Return the figures of summary.json; of the last evaluation if there is none."""
        found: Mapping[str, Any] = self._results
        if self._run is not None and self._run.saved:
            with suppress(CupynetError):
                summary = self._run.summary().flat()
                found = {name: summary[name] for name in RESULTS}
        return {f"result/{name}": float(value) for name, value in found.items() if value is not None}

    def _files(self) -> list[Path]:
        """Return the files of the run that may be uploaded."""
        run = self._run
        there = () if run is None else (run.summary_path, run.weights_path, run.history_path)
        return [path for path in there if path.is_file()]


def of_report(report: Report) -> dict[str, float]:
    """Return the figures of a report by their names in logs; NaN if not measured."""
    return {
        "train/loss": report.loss,
        "train/score_after_averaging": report.score_after_averaging,
        "train/learning_rate": report.learning_rate,
        "train/images_per_s": report.images_per_s,
        "replicas/divergence": report.divergence,
        **{f"replicas/divergence/{layer}": apart for layer, apart in report.divergence_by_layer.items()},
        "replicas/bytes_sent": report.bytes_sent,
        **{f"time/{name}": getattr(report, name) for name in SECONDS},
    }


def of_epoch(record: EpochRecord) -> dict[str, float]:
    """Return the figures of an epoch by their names in logs; seconds are sums over all workers."""
    figures = {
        "epoch/epoch": record.epoch,
        "epoch/loss": record.loss,
        "epoch/learning_rate": record.learning_rate,
        "epoch/images_per_s": record.images_per_s,
        "epoch/samples": record.samples,
        "epoch/train_s": record.train_s,
        "epoch/bytes_sent": record.bytes_sent,
        **{f"epoch/{name}": math.fsum(getattr(record.spent, name)) for name in SECONDS},
    }
    if record.evaluation is not None:
        figures |= {f"{record.split}/{name}": getattr(record.evaluation, name) for name in EVALUATED}
    return figures


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings by dotted keys: numbers, bools and strings as they are, all else as JSON."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return found
