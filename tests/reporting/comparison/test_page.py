"""A comparison's page: its curves, points, tiles and colors match their runs."""

from pathlib import Path
from typing import Any

import pytest

from cupynet.reporting.comparison import page
from cupynet.reporting.comparison.groups import compared
from cupynet.reporting.comparison.runs import find
from tests.support.compared_runs import made

RUNS = ((1, 0.1, 0.90, 20.0), (2, 0.1, 0.95, 10.0), (1, 0.2, 0.80, 40.0), (2, 0.2, 0.85, 30.0))


def test_curves_points_tiles_and_colours_of_compare_html_are_those_of_their_runs(tmp_path: Path) -> None:
    for number, (workers, rate, accuracy, train_s) in enumerate(RUNS):
        made(tmp_path / str(number), workers=workers, rate=rate, test_accuracy=accuracy, train_s=train_s)
    comparison = compared(find([str(tmp_path)]))
    chart = page._curves(comparison, comparison.groups, "time", "seconds", "train_s")
    assert [line.y[-1] for line in chart.lines] == pytest.approx([90, 95, 80, 85])
    points = [point for line in page._pareto(comparison).lines for point in zip(line.x, line.y, strict=True)]
    assert sorted(points) == [(10.0, 95.0), (20.0, 90.0), (30.0, 85.0), (40.0, 80.0)]
    figures = {title: figure for title, figure, _ in page._tiles(comparison)}
    assert (figures["best test accuracy"], figures["shortest training"]) == ("95.00 %", "10.0 s")
    grid: Any = page._grid(comparison)
    strongest = [max((c for _, row in t["rows"] for c in row), key=lambda c: c.strength).text for t in grid["tables"]]
    assert (strongest[0], strongest[2]) == ("95.00 %", "10.0 s")
