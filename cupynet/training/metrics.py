"""Evaluation metrics, independent of batch size and number of workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupynet.core.checks import one_of
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown

Floats: TypeAlias = NDArray[np.float64]
Function: TypeAlias = Callable[[Any, Any], Any]
Metric: TypeAlias = str | Function

CLASS_FIGURES = ("accuracy", "top_n_accuracy", "precision", "recall", "f1", "loss")  # figures of `Evaluation`
NUMBER_FIGURES = ("loss", "mean_absolute_error", "r2")  # figures of `RegressionEvaluation`
ALIASES = {"macro_f1": "f1"}
TOP_K = re.compile(r"top_([1-9]\d*)_accuracy")


def metrics_of(metrics: Sequence[Metric], *, classifies: bool | None = None) -> dict[str, Metric]:
    """Return metrics by name. Raise ConfigError for unknown or duplicate names.

    classifies: True for classification, False for regression, or None to accept the metrics of both.
    """
    if not isinstance(metrics, list | tuple):
        raise ConfigError("must be a list of names and functions, such as ['macro_f1']", "metrics", shown(metrics))
    figures = [each for each in CLASS_FIGURES if each != "top_n_accuracy"]
    of_classes = [] if classifies is False else [*figures, *ALIASES, "top_5_accuracy"]
    of_numbers = [] if classifies else ["accuracy", *NUMBER_FIGURES]  # accuracy only for binary targets
    found: dict[str, Metric] = {}
    for each in metrics:
        name = each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__)
        if isinstance(each, str) and of_classes and (top := TOP_K.fullmatch(each)):
            each = partial(_hits, int(top[1]))
        elif isinstance(each, str):
            own = "; in Python, also a function (labels, scores)"
            one_of("metrics", each, dict.fromkeys([*of_classes, *of_numbers, *ALL]), own)
        elif not callable(each):
            raise ConfigError("must be names and functions (labels, scores)", "metrics", shown(each))
        if name in found or (callable(each) and name in (*CLASS_FIGURES, *NUMBER_FIGURES)):
            raise ConfigError(
                "another metric has this name. Rename the function, or remove one of them", "metrics", name
            )
        found[name] = each
    return found


def ranks(scores: Floats, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each target's rank (N,) in scores (N, C), from 0. Ties go to the lower index; NaN scores give C."""
    own = np.take_along_axis(scores, targets[:, None], axis=1)  # (N, 1)
    before = np.arange(scores.shape[1]) < targets[:, None]  # (N, C)
    rank = ((scores > own) | ((scores == own) & before)).sum(axis=1)
    rank[np.isnan(scores).any(axis=1)] = scores.shape[1]
    return rank  # type: ignore[no-any-return]


def _hits(k: int, targets: NDArray[np.int64], scores: Floats) -> NDArray[np.bool_]:
    return ranks(scores, targets) < k


def auc(targets: Any, scores: Floats) -> float:
    """Return the area under the ROC curve; for several classes or targets, the mean over one-versus-rest curves.

    It is computed from ranks (Mann and Whitney 1947), and equals roc_auc_score(average="macro", multi_class="ovr") in
    scikit-learn. It is NaN if a class has all samples or none, or if a score is NaN.

    Args:
        targets: class indices (N,), or targets (N, C), of which those above 0.5 are positive.
        scores: (N, C). With class indices and two classes, only the second column is used.
    """
    positive = targets > 0.5 if targets.ndim == 2 else targets[:, None] == np.arange(scores.shape[1])  # (N, C)
    if targets.ndim == 1 and scores.shape[1] == 2:
        scores, positive = scores[:, 1:], positive[:, 1:]
    return float(np.mean([_area(scores[:, c], positive[:, c]) for c in range(scores.shape[1])]))


def _area(score: Floats, positive: NDArray[np.bool_]) -> float:
    count = int(positive.sum())
    pairs = count * (len(score) - count)
    if not pairs or np.isnan(score).any():
        return np.nan
    _, index, ties = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(ties) - (ties - 1) / 2)[index]  # from 1; tied scores have their mean rank
    return float((rank[positive].sum() - count * (count + 1) / 2) / pairs)


ALL: Mapping[str, Callable[[Any, Floats], float]] = {"auc": auc}  # metrics that need all targets and scores


class Metrics:
    """The metrics of an evaluation. `columns` is the number of targets per sample, or 0 for class indices."""

    def __init__(self, metrics: Mapping[str, Metric], columns: int = 0) -> None:
        self._metrics, self._columns, self.names = metrics, columns, tuple(metrics)
        self._keeps = any(name in ALL for name in metrics)
        self._sums = {name: 0.0 for name, metric in metrics.items() if callable(metric)}
        self._kept: list[Floats] = []  # scores and targets, row by row
        self._known: dict[str, float] = {}  # metrics already computed from all rows

    def add(self, scores: Floats, targets: Any) -> None:
        for name in self._sums:
            self._sums[name] += _sum(name, self._metrics[name], scores, targets)
        if self._keeps:
            self._keep(np.column_stack([scores, targets]))

    def _keep(self, rows: Floats) -> None:
        self._kept, self._known = [*self._kept, rows], {}

    def pack(self) -> Floats:
        """Return all sums, and the kept scores and targets, as a vector that begins with its length."""
        kept = [rows.reshape(-1) for rows in self._kept]
        width = self._kept[0].shape[1] if kept else 0
        whole = np.concatenate([[0, width], [*self._sums.values()], *kept])
        whole[0] = len(whole)
        return whole

    def merge(self, packed: Floats) -> Floats:
        """Add the metrics packed at the beginning of a vector, and return the rest of the vector."""
        end, width = int(packed[0]), int(packed[1])
        sums, kept = np.split(packed[2:end], [len(self._sums)])
        self._sums = {name: own + float(more) for (name, own), more in zip(self._sums.items(), sums, strict=True)}
        if width:
            self._keep(kept.reshape(-1, width))
        return packed[end:]

    def values(self, samples: int, figure: Callable[[str], float]) -> dict[str, float]:
        return {name: self._value(name, samples, figure) for name in self._metrics}

    def _value(self, name: str, samples: int, figure: Callable[[str], float]) -> float:
        if name in self._sums:
            return self._sums[name] / samples if samples else np.nan
        if name not in ALL:
            return figure(ALIASES.get(name, name))
        if name not in self._known and self._kept:
            rows = np.concatenate(self._kept)
            last = rows.shape[1] - (self._columns or 1)
            self._known[name] = ALL[name](rows[:, last:] if self._columns else rows[:, last], rows[:, :last])
        return self._known.get(name, np.nan)


def _sum(name: str, metric: Any, scores: Floats, targets: Any) -> float:
    value = np.asarray(metric(targets.copy(), scores.copy()))
    if value.shape not in ((), (len(scores),)) or value.dtype.kind not in "biuf":
        found = f"{value.shape} of {value.dtype}"
        reason = f"'{name}' must return a number, or one for each of {len(scores)} examples, not {found}"
        raise ConfigError(reason, "metrics")
    return float(value.sum(dtype=np.float64)) if value.ndim else float(value) * len(scores)
