"""A sampler that never repeats a completed trial, and runs interrupted trials first."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from cupynet.config.search_space import is_continuous, rounded

DRAWS = 10  # attempts before choosing an untried combination at random
INTERRUPTED = "interrupted"  # user attribute of a trial that must be repeated

Params = Mapping[str, Any]


class UntriedSampler(BaseSampler):  # type: ignore[misc]
    """Wraps another sampler, and samples again if the settings have already been tried.

    study: the whole study; pruners may pass a filtered study to the methods.
    """

    def __init__(self, study: Study, space: Mapping[str, Any], inner: BaseSampler, seed: int) -> None:
        self._study, self._space, self._inner, self._random = study, space, inner, random.Random(seed)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        tried, interrupted = self._tried()
        if interrupted:
            return dict(interrupted[0])
        drawn: dict[str, Any] = {}
        for _ in range(DRAWS):
            drawn = self._draw(study, trial)
            if self._key(drawn) not in tried:
                return drawn
        return self._untried(tried) or drawn

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def exhausted(self) -> bool:
        if self._study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
            return False
        tried, interrupted = self._tried()
        return not interrupted and math.isfinite(self._size) and not self._untried(tried)

    def _draw(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        known = self._inner.infer_relative_search_space(study, trial)
        drawn = dict(self._inner.sample_relative(study, trial, known))
        for key, each in self._space.items():
            if key not in drawn:
                drawn[key] = self._inner.sample_independent(study, trial, key, each)
        return drawn

    def _tried(self) -> tuple[set[Sequence[str]], list[Params]]:
        """Return the settings of finished trials, and of interrupted trials to repeat."""
        tried, interrupted = set(), {}
        for each in self._study.get_trials(deepcopy=False):
            if each.params.keys() != self._space.keys() or not each.state.is_finished():
                continue
            if was_interrupted(each):
                interrupted[self._key(each.params)] = each.params
            else:
                tried.add(self._key(each.params))
        return tried, [params for key, params in interrupted.items() if key not in tried]

    def _untried(self, tried: set[Sequence[str]]) -> dict[str, Any] | None:
        """Return an untried combination, or None if there is none or the space is continuous."""
        if not math.isfinite(self._size):
            return None
        size = int(self._size)
        first = self._random.randrange(size)
        for number in range(first, first + size):
            found = self._combination(number % size)
            if self._key(found) not in tried:
                return found
        return None

    def _combination(self, number: int) -> dict[str, Any]:
        found = {}
        for key, each in self._space.items():
            number, index = divmod(number, int(count_values(each)))
            if hasattr(each, "choices"):
                found[key] = each.choices[index]
            else:
                found[key] = min(each.low + index * (each.step or 0), each.high)  # rounding may exceed `high`
        return found

    def _key(self, params: Params) -> Sequence[str]:
        return tuple(rounded(params[key]) for key in self._space)

    @property
    def _size(self) -> float:
        return math.prod(map(count_values, self._space.values()))


def count_values(distribution: Any) -> float:
    if hasattr(distribution, "choices"):
        return len(distribution.choices)
    if distribution.single():
        return 1
    if is_continuous(distribution):
        return math.inf
    return float(1 + round((distribution.high - distribution.low) / distribution.step))


def was_interrupted(trial: FrozenTrial) -> bool:
    """Return True if a trial must be repeated. If a failed trial has no reason, its process was killed."""
    attributes = trial.user_attrs
    return trial.state == TrialState.FAIL and (INTERRUPTED in attributes or "reason" not in attributes)
