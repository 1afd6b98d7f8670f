"""A comparison as a table: its columns for the terminal, for files and for the page, and the order of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupynet.config.sweep_table import Column, heading, shortened
from cupynet.core.checks import nearest, percent
from cupynet.core.errors import ConfigError
from cupynet.reporting.comparison.groups import ABSENT, Comparison, Group

FRONT = "*"


def seconds(value: float) -> str:
    """Format a duration: 12.3 s, 1,234 s."""
    return f"{value:.1f} s" if value < 1000 else f"{value:,.0f} s"


# Name, title, format and weight of each figure. On a narrow terminal the lowest weights are left out first.
FIGURES: tuple[tuple[str, str, Callable[[Any], str], int], ...] = (
    ("accuracy", "{split}\naccuracy", percent, 9),
    ("accuracy_range", "over\nseeds", str, 5),
    ("loss", "test\nloss", "{:.4g}".format, 2),
    ("images_per_s", "images/s", "{:,.0f}".format, 6),
    ("speed_up", "speed-\nup", "{:.2f}".format, 5),
    ("efficiency", "efficiency", percent, 1),
    ("time_to", "time to\n{target:.4g}", seconds, 4),
    ("train_s", "train\ntime", seconds, 7),
)


def columns(comparison: Comparison, groups: Sequence[Group]) -> list[Column]:
    """Return all columns, with a row for each group, followed by the runs without a result."""
    rows, short, found = [*groups, *comparison.others], shortened(comparison.varied), []

    def add(
        key: str, title: str, values: Sequence[Any], weight: int, form: Callable[[Any], str] = str, right: bool = True
    ) -> None:
        cells = [ABSENT if value is None else form(value) for value in values]
        found.append(Column(key, title, cells, values, right, weight))

    names = [row.runs[0].name + f"+{len(row.runs) - 1}" * (len(row.runs) > 1) for row in rows]
    add("run", "run", names, 3 if comparison.varied else 10, right=False)
    for key in comparison.varied:
        add(key, heading(short[key]), [row.settings[key] for row in rows], 8)
    if any(len(row.runs) > 1 for row in rows):
        add("seeds", "seeds", [len(row.runs) for row in rows], 3)
    for name, title, form, weight in FIGURES:
        values = [row.figures.get(name) for row in rows]
        if any(value is not None for value in values):
            add(name, title.format(split=comparison.split, target=comparison.target), values, weight, form)
    add("front", "", [FRONT if row.front else "" for row in rows], 7)
    add("state", "state", [row.runs[0].trouble or "finished" for row in rows], 0, right=False)
    add("folder", "folder", ["; ".join(str(run.folder) for run in row.runs) for row in rows], 0, right=False)
    return found


def in_order(comparison: Comparison, by: str | None) -> list[Group]:
    """Return the groups sorted by a column, by default by accuracy. A `-` before the name puts the largest first.

    Groups without a value come last. Raises ConfigError.
    """
    name = "accuracy" if by is None else by.removeprefix("-")
    values = {column.key: column.values for column in columns(comparison, comparison.groups)}
    values |= {short: values[key] for key, short in shortened(comparison.varied).items()}
    if name not in values:
        if by is None:
            return comparison.groups
        raise ConfigError(f"--sort {by}: there is no such column{nearest(name, values)}")
    rows = list(zip(comparison.groups, values[name], strict=False))  # those without a result follow
    known = [(group, _sortable(value)) for group, value in rows if value is not None]
    known.sort(key=lambda row: row[1], reverse=by is None or by != name)
    return [*(group for group, _ in known), *(group for group, value in rows if value is None)]


def _sortable(value: Any) -> tuple[int, float, str]:
    """Return a key that puts numbers before words."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, str(value)
