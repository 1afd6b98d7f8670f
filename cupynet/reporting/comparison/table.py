"""The table of a comparison: columns for the terminal, files and the page, and the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupynet.core.errors import ConfigError
from cupynet.core.table import Column, column, setting_columns, shortened
from cupynet.core.wording import nearest, percent
from cupynet.reporting.comparison.groups import Comparison, Group

FRONT = "*"


def seconds(value: float) -> str:
    """Format a duration: `12.3 s`, `1,234 s`."""
    return f"{value:.1f} s" if value < 1000 else f"{value:,.0f} s"


def relative(value: float) -> str:
    """Format a drift, which may be small: `0.13 %`."""
    return f"{100 * value:.2g} %"


# name, title and format of each metric, most important first
FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("accuracy", "{split}\naccuracy", percent),
    ("accuracy_min", "min", percent),
    ("accuracy_max", "max", percent),
    ("train_s", "train\ntime", seconds),
    ("images_per_s", "images/s", "{:,.0f}".format),
    ("speed_up", "speed-\nup", "{:.2f}".format),
    ("time_to", "time to\n{target:.4g}", seconds),
    ("loss", "test\nloss", "{:.4g}".format),
    ("efficiency", "effi-\nciency", percent),
    ("drift", "last\ndrift", relative),
)


def columns(comparison: Comparison, groups: Sequence[Group]) -> list[Column]:
    """Return all columns, with one row for each group, followed by rows for runs without a result."""
    rows = [*groups, *comparison.others]
    names = [row.runs[0].name + f" ({len(row.runs)} runs)" * (len(row.runs) > 1) for row in rows]
    result = [
        column("run", names, right=False),
        column("front", [FRONT if row.front else "" for row in rows], title=""),
    ]
    result += setting_columns({key: [row.settings[key] for row in rows] for key in comparison.varied})
    if any(len(row.runs) > 1 for row in rows):
        result.append(column("seeds", [len(row.runs) for row in rows], title="runs"))
    for name, title, form in FIGURES:
        values = [row.figures.get(name) for row in rows]
        if any(value is not None for value in values):
            title = title.format(split=comparison.split, target=comparison.target)
            result.append(column(name, values, form, title))
    result.append(column("state", [row.runs[0].trouble or "finished" for row in rows], right=False))
    result.append(column("folder", ["; ".join(str(run.folder) for run in row.runs) for row in rows], right=False))
    return result


def in_order(comparison: Comparison, by: str | None) -> list[Group]:
    """Sort the groups by a column, in descending order if its name has the prefix `-`. The default is `-accuracy`.

    Groups without a value come last. Raise ConfigError if there is no such column.
    """
    name = "accuracy" if by is None else by.removeprefix("-")
    values = {column.key: column.values for column in columns(comparison, comparison.groups)}
    values |= {short: values[key] for key, short in shortened(comparison.varied).items()}
    if name not in values:
        if by is None:
            return comparison.groups
        raise ConfigError(f"--sort {by}: no such column{nearest(name, values)}")
    rows = list(zip(comparison.groups, values[name], strict=False))  # runs without a result come after these
    sortable = [(group, _sortable(value)) for group, value in rows if value is not None]
    sortable.sort(key=lambda row: row[1], reverse=by is None or by != name)
    return [*(group for group, _ in sortable), *(group for group, value in rows if value is None)]


def _sortable(value: Any) -> tuple[int, float, str]:
    """Return a sort key that puts numbers before text."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, str(value)
