"""The history of a training run as columns, for plots and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# column of an earlier version -> its present name
FORMER = {"divergence": "drift", "divergence_by_layer": "drift_by_layer"}


def present(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored row or summary with the present names of its columns."""
    return {FORMER.get(name, name): value for name, value in row.items()}


@dataclass(frozen=True)
class Columns:
    """Name -> list of values, with the names of history.jsonl. A missing value is None.

        pandas.DataFrame(wrapper.history.epochs)

    Attributes:
        epochs: a value for each complete epoch: `epoch`, `loss`, `test_accuracy`, `test_loss`, `learning_rate`,
            `images_per_s` and others; with validation images `validation_accuracy` and `validation_loss`.
        reports: a value for each report: `iteration`, `loss`, `learning_rate`, `images_per_s`, `drift` and others,
            see `IterationRecord`.
    """

    epochs: dict[str, list[Any]]
    reports: dict[str, list[Any]]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Columns:
        """Return the columns of rows, whose `kind` is epoch or report."""
        kept = list(rows)
        epochs, reports = ([row for row in kept if row.get("kind") == kind] for kind in ("epoch", "report"))
        return cls(_columns(epochs), _columns(reports))


def _columns(rows: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row if name != "kind")
    return {name: [row.get(name) for row in rows] for name in names}
