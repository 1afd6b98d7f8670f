"""Rendering of a comparison as an HTML page, with charts if matplotlib is installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cupynet.core.table import ABSENT, shortened
from cupynet.reporting import charts
from cupynet.reporting.charts import BACKGROUND, PALETTE, Chart, Line
from cupynet.reporting.comparison.answer import answer
from cupynet.reporting.comparison.groups import Comparison, Group
from cupynet.reporting.comparison.table import FIGURES, columns
from cupynet.reporting.pictures import Cell
from cupynet.reporting.render import render

OMITTED = ("run", "state", "folder", "front")  # columns that are not in the table of the page
FORMS = {name: form for name, _, form in FIGURES}
MAX_LINES = 2 * len(PALETTE)  # per chart, in which each color is used for a solid and a dashed line


def compare_page(comparison: Comparison, groups: Sequence[Group], at: Path) -> bytes:
    """Render the page, with the groups in the order of the table, and links relative to the folder `at` of the page."""
    all_charts = (
        _curves(comparison, groups, "time", "seconds of training", "train_s"),
        _curves(comparison, groups, "iterations", "iterations", "iteration"),
        _pareto(comparison),
        _speed_up(comparison),
    )
    figures, missing = charts.figures(all_charts)
    table = [column for column in columns(comparison, groups) if column.key not in OMITTED]
    rows = [
        {"group": group, "links": [(_link(run.folder, at), run.name) for run in group.runs], "cells": cells}
        for group, *cells in zip([*groups, *comparison.others], *(column.cells for column in table), strict=True)
    ]
    return render(
        "compare.html",
        title=f"{len(comparison.finished) + len(comparison.others)} runs compared",
        marks=_marks(comparison),
        answer=answer(comparison),
        tiles=_tiles(comparison),
        head=[column.title.split("\n") for column in table],
        rows=rows[: len(groups)],
        charts=figures,
        missing=missing,
        grid=_grid(comparison),
        others=rows[len(groups) :],
    )


def _marks(comparison: Comparison) -> list[tuple[str, str]]:
    runs, failed = comparison.finished, len(comparison.others)
    marks = [(f"{len(runs)} run{'s' * (len(runs) != 1)} finished", "plain")]
    marks += [(f"{failed} without a result", "warn")] if failed else []
    marks += [(name, "plain") for name in sorted({run.summary["dataset"] for run in runs})]
    marks += [(f"{name} varied", "plain") for name in shortened(comparison.varied).values()]
    return marks + ([("fallback data", "bad")] if any(run.summary["fallback"] for run in runs) else [])


def _tiles(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the name of each metric, its best value, and the group that has this value."""
    wanted = (
        (f"best {comparison.split} accuracy", "accuracy", max),
        ("shortest training", "train_s", min),
        ("most images/s", "images_per_s", max),
        ("best speed-up", "speed_up", max),
        (f"fastest to {comparison.target or 0:.4g}", "time_to", min),
    )
    rows = []
    for title, name, best in wanted:
        groups = [group for group in comparison.groups if name in group.figures]
        if groups:
            group = best(groups, key=lambda group: group.figures[name])
            value = group.figures[name]
            remark = f"slower than one worker: {group.name}" if name == "speed_up" and value < 1 else group.name
            rows.append((title, FORMS[name](value), remark))
    return rows


def _link(folder: Path, at: Path) -> str:
    """Return the relative URL of a run's report, or of its folder if there is no report."""
    report = (folder / "report.html").is_file()
    target = Path(os.path.relpath(folder / "report.html" if report else folder, at))
    return f"./{quote(os.fsencode(target.as_posix()))}{'' if report else '/'}"  # names need not be valid UTF-8


