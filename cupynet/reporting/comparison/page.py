"""compare.html: a comparison as a page, with charts if matplotlib is installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cupynet.config.sweep_table import shortened
from cupynet.reporting import charts
from cupynet.reporting.charts import BACKGROUND, PALETTE, Chart, Line
from cupynet.reporting.comparison.answer import answer, comparable
from cupynet.reporting.comparison.groups import Comparison, Group, judged
from cupynet.reporting.comparison.runs import ComparedRun
from cupynet.reporting.comparison.table import FIGURES, columns
from cupynet.reporting.render import render

LEFT_OUT = ("run", "state", "folder", "front", "accuracy_low", "accuracy_high")  # columns shown in another way
FORMS = {name: form for name, _, form, _ in FIGURES}
MAX_LINES = 2 * len(PALETTE)  # of a chart: each colour solid and dashed


def compare_page(comparison: Comparison, groups: Sequence[Group], at: Path) -> bytes:
    """Render the page. groups: in the order of the table; at: the folder of the page, for links to runs."""
    text, notes = answer(comparison)
    figures, missing = charts.figures(comparison_charts(comparison, groups))
    table = [column for column in columns(comparison, groups) if column.key not in LEFT_OUT]
    short = shortened(comparison.varied)
    return render(
        "compare.html",
        title=f"{len(comparison.finished) + len(comparison.others)} runs compared",
        marks=_marks(comparison),
        answer=text,
        notes=notes,
        kind="bad" if comparable(comparison)[0] or not groups else "live",
        tiles=_tiles(comparison),
        head=[column.title.split("\n") for column in table],
        rows=[
            {
                "links": [_link(run, at) for run in group.runs],
                "cells": [column.cells[place] for column in table],
                "front": group.front,
            }
            for place, group in enumerate(groups)
        ],
        speed_up=any(group.speed_up is not None for group in groups),
        charts=figures,
        missing=missing,
        grid=_grid(comparison, groups),
        others=[
            {
                "link": _link(run, at),
                "settings": " ".join(f"{short[key]}={v}" for key, v in comparison.shown[str(run.folder)].items()),
                "trouble": run.trouble,
            }
            for run in comparison.others
        ],
    )


def _marks(comparison: Comparison) -> list[tuple[str, str]]:
    runs, failed = comparison.finished, len(comparison.others)
    marks = [(f"{len(runs)} run{'s' * (len(runs) != 1)} finished", "plain")]
    marks += [(f"{failed} without a result", "warn")] if failed else []
    marks += [(name, "plain") for name in sorted({run.summary["dataset"] for run in runs})]
    marks += [(f"{name} varied", "plain") for name in shortened(comparison.varied).values()]
    return marks + ([("fallback data", "bad")] if any(run.summary["fallback"] for run in runs) else [])


def _tiles(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the best group by each figure: the name of the figure, its value, and the group."""
    wanted = (
        (f"best {comparison.split} accuracy", "accuracy", max),
        ("shortest training", "train_s", min),
        ("most images/s", "images_per_s", max),
        ("best speed-up", "speed_up", max),
        (f"fastest to {comparison.target or 0:.4g}", "time_to", min),
    )
    rows = []
    for title, name, best in wanted:
        known = [(value, group) for group in comparison.groups if (value := group.value(name)) is not None]
        if known:
            value, group = best(known, key=lambda pair: pair[0])
            remark = f"slower than one worker: {group.name}" if name == "speed_up" and value < 1 else group.name
            rows.append((title, FORMS[name](value) + "x" * (name == "speed_up"), remark))
    return rows


def _link(run: ComparedRun, at: Path) -> tuple[str, str]:
    """Return the relative address of a run's report, or of its folder if it has none, and the run's name."""
    report = run.folder / "report.html"
    target = os.path.relpath(report if report.is_file() else run.folder, at)
    address = quote(os.fsencode(Path(target).as_posix()))  # a name may not be valid UTF-8
    return f"./{address}{'' if report.is_file() else '/'}", run.name


def comparison_charts(comparison: Comparison, groups: Sequence[Group]) -> list[Chart]:
    """Return the charts: accuracy over time and iterations, accuracy against training time, and speed-up."""
    return [*_curves(comparison, groups), _pareto(comparison), _speed_up(comparison)]


