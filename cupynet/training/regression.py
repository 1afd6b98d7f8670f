from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cupynet.core import notebook
from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError
from cupynet.core.files import for_json
from cupynet.core.wording import counted
from cupynet.training.evaluation import Evaluation
from cupynet.training.metrics import NUMBER_FIGURES, Floats, Metric

MAX_POINTS = 500  # points in the plot


def evaluation_of(classes: int, metrics: Sequence[Metric], *, classifies: bool, binary: bool) -> Evaluation:
    return Evaluation(classes, metrics=metrics) if classifies else RegressionEvaluation(classes, metrics, binary=binary)


class RegressionEvaluation(Evaluation):
    """Regression metrics, accumulated over batches and merged across workers. Classification metrics are NaN.

    Means and squared deviations of the targets are merged with the algorithm of Chan, Golub and LeVeque (1979), so that
    R2 is precise for targets far from zero. The order of batches changes the last bits of the results.

    Args:
        targets: number of targets per sample, T.
        metrics: see `TrainingOptions`.
        binary: True to also compute the accuracy: the fraction of predictions on the same side of 1/2 as their targets,
            like `BinaryAccuracy` in Keras.
    """

    FIGURES: tuple[str, ...] = NUMBER_FIGURES
    SHOWN: tuple[str, ...] = NUMBER_FIGURES

    def __init__(self, targets: int, metrics: Sequence[Metric] = (), *, binary: bool = False) -> None:
        if binary:
            self.FIGURES = self.SHOWN = ("accuracy", *NUMBER_FIGURES)
        super().__init__(1, 1, metrics, columns=integer("RegressionEvaluation targets", targets, 1))
        self.classes, self.targets = 0, targets
        self._samples = 0
        # (T,) each: sums of absolute errors, squared errors and hits; means and squared deviations of the targets
        self._errors, self._squares, self._hits, self._means, self._deviations = np.zeros((5, targets))
        self._points: Floats = np.empty((0, 1 + 2 * targets))  # sample, targets, predictions

    def add(self, scores: ArrayLike, targets: ArrayLike, losses: ArrayLike, samples: ArrayLike | None = None) -> None:
        """Add a batch: predictions and targets (N, T), losses (N,), and sample indices (N,), which `plot` requires."""
        score, target, loss = (np.asarray(each, np.float64) for each in (scores, targets, losses))
        if target.shape != (len(loss), self.targets) or score.shape != target.shape or loss.ndim != 1:
            raise ConfigError(
                f"RegressionEvaluation needs scores and targets (N, {self.targets}) and losses (N,), "
                f"got {score.shape}, {target.shape} and {loss.shape}"
            )
        if not len(loss):
            return
        self._extra.add(score, target)
        self.loss_sum += float(loss.sum())
        mean, error = target.mean(axis=0), score - target
        hits = ((score > 0.5) == (target > 0.5)).sum(axis=0)
        sums = abs(error).sum(axis=0), (error**2).sum(axis=0), hits
        self._merge(len(loss), *sums, mean, ((target - mean) ** 2).sum(axis=0))
        if samples is not None:
            self._keep(np.column_stack([np.asarray(samples, np.float64), target, score]))

    def _merge(
        self, samples: int, errors: Floats, squares: Floats, hits: Any, means: Floats, deviations: Floats
    ) -> None:
        whole, apart = self._samples + samples, means - self._means
        self._errors, self._squares, self._hits = self._errors + errors, self._squares + squares, self._hits + hits
        self._deviations = self._deviations + deviations + apart**2 * (self._samples * samples / whole)
        self._means = self._means + apart * (samples / whole)
        self._samples = whole

    def _keep(self, points: Floats) -> None:
        whole = np.concatenate([self._points, points])
        self._points = whole[np.argsort(whole[:, 0], kind="stable")[:MAX_POINTS]]

    def pack(self) -> Floats:
        sums = self._errors, self._squares, self._hits, self._means, self._deviations
        return np.concatenate([self._extra.pack(), [self._samples, self.loss_sum], *sums, self._points.reshape(-1)])

    def merge(self, packed: Floats) -> None:
        rest = self._extra.merge(packed)
        self.loss_sum += float(rest[1])
        sums, points = np.split(rest[2:], [5 * self.targets])
        if rest[0]:
            self._merge(int(rest[0]), *sums.reshape(5, self.targets))
        self._keep(points.reshape(-1, self._points.shape[1]))

    @property
    def samples(self) -> int:
        return self._samples

    @property
    def accuracy(self) -> float:
        """The fraction of correct predictions, 0..1; NaN unless `binary`."""
        binary = self._samples and "accuracy" in self.FIGURES
        return float(self._hits.mean() / self._samples) if binary else np.nan

    top_n_accuracy = precision = recall = f1 = property(lambda self: np.nan)

    @property
    def mean_absolute_error(self) -> float:
        """The mean of |prediction - target| over samples and targets."""
        return float(self._errors.mean() / self._samples) if self._samples else np.nan

    @property
    def r2(self) -> float:
        """The coefficient of determination, averaged over the targets; NaN for fewer than two samples.

        For a constant target it is 1 if all predictions are exact, otherwise 0, as in scikit-learn.
        """
        if self._samples < 2:
            return np.nan
        varies = self._deviations != 0
        shares = self._squares / np.where(varies, self._deviations, 1)
        return float(np.where(varies, 1 - shares, np.where(self._squares != 0, 0, 1)).mean())

    def to_dict(self) -> dict[str, Any]:
        figures = self.figures(self.FIGURES)
        return for_json({"samples": self.samples, "targets": self.targets, **figures, "metrics": self.metrics})  # type: ignore[no-any-return]

    def stats(self, names: Sequence[str] = ()) -> str:
        """Return a text report. `names` is ignored."""
        lines = [f" {name + ':':<21}{value:.6g}" for name, value in self.figures().items()]
        title = f"{counted(self.targets, 'target')}, {counted(self.samples, 'sample')}"
        return "\n".join([f"{' Evaluation ':=^66}", f" {title}", *lines])

    def plot(self, names: Sequence[str] = ()) -> Any:
        """Return a matplotlib figure of predictions against targets, for 500 samples. `names` are target names."""
        drawn, axes = notebook.figure(self.targets)
        for target, ax in enumerate(axes):
            true, predicted = self._points[:, 1 + target], self._points[:, 1 + self.targets + target]
            name = names[target] if target < len(names) else f"target {target}" if self.targets > 1 else ""
            notebook.against(ax, true, predicted, name)
        return drawn
