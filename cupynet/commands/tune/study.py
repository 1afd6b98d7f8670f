"""An Optuna study in a file, and the pruning callback of its trials.

The sampler is seeded anew for each trial, from the seed and the number of trials that count. A search that was
interrupted and resumed therefore tries the same settings as one that was not.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from cupynet.config.schema import TuneSettings
from cupynet.config.search_space import values
from cupynet.core.checks import OBJECTIVES, one_line
from cupynet.core.errors import DataError, OutputError
from cupynet.training import Callback, EpochRecord, Evaluation, StopReason, Trainer

INTERRUPTED = "interrupted"  # outcome of a trial, which then does not count
PRUNERS = {"median": MedianPruner, "hyperband": HyperbandPruner, "none": NopPruner}


@contextmanager
def open_study(path: Path, space: Mapping[str, BaseDistribution], settings: TuneSettings) -> Iterator[Study]:
    """Open the study in an SQLite file, which is created if it does not exist.

    Raises:
        DataError: the file is not a study, or one of another search.
        OutputError: it cannot be written.
    """
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
            stack.callback(storage.engine.dispose)
            stack.callback(storage.remove_session)
            study = Study(storage, space, settings)
            if any(not each.distributions.items() <= study.space.items() for each in study.trials):
                raise DataError("it belongs to another search")
        except Exception as error:  # of Optuna, Alembic, SQLAlchemy or sqlite3
            raise DataError(
                f"{path}: is not a study of this search and version of Optuna ({_reason(error)})"
            ) from error
        try:
            yield study
        except optuna.exceptions.StorageInternalError as error:
            raise OutputError(f"{path}: cannot be written ({_reason(error.__cause__ or error)})") from error


def _reason(error: BaseException) -> str:
    """Return an error of SQLAlchemy in a few words."""
    return one_line(error).partition(" [SQL")[0].partition(" (Background")[0]


class Study:
    """Chooses the settings of trials and stores their outcomes.

    Args:
        storage: Optuna's.
        space: the distribution of each searched setting.
        settings: objective, sampler, seed and pruner.
    """

    def __init__(
        self, storage: optuna.storages.BaseStorage, space: Mapping[str, BaseDistribution], settings: TuneSettings
    ) -> None:
        self.space, self.objective = dict(space), settings.objective
        self._settings = settings
        self._study = optuna.create_study(
            storage=storage,
            study_name="cupynet",
            direction="maximize" if OBJECTIVES[settings.objective] > 0 else "minimize",
            load_if_exists=True,
            pruner=PRUNERS[settings.pruner](),
        )
        for trial in self._study.get_trials(states=[TrialState.RUNNING]):  # the search was killed
            self._study.tell(trial.number, state=TrialState.FAIL)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, in order."""
        return list(self._study.get_trials(deepcopy=False))

    @property
    def counted(self) -> list[FrozenTrial]:
        """The trials that have ended and were not interrupted."""
        ended = [each for each in self.trials if each.state.is_finished()]
        return [each for each in ended if each.user_attrs.get("outcome") != INTERRUPTED]

    @property
    def ranked(self) -> list[FrozenTrial]:
        """The complete trials, best first."""
        complete = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        return sorted(complete, key=lambda each: (-OBJECTIVES[self.objective] * each.value, each.number))

    @property
    def exhausted(self) -> bool:
        """True if every combination of settings has been tried."""
        whole = [each.params for each in self.counted if each.params.keys() == self.space.keys()]
        return len({tuple(params[key] for key in self.space) for params in whole}) >= self._size

    @property
    def _size(self) -> float:
        return math.prod(len(values(each) or ()) or math.inf for each in self.space.values())

    def ask(self) -> Trial:
        """Begin a trial."""
        self._study.sampler = self._sampler(len(self.counted))
        return self._study.ask(self.space)

    def _sampler(self, place: int) -> BaseSampler:
        digest = hashlib.sha256(f"{self._settings.sampler_seed} {place}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        if self._settings.sampler == "grid":
            combinations = itertools.product(*(values(each) or () for each in self.space.values()))
            chosen = next(itertools.islice(combinations, int(place % self._size), None))
            return PartialFixedSampler(dict(zip(self.space, chosen, strict=True)), RandomSampler(seed))
        return RandomSampler(seed) if self._settings.sampler == "random" else TPESampler(seed=seed)

    def tell(self, trial: Trial, outcome: str, figure: float | None = None, reason: str = "") -> FrozenTrial:
        """End a trial. The sampler treats pruned and diverged trials as bad, and ignores failed ones."""
        trial.set_user_attr("outcome", outcome)
        trial.set_user_attr("reason", one_line(reason))
        if figure is not None:
            return self._study.tell(trial, figure)
        bad = outcome in ("pruned", "diverged", "out of memory")
        return self._study.tell(trial, state=TrialState.PRUNED if bad else TrialState.FAIL)


class PruningCallback(Callback):
    """Reports each evaluation to Optuna, and stops training if the pruner decides so.

    Args:
        trial: the current trial.
        objective: the metric to report.

    Attributes:
        figure: the metric of the last evaluation of the fit; None before.
        pruned: True if the pruner stopped training.
    """

    def __init__(self, trial: Trial, objective: str) -> None:
        self._trial, self._objective = trial, objective
        self.figure: float | None = None
        self.pruned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningCallback:
        return self  # only rank 0 calls it

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.evaluation is None:
            return
        figure = self._of(record.evaluation)
        if not math.isfinite(figure):
            return
        self._trial.report(figure, record.epoch)
        if trainer.iteration < trainer.total_iterations and self._trial.should_prune():
            self.pruned = True
            trainer.stop("pruned: other trials were better after as many epochs", StopReason.EARLY)

    def on_fit_end(self, trainer: Trainer) -> None:
        if trainer.evaluation is not None:
            self.figure = self._of(trainer.evaluation)

    def _of(self, evaluation: Evaluation) -> float:
        return float(getattr(evaluation, self._objective))
