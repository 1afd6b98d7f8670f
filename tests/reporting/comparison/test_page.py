"""A comparison's page: its curves, points, tiles and colors match their runs."""

from pathlib import Path

import pytest

from cupynet.reporting.comparison import page
from cupynet.reporting.comparison.groups import Comparison, compared
from cupynet.reporting.comparison.runs import find
from tests.support.compared_runs import made

RUNS = ((1, 0.1, 0.90, 20.0), (2, 0.1, 0.95, 10.0), (1, 0.2, 0.80, 40.0), (2, 0.2, 0.85, 30.0))


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Return a comparison of the four runs."""
    for number, (workers, rate, accuracy, train_s) in enumerate(RUNS):
        made(tmp_path / str(number), workers=workers, rate=rate, test_accuracy=accuracy, train_s=train_s)
    return compared(find([str(tmp_path)]))


def test_each_curve_of_a_comparison_has_the_accuracy_of_its_own_run(comparison: Comparison) -> None:
    chart = page._curves(comparison, comparison.groups, "time", "seconds", "train_s")
    assert [line.y[-1] for line in chart.lines] == pytest.approx([90, 95, 80, 85])


def test_accuracy_against_time_is_in_percent(comparison: Comparison) -> None:
    points = [point for line in page._pareto(comparison).lines for point in zip(line.x, line.y, strict=True)]
    assert sorted(points) == [(10.0, 95.0), (20.0, 90.0), (30.0, 85.0), (40.0, 80.0)]


def test_tiles_of_a_comparison_show_the_best_figures_of_its_runs(comparison: Comparison) -> None:
    figures = {title: figure for title, figure, _ in page._tiles(comparison)}
    assert (figures["best test accuracy"], figures["shortest training"]) == ("95.00 %", "10.0 s")


def test_the_best_has_the_strongest_colour(comparison: Comparison) -> None:
    grid = page._grid(comparison)
    assert grid is not None
    accuracy, _, seconds = (
        max((c for _, row in t["rows"] for c in row), key=lambda c: c.strength) for t in grid["tables"]
    )
    assert (accuracy.text, seconds.text) == ("95.00 %", "10.0 s")
