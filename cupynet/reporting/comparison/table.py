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
    return f"{value:.1f} s" if value < 1000 else f"{value:,.0f} s"


def rate(value: float) -> str:
    return f"{value:,.0f}"


# Name, title, format and weight of each figure. On a narrow terminal the lowest weights are left out first.
FIGURES: tuple[tuple[str, str, Callable[[float], str], int], ...] = (
    ("accuracy", "{split}\naccuracy", percent, 9),
    ("loss", "test\nloss", "{:.4g}".format, 2),
    ("images_per_s", "images/s", rate, 6),
    ("speed_up", "speed-\nup", "{:.2f}".format, 5),
    ("efficiency", "efficiency", percent, 1),
    ("time_to", "time to\n{target:.4g}", seconds, 4),
    ("train_s", "train\ntime", seconds, 7),
)


def columns(comparison: Comparison, groups: Sequence[Group]) -> list[Column]:
    """Return all columns, with a row for each group, followed by the runs without a result."""
    others, found = comparison.others, []

    def add(
        key: str, title: str, values: Sequence[Any], form: Callable[[Any], str] = str, *,
        below: Sequence[Any] | None = None, right: bool = True, weight: int,
    ) -> None:  # fmt: skip
        every = [*values, *([None] * len(others) if below is None else below)]
        cells = [ABSENT if value is None else form(value) for value in every]
        found.append(Column(key, title, cells, every, right, weight))

    names = [" ".join(run.name for run in group.runs) for group in groups] + [run.name for run in others]
    called = [_called(group) for group in groups] + [run.name for run in others]
    found.append(Column("run", "run", called, names, right=False, weight=3 if comparison.varied else 10))
    short = shortened(comparison.varied)
    for key in comparison.varied:
        below = [comparison.shown[str(run.folder)][key] for run in others]
        add(key, heading(short[key]), [group.settings[key] for group in groups], below=below, weight=8)
    repeated = any(len(group.runs) > 1 for group in groups)
    if repeated:
        add("seeds", "seeds", [len(group.runs) for group in groups], weight=3)
    for name, title, form, weight in FIGURES:
        values = [group.value(name) for group in groups]
        if all(value is None for value in values):
            continue
        add(name, title.format(split=comparison.split, target=comparison.target), values, form, weight=weight)
        if name == "accuracy" and repeated:
            figures = [group.figures.get(name) for group in groups]
            spans = [None if each is None else f"{100 * each.low:.2f}-{100 * each.high:.2f}" for each in figures]
            add("accuracy_range", "over\nseeds", spans, weight=5)
            add("accuracy_low", "lowest", [each and each.low for each in figures], percent, weight=4)
            add("accuracy_high", "highest", [each and each.high for each in figures], percent, weight=4)
    marks = [FRONT if group.front else "" for group in groups] + [""] * len(others)
    found.append(Column("front", "", marks, [*(group.front for group in groups), *[None] * len(others)], weight=7))
    states = [run.trouble for run in others]
    add("state", "state", ["finished"] * len(groups), below=states, right=False, weight=0)
    folders = ["; ".join(str(run.folder) for run in group.runs) for group in groups]
    add("folder", "folder", folders, below=[str(run.folder) for run in others], right=False, weight=0)
    return found


def chosen(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Return the named columns in their order. Raises ConfigError."""
    known = {column.key: column for column in columns}
    short = {short: key for key, short in shortened(list(known)).items()}
    found = []
    for name in names:
        key = name if name in known else short.get(name)
        if key is None:
            raise ConfigError(f"--columns {name}: there is no such column{nearest(name, {*known, *short})}")
        found.append(known[key])
    return found


def in_order(comparison: Comparison, by: str | None) -> list[Group]:
    """Return the groups sorted by a column, by default by accuracy. A `-` before the name puts the largest first.

    Groups without a value come last. Raises ConfigError.
    """
    name = "accuracy" if by is None else by.removeprefix("-")
    falling = by is None or by != name
    keys = {short: key for key, short in shortened(comparison.varied).items()} | {k: k for k in comparison.varied}
    figures = [key for key, *_ in FIGURES]
    if name == "run":
        return comparison.groups[:: -1 if falling else 1]
    if name not in keys and name not in figures:
        raise ConfigError(f"--sort {by}: there is no such column{nearest(name, ['run', *keys, *figures])}")

    def value(group: Group) -> Any:
        return _sortable(group.settings[keys[name]]) if name in keys else group.value(name)

    known = [group for group in comparison.groups if value(group) is not None]
    unknown = [group for group in comparison.groups if value(group) is None]
    return [*sorted(known, key=value, reverse=falling), *unknown]


def _sortable(text: str) -> tuple[int, float, str]:
    """Return a key that puts numbers before words."""
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


def _called(group: Group) -> str:
    names = [run.name for run in group.runs]
    return names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"


def records(comparison: Comparison, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return all data of each group, for JSON."""
    found = []
    for group in groups:
        row: dict[str, Any] = {"settings": group.settings, "runs": [str(run.folder) for run in group.runs]}
        row["seeds"] = [run.summary["seed"] for run in group.runs]
        for name, *_ in FIGURES:
            figure = group.figures.get(name)
            row[name] = group.value(name) if figure is None else figure._asdict()
        found.append({**row, "front": group.front})
    return found
