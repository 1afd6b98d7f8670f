"""How well a classifier does: the numbers of Deeplearning4j's Evaluation, in its words and by its rules.

Macro averages weight every class alike, for two classes too (there Deeplearning4j reports the second class alone). A
class whose precision is 0/0 (never predicted) or whose recall is 0/0 (absent from the labels) is left out of that
average; `stats()` says which. F1 is 2 tp / (2 tp + fp + fn), as scikit-learn has it: 0/0 only for a class that is both,
where Deeplearning4j leaves out either, and a network that always names one class looks good.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupynet.core.checks import counted, integer
from cupynet.core.errors import ConfigError, DataError

# Larger losses count as infinite, so that the sum of 10^8 finite ones is still a finite float64.
_HUGE = 1e300
FEW_CLASSES = 25  # of which the whole confusion matrix is shown, and stands in the rows of epochs
MOST_CONFUSIONS = 10  # that are told of more classes
MOST_MISTAKES = 24  # that an evaluation remembers
_PARTS = 48  # floats of 53 bits that an exact sum of float64 can need: their exponents span 2,100 bits


class Mistake(NamedTuple):
    """A sample that was predicted wrong. The one before another in order is the more confident.

    Attributes:
        doubt: minus the score of what was predicted.
        sample: which of the data set. label, guess: what it is, and what was predicted.
    """

    doubt: float
    sample: int
    label: int
    guess: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON; `confidence` is the score of what was predicted."""
        return {"sample": self.sample, "label": self.label, "guess": self.guess, "confidence": _json(-self.doubt)}


