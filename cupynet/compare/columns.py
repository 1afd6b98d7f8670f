"""A comparison as columns: for the terminal, for files and for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupynet.checks import nearest, percent
from cupynet.compare.groups import ABSENT, Comparison, Figure, Group, ordered, summary_of
from cupynet.errors import ConfigError
from cupynet.sweeps.table import Column, heading, shortened

FRONT = "*"

Form = Callable[[float], str]


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 1000 else f"{value:,.0f} s"


def rate(value: float) -> str:
    return f"{value:,.0f}"


def _figure(value: float) -> str:
    return f"{value:.4g}"


def _times(value: float) -> str:
    return f"{value:.2f}"


# name in files, title, how it is shown, which figure, which goes first where there is no room (the lowest)
FIGURES: tuple[tuple[str, str, Form, Callable[[Group], Any], int], ...] = (
    ("accuracy", "accuracy", percent, lambda group: group.accuracy, 9),
    ("loss", "test\nloss", _figure, lambda group: group.loss, 2),
    ("images_per_s", "images/s", rate, lambda group: group.images_per_s, 6),
    ("speed_up", "speed-\nup", _times, lambda group: group.speed_up, 5),
    ("efficiency", "of each\nworker", percent, lambda group: group.efficiency, 1),
    ("time_to", "time to\n", seconds, lambda group: group.time_to, 4),
    ("train_s", "train\ntime", seconds, lambda group: group.train_s, 7),
)


def figure_of(group: Group, name: str) -> float | None:
    """One of the figures: its mean, where there are several."""
    value = next(read(group) for key, _, _, read, _ in FIGURES if key == name)
    return value.mean if isinstance(value, Figure) else value


def columns(comparison: Comparison, groups: Sequence[Group]) -> list[Column]:
    """All columns; a row for each group in this order, and below them the runs that have no result.

    (Over 40 lines: one column after the other.)
    """
    others, short = comparison.others, shortened(comparison.varied)
    blank = [ABSENT] * len(others)
    empty = [None] * len(others)
    found = [
        Column(
            "run",
            "run",
            [_called(group) for group in groups] + [run.name for run in others],
            [" ".join(run.name for run in group.runs) for group in groups] + [run.name for run in others],
            right=False,
            weight=3 if comparison.varied else 10,
        )
    ]
    for key in comparison.varied:
        own = [group.settings[key] for group in groups]
        own += [comparison.shown[str(run.folder)][key] for run in others]
        found.append(Column(key, heading(short[key]), own, own, weight=8))
    if any(len(group.runs) > 1 for group in groups):
        counts = [len(group.runs) for group in groups]
        found.append(Column("seeds", "seeds", [*map(str, counts), *blank], [*counts, *empty], weight=3))
    for name, title, form, read, weight in FIGURES:
        values = [read(group) for group in groups]
        if all(value is None for value in values):
            continue
        if name == "accuracy":
            title = f"{comparison.split}\naccuracy"
        elif name == "time_to":
            title += f"{comparison.target:.4g}"
        means = [value.mean if isinstance(value, Figure) else value for value in values]
        cells = [ABSENT if mean is None else form(mean) for mean in means]
        found.append(Column(name, title, cells + blank, [*means, *empty], weight=weight))
        if name == "accuracy" and any(len(group.runs) > 1 for group in groups):
            found += [_range(values, len(others)), *(_bound(values, bound, len(others)) for bound in ("low", "high"))]
    marks = [FRONT if group.front else "" for group in groups]
    found.append(Column("front", "", [*marks, *("" for _ in others)], [*(g.front for g in groups), *empty], weight=7))
    states = ["finished" for _ in groups] + [run.trouble for run in others]
    folders = ["; ".join(str(run.folder) for run in group.runs) for group in groups] + [
        str(run.folder) for run in others
    ]
    found.append(Column("state", "state", ["", *states][1:], states, right=False, weight=0))
    found.append(Column("folder", "folder", folders, folders, right=False, weight=0))
    return found


def chosen(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """Some of the columns, in the order they are named in. ConfigError."""
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
    """The groups by a column, `-` before it for the largest first; by default by accuracy. ConfigError."""
    if by is None:
        return ordered(comparison.groups, lambda group: figure_of(group, "accuracy"), falling=True)
    name = by.removeprefix("-")
    keys = {key: key for key in comparison.varied}
    keys |= {short: key for key, short in shortened(comparison.varied).items() if short not in keys}
    figures = [key for key, *_ in FIGURES]
    if name in keys:
        return ordered(comparison.groups, lambda group: _sortable(group.settings[keys[name]]), falling=by != name)
    if name in figures:
        return ordered(comparison.groups, lambda group: figure_of(group, name), falling=by != name)
    if name == "run":
        return comparison.groups[:: -1 if by != name else 1]
    raise ConfigError(f"--sort {by}: there is no such column{nearest(name, ['run', *keys, *figures])}")


def _sortable(text: str) -> tuple[int, float, str]:
    """Numbers before words."""
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


def _called(group: Group) -> str:
    names = [run.name for run in group.runs]
    return names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"


def _range(values: Sequence[Figure | None], others: int) -> Column:
    """From the lowest to the highest, in points."""
    cells = [ABSENT if v is None else f"{100 * v.low:.2f}-{100 * v.high:.2f}" for v in values] + [ABSENT] * others
    return Column("accuracy_range", "over\nseeds", cells, cells, weight=5)


def _bound(values: Sequence[Figure | None], bound: str, others: int) -> Column:
    found = [None if value is None else getattr(value, bound) for value in values]
    cells = [ABSENT if value is None else percent(value) for value in found]
    title = {"low": "lowest", "high": "highest"}[bound]
    return Column(f"accuracy_{bound}", title, cells + [ABSENT] * others, [*found, *[None] * others], weight=4)


def records(comparison: Comparison, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Each group with all that is known of it, for JSON."""
    found: list[dict[str, Any]] = []
    for group in groups:
        row: dict[str, Any] = {"settings": group.settings, "runs": [str(run.folder) for run in group.runs]}
        row["seeds"] = [summary_of(run).seed for run in group.runs]
        for name, _, _, read, _ in FIGURES:
            value = read(group)
            row[name] = (
                {"mean": value.mean, "low": value.low, "high": value.high} if isinstance(value, Figure) else value
            )
        found.append({**row, "front": group.front})
    return found
