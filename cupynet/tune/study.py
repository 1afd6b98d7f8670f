"""An Optuna study in a file, and the pruning callback of its trials.

The sampler is seeded anew for each trial, from the seed and the number of trials that count. A search that was
interrupted and resumed therefore tries the same settings as one that was not.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from cupynet.checks import OBJECTIVES, one_line
from cupynet.errors import DataError, OutputError
from cupynet.settings import TuneSettings
from cupynet.training import Callback, EpochRecord, Evaluation, StopReason, TrainerView

INTERRUPTED = "interrupted"  # the outcome of a trial that does not count
DIGITS = 6  # of a number that is not one of a range
ENOUGH = 4  # complete trials before importances are computed


class Study:
    """A search in an SQLite file.

    Args:
        path: of the file, created if it does not exist.
        space: the distribution of each searched setting.
        settings: objective, sampler, seed and pruner.

    Raises:
        DataError: the file is not a study, or one of another search.
        OutputError: it cannot be written.
    """

    def __init__(self, path: Path, space: Mapping[str, BaseDistribution], settings: TuneSettings) -> None:
        optuna.logging.set_verbosity(optuna.logging.CRITICAL)
        self.space, self.objective = dict(space), settings.objective
        self._path, self._settings = path, settings
        with self._translated():
            self._storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
            self._study = optuna.create_study(
                storage=self._storage,
                study_name="cupynet",
                direction="maximize" if OBJECTIVES[settings.objective] > 0 else "minimize",
                load_if_exists=True,
                pruner=_pruner(settings.pruner),
            )
            for trial in self.trials:
                if not trial.distributions.items() <= self.space.items():
                    raise DataError(f"{path}: is a study of another search")
                if trial.state == TrialState.RUNNING:
                    self._study.tell(trial.number, state=TrialState.FAIL)

    def close(self) -> None:
        """Close the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the errors of Optuna and its database, and ignore warnings about experimental features."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                yield
        except Exception as error:
            text = one_line(error).partition(" [SQL")[0].partition(" (Background")[0]
            if any(each in text for each in ("readonly", "unable to open", "disk is full", "disk I/O", "locked")):
                raise OutputError(f"{self._path}: cannot be written ({text})") from error
            if type(error).__module__.startswith(("optuna", "sqlalchemy", "sqlite3", "alembic")):
                raise DataError(f"{self._path}: is not a study of this version of Optuna ({text})") from error
            raise

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, in order."""
        with self._translated():
            return list(self._study.get_trials(deepcopy=False))

    @property
    def counted(self) -> list[FrozenTrial]:
        """The trials that have ended and were not interrupted."""
        return [each for each in self.trials if each.state.is_finished() and outcome_of(each) != INTERRUPTED]

    @property
    def ranked(self) -> list[FrozenTrial]:
        """The complete trials, best first."""
        complete = [each for each in self.trials if outcome_of(each) == "complete"]
        return sorted(complete, key=lambda each: (-OBJECTIVES[self.objective] * each.value, each.number))

    @property
    def exhausted(self) -> bool:
        """True if every combination of settings has been tried."""
        tried = {tuple(each.params[key] for key in self.space) for each in self.counted if self._is_whole(each)}
        return len(tried) >= self._size

    @property
    def _size(self) -> float:
        return math.prod(len(values(each) or ()) or math.inf for each in self.space.values())

    def _is_whole(self, trial: FrozenTrial) -> bool:
        return set(trial.params) == set(self.space)  # not if the search was killed while it was sampled

    def ask(self) -> Trial:
        """Begin a trial."""
        place = len(self.counted)
        with self._translated():
            self._study.sampler = self._sampler(place)
            return self._study.ask(self.space)

    def _sampler(self, place: int) -> BaseSampler:
        digest = hashlib.sha256(f"{self._settings.sampler_seed} {place}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        if self._settings.sampler == "grid":
            combinations = itertools.product(*(values(each) or () for each in self.space.values()))
            chosen = next(itertools.islice(combinations, int(place % self._size), None))
            return PartialFixedSampler(dict(zip(self.space, chosen, strict=True)), RandomSampler(seed))
        return RandomSampler(seed) if self._settings.sampler == "random" else TPESampler(seed=seed)

    def twin(self, trial: Trial) -> FrozenTrial | None:
        """Return the complete trial with the same settings; None if there is none."""
        return next((each for each in self.ranked if each.params == trial.params), None)

    def tell(self, trial: Trial, outcome: str, figure: float | None = None, reason: str = "") -> FrozenTrial:
        """End a trial. Pruned ones count as bad for the sampler, failed ones are not considered."""
        with self._translated():
            trial.set_user_attr("outcome", outcome)
            trial.set_user_attr("reason", one_line(reason))
            if figure is not None:
                return self._study.tell(trial, figure)
            bad = outcome in ("pruned", "diverged", "out of memory")
            return self._study.tell(trial, state=TrialState.PRUNED if bad else TrialState.FAIL)

    def importances(self) -> dict[str, float]:
        """Return the share of each setting in what makes trials good (PED-ANOVA, Watanabe et al. 2023).

        Empty if there are too few trials.
        """
        if len(self.space) < 2 or len({each.value for each in self.ranked}) < ENOUGH:
            return {}
        with warnings.catch_warnings(), contextlib.suppress(ValueError, RuntimeError, ZeroDivisionError):
            warnings.simplefilter("ignore")
            return dict(get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator()))
        return {}


def _pruner(name: str) -> BasePruner:
    return {"median": MedianPruner, "hyperband": HyperbandPruner, "none": NopPruner}[name]()


def outcome_of(trial: FrozenTrial) -> str:
    """Return complete, repeated, pruned, diverged, out of memory, failed, interrupted, or running.

    A trial during which the search was killed has failed: it may have been the reason.
    """
    return one_line(trial.user_attrs.get("outcome", "failed" if trial.state.is_finished() else "running"))


def figure_of(trial: FrozenTrial) -> float | None:
    """Return the result of a trial, or its last evaluation; None if there was none."""
    reported = trial.value if trial.value is not None else trial.intermediate_values.get(trial.last_step)
    return None if reported is None else float(reported)


def values(distribution: BaseDistribution) -> list[Any] | None:
    """Return all values of a distribution; None if it is continuous."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    low, high, step = distribution.low, distribution.high, distribution.step
    return None if step is None else [low + i * step for i in range(round((high - low) / step) + 1)]