class Evaluation:
    """Counts of what was predicted for what was true, over any number of batches, workers and merges.

    Counts are integers and the losses are summed without rounding, so every figure is the same however the samples
    were split, and `merge` gives the same bits in any order.

    The predicted class is the one with the highest score, the lowest index among equals. The rank of the true class is
    the number of strictly higher scores plus the number of equal scores at a smaller index; a sample is a top-N hit if
    this rank is below N, and rank 0 is what being predicted means. A sample with a NaN among its scores predicts
    nothing: it is wrong, it counts in the support and recall of its true class and in no column of the confusion
    matrix, and `undecided` and `stats()` report it.

    `mistakes` are the samples predicted wrong with the highest scores, at most 24 of them, the highest first, and the
    lower sample among equals; those that nobody numbered and the undecided are not among them.

    Figures that are 0/0 are NaN. Not safe for several threads: give each worker its own and merge in rank order.
    """

    def __init__(self, classes: int, top_n: int = 3) -> None:
        """classes: how many there are; top_n: among how many of the best scores the true class must be for a hit."""
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

        samples: which of the data set these are, (N,); without them no mistakes are remembered.
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
        self._loss_not_finite += _sum_not_finite(loss[~finite])

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
                f"Evaluation of {counted(self.classes, 'class')} needs scores (N, {self.classes}), targets (N,) and "
                f"losses (N,), got {score.shape}, {target.shape} and {loss.shape}"
            )
        if n and not np.issubdtype(target.dtype, np.integer):
            raise ConfigError(
                f"Evaluation needs class indices as targets, got {target.dtype}: convert one-hot rows by argmax"
            )
        if n and not (target.min() >= 0 and target.max() < self.classes):
            wrong = int(target.min() if target.min() < 0 else target.max())
            raise DataError(
                f"Evaluation: label {wrong} is not one of the classes 0 to {self.classes - 1}: check the labels"
            )

    def merge(self, other: Evaluation) -> None:
        """Add the samples of `other`; exact, so the order of merges changes no bit."""
        if (other.classes, other.top_n) != (self.classes, self.top_n):
            raise ConfigError(
                f"cannot merge an Evaluation of {counted(other.classes, 'class')} (top {other.top_n}) "
                f"into one of {self.classes} (top {self.top_n}): make both alike"
            )
        self.confusion += other.confusion
        self.undecided += other.undecided
        self.top_n_hits += other.top_n_hits
        self.mistakes = heapq.nsmallest(MOST_MISTAKES, self.mistakes + other.mistakes)
        self._loss_sum = _exact_sum(self._loss_sum + other._loss_sum)
        self._loss_not_finite += other._loss_not_finite

    def pack(self) -> NDArray[np.float64]:
        """All counts as one vector (V,), V following from the number of classes: what workers send each other.

        Exact, as counts stay below 2**53.
        """
        parts = np.zeros(_PARTS)
        parts[: len(self._loss_sum)] = self._loss_sum
        mistakes = np.full((MOST_MISTAKES, len(Mistake._fields)), -1.0)
        for row, mistake in enumerate(self.mistakes):
            mistakes[row] = mistake
        counts = (self.undecided, self.confusion.reshape(-1), parts, mistakes.reshape(-1))
        return np.concatenate([[self.top_n_hits, self._loss_not_finite], *counts]).astype(np.float64)

    @classmethod
    def unpack(cls, vector: NDArray[np.float64], classes: int, top_n: int = 3) -> Evaluation:
        """The evaluation that `pack` packed as `vector` (V,), of as many classes and the same `top_n`."""
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
        """How many samples were counted, the undecided ones too."""
        return int(self.confusion.sum() + self.undecided.sum())

    @property
    def accuracy(self) -> float:
        """The fraction of all samples that was predicted right, 0..1."""
        return _ratio(int(self.confusion.trace()), self.samples)

    @property
    def top_n_accuracy(self) -> float:
        """The fraction of all samples whose true class is among the `top_n` highest scores, 0..1."""
        return _ratio(self.top_n_hits, self.samples)

    @property
    def precision(self) -> float:
        """Macro-averaged: the fraction right of what was predicted as a class; not over classes never predicted."""
        return self._macro("precision")

    @property
    def recall(self) -> float:
        """Macro-averaged: the fraction of a class's samples predicted as it; not over classes without samples."""
        return self._macro("recall")

    @property
    def f1(self) -> float:
        """Macro-averaged 2 tp / (2 tp + fp + fn); not over classes that have neither samples nor predictions."""
        return self._macro("f1")

    @property
    def loss(self) -> float:
        """The mean loss of all samples; NaN or infinite if one of them was."""
        return _ratio(math.fsum(self._loss_sum) + self._loss_not_finite, self.samples)

    def _macro(self, figure: str) -> float:
        defined = [row[figure] for row in self.per_class() if not math.isnan(row[figure])]
        return _ratio(math.fsum(defined), len(defined))

    def per_class(self) -> list[dict[str, Any]]:
        """One row per class: class, precision, recall, f1 (NaN where 0/0), and samples as support and predicted."""
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
        """Everything as plain values for JSON; what is not a finite number is None there."""
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
        """The report to print: the figures, what to beware of, a line per class and the confusion matrix.

        Of more than 25 classes the most frequent confusions stand in place of the matrix.

        names: of the classes, which stand beside their numbers then.
        """
        rows = self.per_class()
        return "\n\n".join(
            "\n".join(part)
            for part in (self._summary(rows), _warnings(rows, self), _class_table(rows, names), self._matrix(names))
            if part
        )

    def _summary(self, rows: list[dict[str, Any]]) -> list[str]:
        def line(label: str, value: float, figure: str = "") -> str:
            out = sum(math.isnan(row[figure]) for row in rows) if figure else 0
            note = f"   ({counted(out, 'class')} excluded from average)" if out else ""
            return f" {label + ':':<17}{value:.4f}{note}"

        top_n = [line(f"Top {self.top_n} Accuracy", self.top_n_accuracy)] if 1 < self.top_n < self.classes else []
        return [
            _title("Evaluation Metrics"),
            f" {'# of classes:':<17}{self.classes}",
            f" {'# of samples:':<17}{self.samples}",
            f" {'Loss:':<17}{self.loss:.6g}",
            line("Accuracy", self.accuracy),
            *top_n,
            line("Precision", self.precision, "precision"),
            line("Recall", self.recall, "recall"),
            line("F1 Score", self.f1, "f1"),
            f"Precision, recall & F1: macro-averaged (equally weighted avg. of {counted(self.classes, 'class')})",
        ]

    def _matrix(self, names: Sequence[str]) -> list[str]:
        if self.classes > FEW_CLASSES:
            return self._confusions(names)
        width = max(len(str(self.confusion.max())), len(str(self.classes - 1))) + 1
        head = "".join(f"{index:>{width}}" for index in range(self.classes))
        lines = [
            "".join(f"{n:>{width}}" for n in row) + f" | {i}{_named(names, i)}"
            for i, row in enumerate(self.confusion.tolist())
        ]
        how_to_read = "Rows are the actual class, columns the predicted class"
        return [_title("Confusion Matrix"), head, "-" * len(head), *lines, how_to_read]

    def _confusions(self, names: Sequence[str]) -> list[str]:
        """What is taken for what most often, the first by number among equals."""
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        most = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSIONS].tolist()
        found = [(int(wrong.flat[place]), *divmod(place, self.classes)) for place in most if wrong.flat[place]]
        width = max((len(str(count)) for count, *_ in found), default=0) + 1
        lines = [f"{count:>{width}} of {i}{_named(names, i)}, seen as {j}{_named(names, j)}" for count, i, j in found]
        left_out = f"The matrix of {self.classes} classes is left out: to_dict() and evaluate --json have it"
        return [_title("Most Frequent Confusions"), *(lines or [" none"]), left_out]


