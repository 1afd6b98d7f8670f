"""Evaluation of a classifier: the figures of Deeplearning4j's Evaluation.

Macro averages give every class the same weight, even if there are only two (Deeplearning4j reports only the second). A
class whose precision is 0/0 (never predicted) or whose recall is 0/0 (no samples) is left out of that average;
`stats()` says which. F1 is 2 tp / (2 tp + fp + fn), as in scikit-learn. It is 0/0 only if both hold; Deeplearning4j
leaves out classes with either, which favours a network that always predicts one class.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupynet.core.checks import integer, one_line
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.terminal import printable

# Larger losses count as infinite, so that the sum of 10^8 finite ones is still a finite float64.
_HUGE = 1e300
FEW_CLASSES = 25  # up to which the confusion matrix is printed, and written to the history
MOST_MISTAKES = 24
_PARTS = 48  # floats of 53 bits that an exact sum of float64 can need: their exponents span 2,100 bits


class Mistake(NamedTuple):
    """A wrongly predicted sample; the most confident sorts first.

    Attributes:
        doubt: minus the score of the predicted class.
        sample: its number in the data set.
        label, guess: the true and the predicted class.
    """

    doubt: float
    sample: int
    label: int
    guess: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `confidence` is the score of the predicted class."""
        return {"sample": self.sample, "label": self.label, "guess": self.guess, "confidence": _json(-self.doubt)}


