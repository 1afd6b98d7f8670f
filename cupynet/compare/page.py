"""compare.html: the comparison as a page of one file, with charts where matplotlib is installed.

Each piece of the page is a function; the page is the list of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from cupynet.checks import percent
from cupynet.compare.answer import answer, comparable
from cupynet.compare.columns import columns, figure_of, rate, seconds
from cupynet.compare.found import Found
from cupynet.compare.groups import ABSENT, Comparison, Group, summary_of
from cupynet.report import charts, page
from cupynet.report.charts import Chart, Line
from cupynet.report.page import COLOURS, Markup, element, escape
from cupynet.sweeps.table import shortened

LEFT_OUT = ("state", "folder", "front", "accuracy_low", "accuracy_high")  # of the table
MOST_CURVES = 2 * COLOURS  # each colour solid and dashed


def whole(comparison: Comparison, groups: Sequence[Group], at: Path) -> str:
    """The page. groups: in the order of the table; at: the folder that it will lie in, for the links to runs."""
    text, notes = answer(comparison)
    against, _ = comparable(comparison)
    parts = [
        _head(comparison, text, notes, bad=bool(against) or not groups),
        _tiles(comparison),
        page.section("Results", _table(comparison, groups, at), _legend(comparison)),
        _charts(comparison, groups),
        _heat(comparison, groups),
        _others(comparison, at),
    ]
    count = len(comparison.finished) + len(comparison.others)
    return page.document(f"{count} runs compared", *parts)


def _head(comparison: Comparison, text: str, notes: Sequence[str], *, bad: bool) -> Markup:
    runs, failed = comparison.finished, len(comparison.others)
    marks = [page.mark(f"{len(runs)} run{'s' * (len(runs) != 1)} finished")]
    if failed:
        marks.append(page.mark(f"{failed} without a result", "warn"))
    marks += [page.mark(name) for name in sorted({summary_of(run).dataset for run in runs})]
    marks += [page.mark(f"{name} varied") for name in shortened(comparison.varied).values()]
    if any(summary_of(run).fallback for run in runs):
        marks.append(page.mark("stand-in data", "bad"))
    said = element("div", element("p", element("strong", text)), *(element("p", note, class_="note") for note in notes))
    notice = element("div", said, class_="notice bad" if bad else "notice live")
    return page.join(
        [page.header(f"{len(runs) + failed} runs compared", marks=marks, over="cupynet sweep"), notice], "\n"
    )


def _tiles(comparison: Comparison) -> Markup:
    """The best of each figure."""
    wanted: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
        (f"best {comparison.split} accuracy", "accuracy", percent, True),
        ("shortest training", "train_s", seconds, False),
        ("most images/s", "images_per_s", rate, True),
        ("largest speed-up", "speed_up", lambda value: f"{value:.2f}x", True),
        (f"fastest to {comparison.target or 0:.4g}", "time_to", seconds, False),
    )
    rows = []
    for name, key, form, largest in wanted:
        known = [(value, group) for group in comparison.groups if (value := figure_of(group, key)) is not None]
        if known:
            value, group = (max if largest else min)(known, key=lambda pair: pair[0])
            rows.append((name, form(value), page.join(group.name.split("_"), Markup("_<wbr>"))))
    return element("section", page.tiles(rows)) if rows else Markup("")


def _link(run: Found, at: Path, text: str) -> Markup:
    """To the report of a run, or to its folder where it has none."""
    report = run.folder / "report.html"
    target = os.path.relpath(report if report.is_file() else run.folder, at)
    address = quote(Path(target).as_posix()) + ("" if report.is_file() else "/")
    return element("a", text, href=f"./{address}")


def _table(comparison: Comparison, groups: Sequence[Group], at: Path) -> Markup:
    if not groups:
        return Markup("")
    shown = [column for column in columns(comparison, groups) if column.key not in LEFT_OUT]
    rows = []
    for place, group in enumerate(groups):
        cells: list[str] = [column.cells[place] for column in shown]
        links = [_link(run, at, run.name) for run in group.runs]
        cells[0] = page.join(links, " ")
        rows.append([*cells, page.mark("front", "good") if group.front else ""])
    head = [page.join(column.title.split("\n"), Markup("<br>")) for column in shown]
    return page.table([*head, ""], rows, numbers=[place for place, column in enumerate(shown) if column.right])


def _legend(comparison: Comparison) -> Markup:
    if not comparison.groups:
        return Markup("")
    text = "front: no other run is both more accurate and trained in less time. Training time leaves evaluations out."
    if any(group.speed_up is not None for group in comparison.groups):
        text += " Speed-up: images/s over those of one worker with otherwise the same settings."
    return element("p", text, class_="note")


def _charts(comparison: Comparison, groups: Sequence[Group]) -> Markup:
    drawn = [
        chart for chart in (*_curves(comparison, groups), _pareto(comparison), _speed_up(comparison)) if chart.shown
    ]
    if not drawn:
        return Markup("")
    if not charts.available():
        return page.section("Charts", element("p", charts.MISSING, class_="notice"))
    figures = [
        page.chart(chart.title, charts.svg(chart, f"chart{number}"), chart.legend(), chart.note)
        for number, chart in enumerate(drawn)
    ]
    return page.section("Charts", page.charts(figures))


def _coloured(groups: Sequence[Group]) -> list[tuple[Group, int, bool]]:
    """Which colour a group has in all charts, and whether it is dashed."""
    return [(group, place % COLOURS, place >= COLOURS) for place, group in enumerate(groups[:MOST_CURVES])]


def _curves(comparison: Comparison, groups: Sequence[Group]) -> list[Chart]:
    """Accuracy over the time and over the iterations of training; of each group the first run."""
    split = comparison.split
    ways: tuple[tuple[str, str, Callable[[object], float]], ...] = (
        (f"{split.capitalize()} accuracy over time", "seconds of training", lambda epoch: epoch.train_s),  # type: ignore[attr-defined]
        (f"{split.capitalize()} accuracy over iterations", "iterations", lambda epoch: float(epoch.iteration)),  # type: ignore[attr-defined]
    )
    note = "of each row of the table its first run" if any(len(group.runs) > 1 for group in groups) else ""
    if len(groups) > MOST_CURVES:
        note = f"the first {MOST_CURVES} rows of the table"
    found = []
    for title, label, where in ways:
        lines = [
            Line(
                group.name, [where(epoch) for epoch in group.runs[0].epochs],
                [epoch.accuracy.get(split) for epoch in group.runs[0].epochs], colour, dashed=dashed, points=True,
            )
            for group, colour, dashed in _coloured(groups)
        ]  # fmt: skip
        found.append(Chart(title, label, "accuracy (%)", lines, percent=True, note=note))
    return found


def _pareto(comparison: Comparison) -> Chart:
    """Accuracy against time: a point for each group, and a line through those that no other beats."""
    judged = [
        (seconds_of, accuracy, group)
        for group in comparison.groups
        if (seconds_of := figure_of(group, "train_s")) is not None
        and (accuracy := figure_of(group, "accuracy")) is not None
    ]
    front = sorted((x, y) for x, y, group in judged if group.front)
    behind = sorted((x, y) for x, y, group in judged if not group.front)
    lines = [
        Line("front: nothing is both better and faster", [x for x, _ in front], [y for _, y in front], 2, points=True)
    ]
    lines.append(Line("others", [x for x, _ in behind], [y for _, y in behind], 0, width=0.0, points=True))
    if len(judged) < 2:
        lines = []
    return Chart("Accuracy against training time", "seconds of training", "accuracy (%)", lines, percent=True)


def _speed_up(comparison: Comparison) -> Chart:
    """Speed-up over the number of workers, a line for each of the other settings."""
    others = [key for key in comparison.varied if key != "workers"]
    short = shortened(others)
    series: dict[str, dict[int, float]] = {}
    for group in comparison.groups:
        if group.speed_up is not None:
            name = " ".join(f"{short[key]}={group.settings[key]}" for key in others) or "measured"
            series.setdefault(name, {1: 1.0})[group.workers] = group.speed_up
    most = max((workers for points in series.values() for workers in points), default=1)
    lines = [
        Line(
            name,
            sorted(points),
            [points[workers] for workers in sorted(points)],
            place,
            dashed=place >= COLOURS,
            points=True,
        )
        for place, (name, points) in enumerate(series.items())
    ][:MOST_CURVES]
    if lines:
        lines.append(
            Line(
                "one times each worker", [1, most], [1.0, float(most)], COLOURS - 1, width=1.0, dashed=True, faint=True
            )
        )
    return Chart("Speed-up over one worker", "workers", "times one worker's images/s", lines, zero=True)


def _heat(comparison: Comparison, groups: Sequence[Group]) -> Markup:
    """Where two settings varied: each figure by both, the better the darker."""
    if len(comparison.varied) != 2 or len(groups) < 4:
        return Markup("")
    down, across = comparison.varied
    rows = list(dict.fromkeys(group.settings[down] for group in comparison.groups))
    heads = list(dict.fromkeys(group.settings[across] for group in comparison.groups))
    if len(rows) < 2 or len(heads) < 2:
        return Markup("")
    figures: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
        (f"{comparison.split} accuracy", "accuracy", percent, True),
        ("images/s", "images_per_s", rate, True),
        ("training time", "train_s", seconds, False),
    )
    short = shortened([down, across])
    placed = {(group.settings[down], group.settings[across]): group for group in comparison.groups}
    shown = []
    for title, key, form, largest in figures:
        values = {place: figure_of(group, key) for place, group in placed.items()}
        known = [value for value in values.values() if value is not None]
        if not known:
            continue
        low, high = min(known), max(known)
        body = []
        for row in rows:
            cells = [element("th", row, scope="row", style="vertical-align:middle")]
            for head in heads:
                value = values.get((row, head))
                share = 0.0 if value is None or high == low else (value - low) / (high - low)
                cells.append(_cell(value, share if largest else 1 - share, form))
            body.append(element("tr", *cells))
        top = element("tr", element("th"), *(element("th", head, scope="col") for head in heads))
        grid = element("table", element("thead", top), element("tbody", *body), class_="matrix")
        shown.append(element("figure", element("h3", title), element("div", grid, class_="scroll"), class_="chart"))
    note = f"Down: {short[down]}; across: {short[across]}. The darker the better."
    return page.section(f"{short[down]} and {short[across]} together", page.charts(shown), note=note)


def _cell(value: float | None, share: float, form: Callable[[float], str]) -> Markup:
    if value is None:
        return element("td", ABSENT)
    colour = f"background:rgba(var(--heat),{0.08 + 0.84 * share:.2f});padding:.35rem .7rem"
    return element("td", form(value), class_="strong" if share > 0.5 else None, style=colour)


def _others(comparison: Comparison, at: Path) -> Markup:
    """The runs that have no result."""
    if not comparison.others:
        return Markup("")
    short = shortened(comparison.varied)
    rows = []
    for run in comparison.others:
        own = comparison.shown[str(run.folder)]
        asked = " ".join(f"{short[key]}={value}" for key, value in own.items())
        rows.append([_link(run, at, run.name), escape(asked), escape(run.trouble)])
    return page.section("Without a result", page.table(["run", "settings", "why"], rows))