def _curves(comparison: Comparison, groups: Sequence[Group]) -> list[Chart]:
    """Return the accuracy of the first run of each group, in the order of the table."""
    split = comparison.split
    note = "of each row of the table its first run" if any(len(group.runs) > 1 for group in groups) else ""
    if len(groups) > MAX_LINES:
        note = f"the first {MAX_LINES} rows of the table"
    found = []
    for what, label, value in (("time", "seconds of training", "train_s"), ("iterations", "iterations", "iteration")):
        lines = []
        for place, group in enumerate(groups[:MAX_LINES]):
            epochs = group.runs[0].epochs
            x, y = [float(getattr(each, value)) for each in epochs], [each.accuracy.get(split) for each in epochs]
            lines.append(Line(group.name, x, y, place, dashed=place >= len(PALETTE), points=True))
        title = f"{split.capitalize()} accuracy over {what}"
        found.append(Chart(title, label, "accuracy (%)", lines, percent=True, note=note))
    return found


def _pareto(comparison: Comparison) -> Chart:
    """Return accuracy against time: a point for each group, and a line through the Pareto front."""
    candidates = judged(comparison.groups)
    lines = []
    kinds = (("front: nothing is both better and faster", True, 2, 1.8), ("others", False, 0, 0.0))
    for name, front, colour, width in kinds:
        points = sorted((seconds, accuracy) for accuracy, seconds, group in candidates if group.front is front)
        lines.append(Line(name, [x for x, _ in points], [y for _, y in points], colour, width, points=True))
    title = "Accuracy against training time"
    return Chart(title, "seconds of training", "accuracy (%)", lines if len(candidates) > 1 else [], percent=True)


def _speed_up(comparison: Comparison) -> Chart:
    """Return the speed-up over the number of workers, a line for each combination of the other settings."""
    others = [key for key in comparison.varied if key != "workers"]
    short = shortened(others)
    series: dict[str, dict[int, float]] = {}
    for group in comparison.groups:
        if group.speed_up is not None:
            name = " ".join(f"{short[key]}={group.settings[key]}" for key in others) or "measured"
            series.setdefault(name, {1: 1.0})[group.workers] = group.speed_up
    lines = []
    for place, (name, points) in enumerate(list(series.items())[:MAX_LINES]):
        x, y = zip(*sorted(points.items()), strict=True)
        lines.append(Line(name, x, y, place, dashed=place >= len(PALETTE), points=True))
    if lines:
        most = max(max(points) for points in series.values())
        lines.append(Line("ideal", [1, most], [1.0, float(most)], BACKGROUND, 1.0, dashed=True, behind=True))
    return Chart("Speed-up over one worker", "workers", "times one worker's images/s", lines, zero=True)


def _grid(comparison: Comparison, groups: Sequence[Group]) -> dict[str, Any] | None:
    """Return each figure by both settings, if two settings varied."""
    if len(comparison.varied) != 2 or len(groups) < 4:
        return None
    down, across = comparison.varied
    rows, head = (list(dict.fromkeys(group.settings[key] for group in comparison.groups)) for key in (down, across))
    if len(rows) < 2 or len(head) < 2:
        return None
    tables = []
    for title, key in (
        (f"{comparison.split} accuracy", "accuracy"),
        ("images/s", "images_per_s"),
        ("training time", "train_s"),
    ):
        values = {(g.settings[down], g.settings[across]): v for g in groups if (v := g.value(key)) is not None}
        if values:
            ends = min(values.values()), max(values.values())
            worst, best = reversed(ends) if key == "train_s" else ends
            cells = {place: _cell(FORMS[key](value), value, worst, best) for place, value in values.items()}
            absent = {"text": "", "title": "", "strength": 0.0}
            body = [(row, [cells.get((row, column), absent) for column in head]) for row in rows]
            tables.append({"title": title, "rows": body})
    short = shortened([down, across])
    return {"down": short[down], "across": short[across], "head": head, "tables": tables}


def _cell(text: str, value: float, worst: float, best: float) -> dict[str, Any]:
    """Return a cell of a matrix, darker for better values."""
    share = (value - worst) / (best - worst) if best != worst else 0.0
    return {"text": text, "title": "", "colour": "heat", "strength": 0.08 + 0.84 * share}