class Evaluation:
    """Counts of predictions, over any number of batches, workers and merges.

    Counts are integers and the losses are summed without rounding, so every figure is the same however the samples
    were split, and `merge` gives the same bits in any order.

    The predicted class has the highest score, the lowest index among equals. The rank of the true class is the number
    of higher scores plus the number of equal scores at a smaller index; a sample is a top-N hit if its rank is below N.
    A sample with a NaN among its scores is wrong: it counts in the support and recall of its true class and in
    `undecided`, in no column of the confusion matrix.

    `mistakes` are the at most 24 wrongly predicted samples with the highest scores. Figures that are 0/0 are NaN.
    """

    def __init__(self, classes: int, top_n: int = 3) -> None:
        """classes: their number; top_n: a hit has its true class among this many highest scores."""
        self.classes = classes = integer("Evaluation classes", classes, 1)
        self.top_n = integer("Evaluation top_n", top_n, 1)
        self.confusion: NDArray[np.int64] = np.zeros((classes, classes), np.int64)  # rows = actual, columns = predicted
        self.undecided: NDArray[np.int64] = np.zeros(classes, np.int64)  # per actual class: samples with NaN scores
        self.top_n_hits = 0
        self.mistakes: list[Mistake] = []
        self._loss_sum: list[float] = []  # an unevaluated sum of floats that is exactly the sum of all finite losses
        self._loss_not_finite = 0.0  # the sum of the others: 0, an infinity or NaN

    def add(self, scores: ArrayLike, targets: ArrayLike, losses: ArrayLike, samples: ArrayLike | None = None) -> None:
        """Count one batch: scores (N, classes), anything that grows with the probability; targets (N,); losses (N,).

        samples: their numbers in the data set, (N,); without them no mistakes are kept.
        """
        score = np.asarray(scores, np.float64)  # (N, classes); exact from every narrower type
        target = np.asarray(targets)  # (N,)
        loss = np.asarray(losses, np.float64)  # (N,)
        self._check(score, target, loss)
        if len(target) == 0:
            return
        target = target.astype(np.int64)
        decided = ~np.isnan(score).any(axis=1)  # (N,)
        self.undecided += np.bincount(target[~decided], minlength=self.classes)
        score, decided_target = score[decided], target[decided]

        predicted = score.argmax(axis=1)  # the first of the highest
        pairs = np.bincount(decided_target * self.classes + predicted, minlength=self.classes**2)
        self.confusion += pairs.reshape(self.classes, self.classes)

        if samples is not None:
            self._remember(score, decided_target, predicted, np.asarray(samples)[decided])

        own = np.take_along_axis(score, decided_target[:, None], axis=1)  # (N, 1)
        before = np.arange(self.classes) < decided_target[:, None]  # (N, classes)
        rank = ((score > own) | ((score == own) & before)).sum(axis=1)  # (N,)
        self.top_n_hits += int((rank < self.top_n).sum())

        finite = np.abs(loss) < _HUGE  # False for NaN too
        self._loss_sum = _exact_sum(self._loss_sum + loss[finite].tolist())
        self._loss_not_finite += sum(each * math.inf for each in loss[~finite].tolist())  # NaN for both infinities

    def _remember(
        self, score: NDArray[Any], target: NDArray[Any], predicted: NDArray[Any], samples: NDArray[Any]
    ) -> None:
        """Keep the most confident mistakes of a batch and of before."""
        wrong = np.flatnonzero(predicted != target)
        doubt = -score[wrong, predicted[wrong]]
        some = wrong[np.lexsort((samples[wrong], doubt))[:MOST_MISTAKES]]
        columns = (-score[some, predicted[some]], samples[some], target[some], predicted[some])
        found = [Mistake(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        self.mistakes = heapq.nsmallest(MOST_MISTAKES, self.mistakes + found)

    def _check(self, score: NDArray[Any], target: NDArray[Any], loss: NDArray[Any]) -> None:
        n = len(target) if target.ndim == 1 else -1
        if score.shape != (n, self.classes) or loss.shape != (n,):
            raise ConfigError(
                f"Evaluation needs scores (N, {self.classes}), targets (N,) and losses (N,), "
                f"got {score.shape}, {target.shape} and {loss.shape}"
            )
        if n and target.dtype.kind not in "iu":
            raise ConfigError(
                f"Evaluation needs class indices as targets, got {target.dtype}: use argmax of one-hot rows"
            )
        wrong = target[(target < 0) | (target >= self.classes)]
        if len(wrong):
            raise DataError(f"Evaluation: label {wrong[0]} is not one of the classes 0 to {self.classes - 1}")

    def merge(self, other: Evaluation) -> None:
        """Add the samples of `other`; exact, so the order of merges changes no bit."""
        if (other.classes, other.top_n) != (self.classes, self.top_n):
            raise ConfigError("cannot merge evaluations with different classes or top_n")
        self.confusion += other.confusion
        self.undecided += other.undecided
        self.top_n_hits += other.top_n_hits
        self.mistakes = heapq.nsmallest(MOST_MISTAKES, self.mistakes + other.mistakes)
        self._loss_sum = _exact_sum(self._loss_sum + other._loss_sum)
        self._loss_not_finite += other._loss_not_finite

    def pack(self) -> NDArray[np.float64]:
        """Return all counts as one vector (V,), which workers exchange. Exact: counts stay below 2**53."""
        parts = np.zeros(_PARTS)
        parts[: len(self._loss_sum)] = self._loss_sum
        mistakes = np.full((MOST_MISTAKES, len(Mistake._fields)), -1.0)
        for row, mistake in enumerate(self.mistakes):
            mistakes[row] = mistake
        counts = (self.undecided, self.confusion.reshape(-1), parts, mistakes.reshape(-1))
        return np.concatenate([[self.top_n_hits, self._loss_not_finite], *counts]).astype(np.float64)

    @classmethod
    def unpack(cls, vector: NDArray[np.float64], classes: int, top_n: int = 3) -> Evaluation:
        """Return the evaluation whose `pack` is `vector` (V,)."""
        found = cls(classes, top_n)
        found.top_n_hits, found._loss_not_finite = int(vector[0]), float(vector[1])
        ends = np.cumsum([classes, classes**2, _PARTS])
        undecided, confusion, parts, mistakes = np.split(vector[2:], ends)
        found.undecided = undecided.astype(np.int64)
        found.confusion = confusion.reshape(classes, classes).astype(np.int64)
        found._loss_sum = [part for part in parts.tolist() if part]
        rows = mistakes.reshape(MOST_MISTAKES, len(Mistake._fields)).tolist()
        found.mistakes = [Mistake(doubt, *map(int, rest)) for doubt, *rest in rows if rest[0] >= 0]
        return found

    @property
    def samples(self) -> int:
        """The number of samples, including the undecided ones."""
        return int(self.confusion.sum() + self.undecided.sum())

    @property
    def accuracy(self) -> float:
        """The fraction of samples predicted right, 0..1."""
        return _ratio(int(self.confusion.trace()), self.samples)

    @property
    def top_n_accuracy(self) -> float:
        """The fraction of samples whose true class is among the `top_n` highest scores, 0..1."""
        return _ratio(self.top_n_hits, self.samples)

    @property
    def precision(self) -> float:
        """The macro average of tp / predicted, without classes never predicted."""
        return self._macro("precision")

    @property
    def recall(self) -> float:
        """The macro average of tp / support, without classes that have no samples."""
        return self._macro("recall")

    @property
    def f1(self) -> float:
        """The macro average of 2 tp / (2 tp + fp + fn), without classes that have neither samples nor predictions."""
        return self._macro("f1")

    @property
    def loss(self) -> float:
        """The mean loss of all samples; NaN or infinite if one of them was."""
        return _ratio(math.fsum(self._loss_sum) + self._loss_not_finite, self.samples)

    def _macro(self, figure: str) -> float:
        defined = [row[figure] for row in self.per_class() if not math.isnan(row[figure])]
        return _ratio(math.fsum(defined), len(defined))

    def per_class(self) -> list[dict[str, Any]]:
        """Return a row per class: class, precision, recall, f1 (NaN if 0/0), support and predicted samples."""
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
        """Return plain values for JSON; a number that is not finite becomes None."""
        figures = ("accuracy", "top_n_accuracy", "precision", "recall", "f1", "loss")
        return {
            "samples": self.samples,
            "classes": self.classes,
            "top_n": self.top_n,
            **{name: _json(getattr(self, name)) for name in figures},
            "undecided": int(self.undecided.sum()),
            "per_class": [{name: _json(value) for name, value in row.items()} for row in self.per_class()],
            "confusion": self.confusion.tolist(),
            "mistakes": [mistake.to_dict() for mistake in self.mistakes],
        }

    def stats(self, names: Sequence[str] = ()) -> str:
        """Return the report to print: the figures, a line per class, and the confusion matrix of at most 25 classes.

        names: of the classes, printed beside their numbers.
        """
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
            *(f" {label + ':':<17}{value:.4f}" for label, value in figures.items()),
            "Precision, recall & F1: macro-averaged (all classes count alike)",
        ]
        for figure in ("precision", "recall", "f1"):
            undefined = [row["class"] for row in self.per_class() if math.isnan(row[figure])]
            if undefined:
                lines.append(f"Warning: the average {figure} excludes classes where it is 0/0: {undefined}")
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
        how_to_read = "Rows are the actual class, columns the predicted class"
        return [f"{'Confusion Matrix':=^66}", head, "-" * len(head), *lines, how_to_read]


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else math.nan


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _exact_sum(values: list[float]) -> list[float]:
    """Return a few floats with exactly the sum of `values`, largest first: the rounded sum, its error, and so on.

    After Shewchuk (1997), "Adaptive precision floating-point arithmetic"; the correctly rounded sums are math.fsum's.
    """
    parts: list[float] = []
    while rest := math.fsum(values + [-part for part in parts]):
        parts.append(rest)
    return parts