def _title(text: str) -> str:
    return f"{text:=^66}"


def _warnings(rows: list[dict[str, Any]], evaluation: Evaluation) -> list[str]:
    """What a reader of the averages must know: classes they leave out, and samples whose scores were NaN."""
    lines: list[str] = []
    causes: tuple[tuple[str, str, Callable[[dict[str, Any]], bool]], ...] = (
        ("never predicted by the model", "precision", lambda row: not row["predicted"]),
        ("absent from the labels", "recall", lambda row: not row["support"]),
        ("neither predicted nor in the labels", "F1", lambda row: not (row["predicted"] or row["support"])),
    )
    for cause, average, holds in causes:
        found = [row["class"] for row in rows if holds(row)]
        if found:
            verb = "was" if len(found) == 1 else "were"
            names = ", ".join(map(str, found))
            lines.append(
                f"Warning: {counted(len(found), 'class')} {verb} {cause}, excluded from average {average}: {names}"
            )
    undecided = int(evaluation.undecided.sum())
    if undecided:
        lines.append(
            f"Warning: {undecided} of {evaluation.samples} samples had NaN among their scores and count as wrong"
        )
    return lines


def _named(names: Sequence[str], number: int) -> str:
    """The name of a class behind its number, as it can be printed; nothing where it has none."""
    if number >= len(names):
        return ""
    return "  " + "".join(each if each.isprintable() else "?" for each in names[number])


def _class_table(rows: list[dict[str, Any]], names: Sequence[str]) -> list[str]:
    lines = [f"{'class':>6}{'precision':>11}{'recall':>9}{'F1':>9}{'support':>9}"]
    for row in rows:
        precision, recall, f1 = ("-" if math.isnan(row[f]) else f"{row[f]:.4f}" for f in ("precision", "recall", "f1"))
        lines.append(
            f"{row['class']:>6}{precision:>11}{recall:>9}{f1:>9}{row['support']:>9}{_named(names, row['class'])}"
        )
    return lines


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else math.nan


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sum_not_finite(values: NDArray[np.float64]) -> float:
    """NaN if there is one or if both infinities occur, else the infinity that occurs, else 0."""
    above, below = bool((values > 0).any()), bool((values < 0).any())
    if np.isnan(values).any() or (above and below):
        return math.nan
    return math.inf if above else -math.inf if below else 0.0


def _exact_sum(values: list[float]) -> list[float]:
    """A few floats with exactly the sum of `values`, largest first: the rounded sum, what it lacks, what that lacks ...

    After Shewchuk (1997), "Adaptive precision floating-point arithmetic"; the correctly rounded sums are math.fsum's.
    """
    parts: list[float] = []
    while rest := math.fsum(values + [-part for part in parts]):
        parts.append(rest)
    return parts