def _curves(comparison: Comparison, groups: Sequence[Group], over: str, label: str, value: str) -> Chart:
    """Return a chart of the accuracy of the first run of each group, in the order of the table."""
    lines = []
    for index, group in enumerate(groups[:MAX_LINES]):
        shares = [(getattr(epoch, value), epoch.accuracy[comparison.split]) for epoch in group.runs[0].epochs]
        points = [(x, 100 * share) for x, share in shares if share is not None]
        lines.append(_line(group.name, points, index))
    if all(len(line.x) < 2 for line in lines):
        lines = []  # curves of a single point would overlap
    title = f"{comparison.split.capitalize()} accuracy over {over}"
    note = f"The first run of each row, for at most {MAX_LINES} rows." if len(lines) < len(comparison.finished) else ""
    return Chart(title, label, "accuracy (%)", lines, note=note)


def _line(name: str, points: Sequence[tuple[float, float]], index: int, width: float = 1.8) -> Line:
    """Return line number `index` of a chart. Each color is used solid first, then dashed."""
    x, y = [x for x, _ in points], [y for _, y in points]
    return Line(name, x, y, index % len(PALETTE), width, dashed=index >= len(PALETTE), points=True)


def _pareto(comparison: Comparison) -> Chart:
    """Return a chart of accuracy over training time, with a point per group and a line through the Pareto front."""
    lines = []
    kinds = (("Pareto front", True, 2, 1.8), ("others", False, 0, 0.0))
    for name, front, index, width in kinds if len(comparison.judged) > 1 else ():
        figures_of_kind = [group.figures for group in comparison.judged if group.front is front]
        points = sorted((figures["train_s"], 100 * figures["accuracy"]) for figures in figures_of_kind)
        lines.append(_line(name, points, index, width))
    return Chart("Accuracy against training time", "seconds of training", "accuracy (%)", lines)


def _speed_up(comparison: Comparison) -> Chart:
    """Return a chart of the speed-up over the number of workers, with one line per combination of other settings."""
    names = shortened([key for key in comparison.varied if key != "workers"])
    series: dict[str, dict[int, float]] = {}
    for group in comparison.groups:
        if "speed_up" in group.figures:
            values = {key: ABSENT if group.settings[key] is None else group.settings[key] for key in names}
            name = " ".join(f"{names[key]}={value}" for key, value in values.items()) or "measured"
            series.setdefault(name, {1: 1.0})[group.workers] = group.figures["speed_up"]
    shown = list(series.items())[:MAX_LINES]
    lines = [_line(name, sorted(points.items()), index) for index, (name, points) in enumerate(shown)]
    if lines:
        max_workers = max(max(points) for points in series.values())
        lines.append(Line("ideal", [1, max_workers], [1.0, float(max_workers)], BACKGROUND, 1.0, dashed=True))
    return Chart("Speed-up over one worker", "workers", "images/s relative to one worker", lines, zero=True)


def _grid(comparison: Comparison) -> dict[str, Any] | None:
    """Return tables of three metrics over two settings, or None unless exactly two settings have several values."""
    if len(comparison.varied) != 2:
        return None
    rows_title, columns_title = shortened(comparison.varied).values()
    rows, head = (
        [value for value in dict.fromkeys(group.settings[key] for group in comparison.judged) if value is not None]
        for key in comparison.varied
    )
    if len(rows) < 2 or len(head) < 2:
        return None
    tables = []
    kinds = ((f"{comparison.split} accuracy", "accuracy", 1), ("images/s", "images_per_s", 1))
    for title, name, sign in (*kinds, ("training time", "train_s", -1)):
        values = {tuple(group.settings.values()): sign * group.figures[name] for group in comparison.judged}
        lowest, highest = min(values.values()), max(values.values())
        cells = {
            settings: Cell(FORMS[name](sign * value), 0.08 + 0.84 * (value - lowest) / (highest - lowest or 1))
            for settings, value in values.items()
        }
        body = [(row, [_cell(cells, row, column) for column in head]) for row in rows]
        tables.append({"title": title, "rows": body})
    return {"down": rows_title, "across": columns_title, "head": head, "tables": tables}


def _cell(cells: dict[tuple[str | None, ...], Cell], row: str, column: str) -> Cell:
    """Return the cell for the values of two settings, one of which may have no effect, or an empty cell."""
    return next((cells[key] for key in ((row, column), (row, None), (None, column)) if key in cells), Cell())
