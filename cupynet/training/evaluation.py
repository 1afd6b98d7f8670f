"""Evaluation of a classifier, with metrics similar to Deeplearning4j's Evaluation.

Macro averages weight all classes equally and omit classes whose metric is 0/0. With two classes, both are included,
whereas Deeplearning4j reports only the second. F1 is 2 tp / (2 tp + fp + fn), as in scikit-learn. Deeplearning4j's F1
omits classes without precision or recall, which favors a network that always predicts one class.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupynet.core import notebook
from cupynet.core.checks import integer, one_of, without_prefix
from cupynet.core.errors import ConfigError
from cupynet.core.files import for_json
from cupynet.core.terminal import printable
from cupynet.core.wording import counted, one_line, percent, shown
from cupynet.training.metrics import CLASS_FIGURES, Metric, Metrics, metrics_of, ranks

FEW_CLASSES = 25  # maximum number of classes for which the confusion matrix is printed and written to the history
MAX_MISTAKES = 24
SHORT = {"mean_absolute_error": "MAE", "r2": "R2"}  # names in log lines


class Mistake(NamedTuple):
    """A misclassified sample. `doubt` is the negated score of `guess`, so that confident mistakes sort first."""

    doubt: float
    sample: int
    label: int
    guess: int


class Evaluation:
    """Classification metrics, accumulated over batches and merged across workers.

    The predicted class has the highest score; the lower index wins a tie. A sample is a top-N hit if fewer than N
    classes rank before its true class. A sample with a NaN score counts as wrong: in the support and recall of its true
    class and in `undecided`, but in no column of the confusion matrix. Metrics that are 0/0 are NaN. Counts are exact,
    but the last bits of the loss depend on how samples are split into batches.

    Args:
        classes, top_n: the number of classes, and the N of the top-N accuracy.
        metrics: see `TrainingOptions`.
        columns: number of targets per sample, for regression.

    Attributes:
        FIGURES: names of the built-in metrics.
        SHOWN: names of the figures written to the history.
        mistakes: up to 24 misclassified samples, those with the highest scores. After `validation_split`, their
            indices refer to the arrays that were split.
    """

    FIGURES: tuple[str, ...] = CLASS_FIGURES
    SHOWN: tuple[str, ...] = ("accuracy", "loss")

    def __init__(self, classes: int, top_n: int = 3, metrics: Sequence[Metric] = (), *, columns: int = 0) -> None:
        self._extra = Metrics(metrics_of(metrics, classifies=not columns), columns)
        self.classes = classes = integer("Evaluation classes", classes, 1)
        self.top_n = integer("Evaluation top_n", top_n, 1)
        self.confusion: NDArray[np.int64] = np.zeros((classes, classes), np.int64)  # rows = actual, columns = predicted
        self.undecided: NDArray[np.int64] = np.zeros(classes, np.int64)  # samples with NaN scores, per actual class
        self.top_n_hits = 0
        self.mistakes: list[Mistake] = []
        self.loss_sum = 0.0

    def add(self, scores: ArrayLike, targets: ArrayLike, losses: ArrayLike, samples: ArrayLike | None = None) -> None:
        """Add a batch.

        Args:
            scores: (N, classes); a higher score means a more probable class.
            targets: class indices (N,), or probabilities (N, classes), of which the largest marks the true class.
            losses: (N,).
            samples: sample indices in the data set, (N,). If omitted, no mistakes are recorded.
        """
        score = np.asarray(scores, np.float64)  # (N, classes)
        target, loss = self._indices(np.asarray(targets)), np.asarray(losses, np.float64)  # (N,)
        if target.ndim != 1 or score.shape != (len(target), self.classes) or loss.shape != target.shape:
            raise ConfigError(
                f"Evaluation needs scores (N, {self.classes}), targets (N,) and losses (N,), "
                f"got {score.shape}, {target.shape} and {loss.shape}"
            )
        self._extra.add(score, target)
        decided = ~np.isnan(score).any(axis=1)  # (N,)
        self.undecided += np.bincount(target[~decided], minlength=self.classes)
        score, decided_target = score[decided], target[decided]

        predicted = score.argmax(axis=1)  # the first class wins a tie
        np.add.at(self.confusion, (decided_target, predicted), 1)

        self.top_n_hits += int((ranks(score, decided_target) < self.top_n).sum())
        self.loss_sum += float(loss.sum())

        if samples is not None:
            wrong = np.flatnonzero(predicted != decided_target)
            doubt = -score[wrong, predicted[wrong]]
            columns = doubt, np.asarray(samples)[decided][wrong], decided_target[wrong], predicted[wrong]
            self._remember([Mistake(*row) for row in zip(*(column.tolist() for column in columns), strict=True)])

    def _indices(self, targets: NDArray[Any]) -> NDArray[np.int64]:
        found = targets.argmax(axis=1) if targets.ndim == 2 else targets
        if found.size and (found.dtype.kind not in "biu" or not 0 <= found.min() <= found.max() < self.classes):
            reason = f"must be class indices from 0 to {self.classes - 1}"
            raise ConfigError(reason, "Evaluation targets", shown(found.tolist()))
        return found.astype(np.int64)

    def _remember(self, mistakes: list[Mistake]) -> None:
        self.mistakes = heapq.nsmallest(MAX_MISTAKES, self.mistakes + mistakes)

    def pack(self) -> NDArray[np.float64]:
        """Return all counts and the sum of losses as a float64 vector (V,), which is exact for counts below 2**53."""
        cells = np.flatnonzero(self.confusion)  # with many classes, few pairs of classes occur
        counts = [self.undecided, [cells.size], cells, self.confusion.flat[cells]]
        mistakes = np.array(self.mistakes, np.float64).reshape(-1)
        return np.concatenate([self._extra.pack(), [self.top_n_hits, self.loss_sum], *counts, mistakes])

    def merge(self, packed: NDArray[np.float64]) -> None:
        """Add another evaluation with the same arguments, given as the vector (V,) that its `pack` returned."""
        packed = self._extra.merge(packed)
        self.top_n_hits, self.loss_sum = self.top_n_hits + int(packed[0]), self.loss_sum + float(packed[1])
        undecided, size, rest = np.split(packed[2:], [self.classes, self.classes + 1])
        cells, counts, mistakes = np.split(rest, [int(size[0]), 2 * int(size[0])])
        self.undecided += undecided.astype(np.int64)
        self.confusion.flat[cells.astype(np.int64)] += counts.astype(np.int64)
        rows = mistakes.reshape(-1, len(Mistake._fields)).tolist()
        self._remember([Mistake(doubt, *map(int, rest)) for doubt, *rest in rows])

    @property
    def samples(self) -> int:
        """The number of samples, including those with NaN scores."""
        return int(self.confusion.sum() + self.undecided.sum())

    @property
    def accuracy(self) -> float:
        """The fraction of correctly predicted samples, 0..1."""
        return _ratio(int(self.confusion.trace()), self.samples)

    @property
    def top_n_accuracy(self) -> float:
        """The fraction of samples whose true class is among the `top_n` classes with the highest scores, 0..1."""
        return _ratio(self.top_n_hits, self.samples)

    @property
    def precision(self) -> float:
        """The macro average of tp / predicted, omitting classes that were never predicted."""
        return self._macro("precision")

    @property
    def recall(self) -> float:
        """The macro average of tp / support, omitting classes without samples."""
        return self._macro("recall")

    @property
    def f1(self) -> float:
        """The macro average of 2 tp / (2 tp + fp + fn), omitting classes with neither samples nor predictions."""
        return self._macro("f1")

    @property
    def loss(self) -> float:
        """The mean loss over all samples; non-finite if the loss of any sample is non-finite."""
        return _ratio(self.loss_sum, self.samples)

    @property
    def metrics(self) -> dict[str, float]:
        """The value of each metric, by name; NaN without samples."""
        return self._extra.values(self.samples, self.figure)

    def figure(self, name: str) -> float:
        """Return a figure such as `accuracy`, or one of `metrics`. The name may begin with `validation_` or `val_`."""
        figures = (*self.FIGURES, *self._extra.names)
        name = one_of("figure", without_prefix(name, figures), figures)
        return float(getattr(self, name)) if name in self.FIGURES else self.metrics[name]

    def figures(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Return the named figures, by default `FIGURES`, and all `metrics`."""
        return {name: self.figure(name) for name in (self.FIGURES if names is None else names)} | self.metrics

    def brief(self) -> list[str]:
        """Return the figures in `SHOWN` and all `metrics` as formatted strings."""
        figures = self.figures(self.SHOWN).items()
        return [
            percent(value) if name == "accuracy" else f"{SHORT.get(name, name)} {value:.4g}" for name, value in figures
        ]

    def _macro(self, figure: str) -> float:
        defined = [row[figure] for row in self.per_class() if not math.isnan(row[figure])]
        return _ratio(math.fsum(defined), len(defined))

    def per_class(self) -> list[dict[str, Any]]:
        """Return a dictionary per class: `class`, `precision`, `recall`, `f1` (NaN if 0/0), `support`, `predicted`."""
        hits = self.confusion.diagonal().tolist()
        supports = (self.confusion.sum(axis=1) + self.undecided).tolist()
        predictions = self.confusion.sum(axis=0).tolist()
        rows: list[dict[str, Any]] = []
        for index, (hit, support, predicted) in enumerate(zip(hits, supports, predictions, strict=True)):
            precision, recall = _ratio(hit, predicted), _ratio(hit, support)
            figures = {"precision": precision, "recall": recall, "f1": _ratio(2 * hit, support + predicted)}
            rows.append({"class": index, **figures, "support": support, "predicted": predicted})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dictionary; non-finite numbers become None."""
        plain = {
            "samples": self.samples,
            "classes": self.classes,
            "top_n": self.top_n,
            **{name: getattr(self, name) for name in self.FIGURES},
            "metrics": self.metrics,
            "undecided": int(self.undecided.sum()),
            "per_class": self.per_class(),
            "confusion": self.confusion.tolist(),
            "mistakes": [
                {"sample": sample, "label": label, "guess": guess, "confidence": -doubt}
                for doubt, sample, label, guess in self.mistakes
            ],
        }
        return for_json(plain)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self.stats()

    def _repr_html_(self) -> str:
        figures = self.figures([name for name in self.FIGURES if name != "top_n_accuracy"])
        cells = [f"{self.samples:,}", *(f"{value:.4f}" for value in figures.values())]
        return notebook.html_table(("samples", *figures), [cells])

    def plot(self, names: Sequence[str] = ()) -> Any:
        """Return a matplotlib figure of the confusion matrix. `names` are the class names."""
        drawn, (axes,) = notebook.figure(1)
        notebook.matrix(axes, self.confusion, list(names) or [str(each) for each in range(self.classes)])
        return drawn

    def stats(self, names: Sequence[str] = ()) -> str:
        """Return a text report: the figures, a row for each class, and for at most 25 classes the confusion matrix."""
        named = [f"  {printable(one_line(name))}" for name in names[: self.classes]]
        named += [""] * (self.classes - len(named))
        parts = [self._summary(), self._class_table(named)]
        if self.classes <= FEW_CLASSES:
            parts.append(self._matrix(named))
        return "\n\n".join("\n".join(part) for part in parts)

    def _summary(self) -> list[str]:
        figures = {"Accuracy": self.accuracy}
        if 1 < self.top_n < self.classes:
            figures[f"Top {self.top_n} Accuracy"] = self.top_n_accuracy
        figures |= {"Precision": self.precision, "Recall": self.recall, "F1 Score": self.f1}
        lines = [
            f"{'Evaluation Metrics':=^66}",
            f" {'# of classes:':<17}{self.classes}",
            f" {'# of samples:':<17}{self.samples}",
            f" {'Loss:':<17}{self.loss:.6g}",
            *(f" {label + ':':<17}{value:.4f}" for label, value in (figures | self.metrics).items()),
            "Precision, recall & F1: macro-averaged (equally weighted classes)",
        ]
        rows = self.per_class()
        for figure, reason in (("precision", "predictions"), ("recall", "samples")):
            if omitted := sum(math.isnan(row[figure]) for row in rows):
                lines.append(f"{figure.capitalize()} omits {counted(omitted, 'class')} without {reason}")
        if self.undecided.any():
            lines.append(
                f"Warning: {self.undecided.sum()} of {self.samples} samples have NaN scores and count as wrong"
            )
        return lines

    def _class_table(self, named: list[str]) -> list[str]:
        lines = [f"{'class':>6}{'precision':>11}{'recall':>9}{'F1':>9}{'support':>9}"]
        for row, name in zip(self.per_class(), named, strict=True):
            precision, recall, f1 = (
                "-" if math.isnan(row[f]) else f"{row[f]:.4f}" for f in ("precision", "recall", "f1")
            )
            lines.append(f"{row['class']:>6}{precision:>11}{recall:>9}{f1:>9}{row['support']:>9}{name}")
        return lines

    def _matrix(self, named: list[str]) -> list[str]:
        width = max(len(str(self.confusion.max())), len(str(self.classes - 1))) + 1
        head = "".join(f"{index:>{width}}" for index in range(self.classes))
        rows = enumerate(zip(self.confusion.tolist(), named, strict=True))
        lines = ["".join(f"{n:>{width}}" for n in row) + f" | {i}{name}" for i, (row, name) in rows]
        how_to_read = "Rows: actual class, columns: predicted class"
        return [f"{'Confusion Matrix':=^66}", head, "-" * len(head), *lines, how_to_read]


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else math.nan
