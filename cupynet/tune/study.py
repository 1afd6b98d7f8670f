"""What is known of a search, in a file, and what it tries next: Optuna's only home.

A trial's settings follow from the seed, from how many trials count before it, and from what came of them: a search that
was interrupted and goes on tries what it would have tried. What was interrupted does not count. A trial that diverged,
or had no memory, does: a sampler that looks at the past takes it for a bad one.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from cupynet.checks import OBJECTIVES, one_line
from cupynet.config import Searched
from cupynet.errors import DataError, OutputError
from cupynet.tune.tried import COMPLETE, INTERRUPTED, REPEATED, Tried

NAME = "cupynet"
COUNTED = (TrialState.COMPLETE, TrialState.PRUNED)
ENOUGH = 4  # complete trials before anything is said of what matters


class Study:
    """A search in a file, which outlives the process.

    Args:
        path: of the SQLite file, made if it is not there.
        space: what is searched.
        objective: accuracy, loss or f1 of the validation images.
        sampler: tpe, random or grid. seed: of what it draws.
        pruner: median, hyperband or none. epochs: of a trial, at most.

    Raises:
        DataError: the file is no study, or one of another search.
        OutputError: it cannot be written.
    """

    def __init__(
        self, path: Path, space: Sequence[Searched], objective: str, sampler: str, seed: int, pruner: str, epochs: int
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.CRITICAL)
        self.path, self.space, self.objective = path, list(space), objective
        self.sign = OBJECTIVES[objective]
        self._sampler, self._seed = sampler, seed
        self._open: dict[int, Trial] = {}
        with self._working():
            self._storage = RDBStorage(f"sqlite:///{path}")
            direction = StudyDirection.MAXIMIZE if self.sign > 0 else StudyDirection.MINIMIZE
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=NAME,
                direction=direction,
                load_if_exists=True,
                pruner=_pruner(pruner, epochs),
            )
            asked = {"search": [each.text for each in space], "objective": objective}
            stored = {key: self._study.user_attrs.get(key) for key in asked}
            if stored != asked:
                if any(each is not None for each in stored.values()):
                    raise DataError(f"{path}: is a study of another search, of {stored['search']}")
                for key, value in asked.items():
                    self._study.set_user_attr(key, value)
            self._bury()

    def close(self) -> None:
        """Let go of the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """What Optuna and its database fail with, in our words; and nothing of what it warns of."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                yield
        except DataError:
            raise
        except Exception as error:
            text = one_line(error).partition(" [SQL")[0].partition(" (Background")[0]
            if any(each in text for each in ("readonly", "unable to open", "disk is full", "disk I/O", "locked")):
                raise OutputError(f"{self.path}: cannot be written ({text})") from error
            if type(error).__module__.startswith(("optuna", "sqlalchemy", "sqlite3", "alembic")):
                raise DataError(f"{self.path}: is not a study, or of another version of Optuna ({text})") from error
            raise

    def _bury(self) -> None:
        """Trials that were going on when the process was killed are interrupted ones."""
        for each in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            for key, value in (("outcome", INTERRUPTED), ("reason", "the search was killed")):
                self._storage.set_trial_user_attr(each._trial_id, key, value)
            self._study.tell(each.number, state=TrialState.FAIL)

    # trying -----------------------------------------------------------------------------------------------------------

    def ask(self) -> Tried:
        """A trial begins: what it tries."""
        with self._working():
            self._study.sampler = self._sampler_of(len(self._counted()) + len(self._open))
            trial = self._study.ask({each.key: _distribution(each) for each in self.space})
            self._open[trial.number] = trial
            return self._tried(self._study.trials[trial.number])

    def twin(self, tried: Tried) -> Tried | None:
        """A complete trial of the same settings, the first; None where there is none."""
        return next((each for each in self.tried() if each.outcome == COMPLETE and each.values == tried.values), None)

    def report(self, number: int, epoch: int, figures: Mapping[str, float], *, last: bool) -> bool:
        """Evaluations come in: whether to go on with this trial, of which this may be the last epoch."""
        figure = figures[self.objective]
        if not math.isfinite(figure):
            return True
        with self._working():
            trial = self._open[number]
            trial.report(figure, epoch)
            return last or not trial.should_prune()

    def tell(self, number: int, outcome: str, *, figure: float | None, epochs: int, wall_s: float, reason: str) -> None:
        """A trial has ended."""
        with self._working():
            trial = self._open.pop(number)
            facts = {"outcome": outcome, "reason": reason, "epochs": epochs, "wall_s": wall_s}
            for key, value in facts.items():
                trial.set_user_attr(key, value)
            if outcome in (COMPLETE, REPEATED):
                self._study.tell(trial, figure)
            else:
                self._study.tell(trial, state=TrialState.FAIL if outcome == INTERRUPTED else TrialState.PRUNED)

    def _sampler_of(self, place: int) -> BaseSampler:
        """What chooses the settings of the trial before which so many count."""
        if self._sampler == "grid":
            return _Grid(self.space, place)
        digest = hashlib.sha256(f"{self._seed} {place}".encode()).digest()
        seed = int.from_bytes(digest[:4], "little")
        return RandomSampler(seed) if self._sampler == "random" else TPESampler(seed=seed, constant_liar=True)

    # what came of it --------------------------------------------------------------------------------------------------

    def _counted(self) -> list[FrozenTrial]:
        return list(self._study.get_trials(deepcopy=False, states=COUNTED))

    @property
    def counted(self) -> int:
        """How many trials have ended and count."""
        with self._working():
            return len(self._counted())

    @property
    def exhausted(self) -> bool:
        """Whether all settings that there are have been tried, or are being tried."""
        there = size(self.space)
        if there is None:
            return False
        tried = [each for each in self.tried() if each.outcome != INTERRUPTED]
        return len({tuple(each.values.items()) for each in tried}) >= there

    def tried(self) -> list[Tried]:
        """All trials, in order."""
        with self._working():
            return [self._tried(each) for each in self._study.get_trials(deepcopy=False)]

    def ranked(self) -> list[Tried]:
        """The complete trials, the best first; of those that are equal the first."""
        found = [each for each in self.tried() if each.outcome == COMPLETE and each.figure is not None]
        return sorted(found, key=lambda each: (-self.sign * (each.figure or 0.0), each.number))

    def importances(self) -> dict[str, float]:
        """Setting -> its share of what makes good trials good, in 0..1 (PED-ANOVA, Watanabe et al. 2023).

        Empty where there are too few trials, or nothing differs.
        """
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(self.space) < 2 or len({each.value for each in complete}) < ENOUGH:
            return {}
        with self._working(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = PedAnovaImportanceEvaluator()
            try:
                return dict(get_param_importances(self._study, evaluator=evaluator))
            except (ValueError, RuntimeError, ZeroDivisionError):  # too little to say anything
                return {}

    def note(self, key: str, value: Any = None) -> Any:
        """Keep something in the study, or ask for it."""
        with self._working():
            if value is not None:
                self._study.set_user_attr(key, value)
            return self._study.user_attrs.get(key)

    def _tried(self, trial: FrozenTrial) -> Tried:
        if set(trial.params) != {each.key for each in self.space}:
            values = {}  # it was killed while it was chosen
        else:
            values = {each.key: _value(each, trial.params[each.key], self.path) for each in self.space}
        facts, figure = trial.user_attrs, trial.value
        if figure is None and trial.intermediate_values:
            figure = trial.intermediate_values[max(trial.intermediate_values)]
        outcome = facts.get("outcome")
        return Tried(
            trial.number,
            values,
            None if outcome is None else str(outcome),
            one_line(facts.get("reason", "")),
            figure,
            int(facts.get("epochs", 0)),
            float(facts.get("wall_s", 0.0)),
        )


def _value(each: Searched, found: Any, path: Path) -> Any:
    """A value of a setting, which a file says. DataError for one that is not searched."""
    if each.kind == "choice":
        if found not in each.choices:
            raise DataError(f"{path}: {each.key}={one_line(found)}: is none of those that are searched")
        return found
    return each.number(found)


def size(space: Sequence[Searched]) -> int | None:
    """How many settings there are in all; None where they are endless."""
    counts = [None if each.values is None else len(each.values) for each in space]
    return None if None in counts else reduce(lambda a, b: a * (b or 0), counts, 1)


def _distribution(each: Searched) -> BaseDistribution:
    if each.kind == "choice":
        return CategoricalDistribution(each.choices)
    if each.kind == "int":
        return IntDistribution(int(each.low), int(each.high), log=each.log, step=int(each.step or 1))
    return FloatDistribution(each.low, each.high, log=each.log, step=each.step)


def _pruner(name: str, epochs: int) -> optuna.pruners.BasePruner:
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=epochs)
    return optuna.pruners.MedianPruner() if name == "median" else optuna.pruners.NopPruner()


class _Grid(BaseSampler):  # type: ignore[misc]
    """One of all combinations, in order: the last setting changes first.

    Args:
        space: what there is to combine.
        place: which of them; after the last comes the first.
    """

    def __init__(self, space: Sequence[Searched], place: int) -> None:
        self._chosen: dict[str, Any] = {}
        for each in reversed(space):
            values = each.values or []
            place, index = divmod(place, len(values))
            self._chosen[each.key] = values[index]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._chosen[param_name]