def ends(distribution: BaseDistribution) -> list[Any]:
    """Return every choice, or the bounds of a number."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    return [distribution.low, distribution.high]


def written(distribution: BaseDistribution, value: Any) -> str:
    """Return a value as it is written on a command line: numbers are rounded, within their bounds."""
    if not isinstance(distribution, FloatDistribution):
        return str(value)
    return str(min(max(float(f"{value:.{DIGITS}g}"), distribution.low), distribution.high))


class PruningCallback(Callback):
    """Reports each evaluation to Optuna, and stops training when the pruner says so.

    Args:
        trial: that is trained.
        objective: the figure of an evaluation to report.

    Attributes:
        figure: of the last evaluation of the fit; None before.
        pruned: True if the pruner stopped training.
    """

    def __init__(self, trial: Trial, objective: str) -> None:
        self._trial, self._objective = trial, objective
        self.figure: float | None = None
        self.pruned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningCallback:
        return self  # the trial is one, and only rank 0 calls

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        if record.evaluation is None:
            return
        figure = self._of(record.evaluation)
        if not math.isfinite(figure):
            return
        self._trial.report(figure, record.epoch)
        if trainer.iteration < trainer.total_iterations and self._trial.should_prune():
            self.pruned = True
            trainer.stop("pruned: other trials were better after as many epochs", StopReason.EARLY)

    def on_fit_end(self, trainer: TrainerView) -> None:
        if trainer.evaluation is not None:
            self.figure = self._of(trainer.evaluation)

    def _of(self, evaluation: Evaluation) -> float:
        return float(getattr(evaluation, self._objective))
