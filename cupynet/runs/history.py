"""The history of a training run in columns, for plots and tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cupynet.core import notebook


def _form(text: str) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else format(value, text)


# columns of `History.rows` and their formats
SHOWN: dict[str, Callable[[Any], str]] = {
    "epoch": _form("d"),
    **{name: _form(".4g") for name in ("loss", "validation_loss", "test_loss")},
    **{name: _form(".4f") for name in ("accuracy", "validation_accuracy", "test_accuracy")},
    "learning_rate": _form(".3g"),
    "images_per_s": _form(",.0f"),
}
EVALUATED = ("validation_", "test_")  # prefixes of evaluation columns
# column names of earlier versions -> current names
FORMER = {"divergence": "drift", "divergence_by_layer": "drift_by_layer", "by_layer": "drift_by_layer"}


def present(row: Mapping[str, Any]) -> dict[str, Any]:
    """Rename columns of earlier versions in a stored row, summary or state."""
    return {FORMER.get(name, name): value for name, value in row.items()}


@dataclass(frozen=True)
class History(Mapping[str, list[Any]]):
    """The history of training, as lists of values that are named as in history.jsonl. Missing values are None.

    It is a read-only mapping of the columns of `epochs`. A name may begin with `val_` instead of `validation_`.

        history = wrapper.fit(x, y, epochs=5)
        history.plot()
        pandas.DataFrame(history.epochs)  # pandas does not accept the history itself

    Attributes:
        epochs: one value per complete epoch: training `loss` and `accuracy`, `epoch`, `test_accuracy`, `test_loss`,
            `learning_rate`, `images_per_s`, `drift` (see `EpochRecord`) and others; with validation data also
            `validation_accuracy` and `validation_loss`. Other metrics have names such as `validation_macro_f1`.
            Regression has `validation_mean_absolute_error` and `validation_r2` instead of an accuracy.
        reports: one value per report: `iteration`, `loss`, `accuracy`, `learning_rate`, `images_per_s`, `drift` and
            others (see `IterationRecord`).
    """

    epochs: dict[str, list[Any]]
    reports: dict[str, list[Any]]

    def __getitem__(self, name: str) -> list[Any]:
        column = re.sub("^val_", "validation_", str(name))
        if column not in self.epochs:
            known = ", ".join(self.epochs) or "empty, because no epoch is complete"
            raise KeyError(f"there is no column {name}. The columns are {known}")
        return self.epochs[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)

    @property
    def history(self) -> dict[str, list[Any]]:
        """`epochs` with the names used by Keras, such as `val_loss`."""
        return {re.sub("^validation_", "val_", name): values for name, values in self.epochs.items()}

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> History:
        """Build columns from the history rows whose `kind` is `epoch` or `report`."""
        rows = list(rows)
        epochs, reports = ([row for row in rows if row.get("kind") == kind] for kind in ("epoch", "report"))
        return cls(_columns(epochs), _columns(reports))

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return a table of the main values of each epoch, as its header and its rows."""
        names = [name for name in SHOWN if name in self.epochs]
        names += [name for name in self.epochs if name.startswith(EVALUATED) and name not in SHOWN]
        forms = [SHOWN.get(name, _form(".4g")) for name in names]
        rows = zip(*(self.epochs[name] for name in names), strict=True)
        return names, [[form(value) for form, value in zip(forms, row, strict=True)] for row in rows]

    def __repr__(self) -> str:
        names, rows = self.rows()
        widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in (names, *rows)]
        return "\n".join(lines) if rows else "no complete epoch"

    def _repr_html_(self) -> str:
        return notebook.html_table(*self.rows())

    def plot(self) -> Any:
        """Plot loss, accuracy, drift and metrics by epoch, and return the matplotlib figure. May raise ImportError."""
        epochs = self.epochs
        panels = {
            "Loss": [name for name in epochs if name in ("loss", "validation_loss", "test_loss")],
            "Accuracy": [name for name in epochs if name.endswith("accuracy")],
            "Drift of the replicas": [name for name in epochs if name == "drift" and any(epochs[name])],
        }
        for name in epochs:
            prefix, _, metric = name.partition("_")
            if f"{prefix}_" in EVALUATED and metric != "loss" and not metric.endswith("accuracy"):
                panels.setdefault(metric, []).append(name)
        shown = {title: names for title, names in panels.items() if names}
        figure, axes = notebook.figure(max(len(shown), 1))
        for axis, (title, names) in zip(axes, shown.items(), strict=False):
            notebook.lines(axis, title, epochs["epoch"], {name: epochs[name] for name in names})
            axis.set_xlabel("epoch")
        return figure


def _columns(rows: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row if name != "kind")
    return {name: [row.get(name) for row in rows] for name in names}
