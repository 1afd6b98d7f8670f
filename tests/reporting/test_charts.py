"""Charts and pictures: their contents, within a page and as files."""

import base64
import io
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pictures

from cupynet.reporting import charts, pictures
from cupynet.reporting.charts import MAX_POINTS, PALETTE, Chart, Line, run_charts, thinned
from cupynet.reporting.folder import read_run
from tests.support.pages import Page, check_alone
from tests.support.run_folders import HOSTILE, finished, history, unfinished

if "CUPYNET_TEST_ALL" not in os.environ:
    pytest.importorskip("matplotlib")

LOSS = Chart(
    "Loss", "iteration", "loss", [Line("test", [1, 2, 3], [0.5, 0.1, 0.02]), Line("x", [1, 2], [0.3, None], 1)]
)


def test_a_chart_is_an_svg_with_the_text_and_colors_of_the_page() -> None:
    text = charts.svg(LOSS, "one")
    assert text.startswith('<svg viewBox="') and 'aria-label="Loss: loss over iteration"' in text
    words = Page(text).text
    assert "iteration" in words and "loss" in words and "0.4" in words
    assert "var(--c0)" in text and "var(--c1)" in text and "var(--muted)" in text
    assert not re.search("#[0-9a-f]{6}", text.lower()) and "font-family" not in text and "DejaVu" not in text
    assert re.findall(r'id="one-', text) and not re.search(r'(id="|href="#|url\(#)(?!one-)', text)
    check_alone(f"<div>{text}{charts.svg(LOSS, 'two')}</div>")


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_of_any_numbers_is_drawn(log: bool) -> None:
    some: list[list[float | None]] = [[1.0], [0.0, 0.0], [-1.0, 2.0], [math.nan, 1.0, None, math.inf]]
    extremes: list[list[float | None]] = [[1e-300, 1e300], [sys.float_info.max, -1e308]]
    for values in some + extremes:
        chart = Chart("t", "x", "y", [Line("a", list(range(len(values))), values)], log=log)
        assert charts.svg(chart, "c").startswith("<svg")


def test_lines_without_finite_points_are_omitted() -> None:
    nothing, gap = Line("nothing", [1, 2], [None, math.nan]), Line("gap", [1, 2], [None, 2.0], 5)
    chart = Chart("t", "x", "y", [nothing, Line(None, [1], [1.0]), gap])
    assert [line.name for line in chart.shown] == [None, "gap"]
    assert chart.legend == [("gap", 5, False)]


def test_a_long_line_is_thinned_to_the_means_of_neighbours() -> None:
    xs = list(range(1, 10 * MAX_POINTS + 1))
    x, y = thinned(xs, [1.0, 3.0] * (5 * MAX_POINTS))
    assert len(x) == MAX_POINTS and x[-1] == xs[-1] and set(y) == {2.0}
    x, y = thinned(xs[: MAX_POINTS + 1], [None, math.inf, 4.0] + [5.0] * (MAX_POINTS - 2))
    assert x[:2] == [2, 4] and x[-1] == MAX_POINTS + 1 and math.isnan(y[0]) and y[1:3] == [4.5, 5.0]
    assert thinned([], []) == ([], [])


def test_the_colors_of_charts_match_the_page() -> None:
    style = Path(charts.__file__).with_name("templates") / "style.css"
    light = style.read_text(encoding="utf-8").partition("@media")[0]
    assert [f"--c{index}: {color};" in light for index, color in enumerate(PALETTE)] == [True] * len(PALETTE)


def shown(folder: Path) -> dict[str, Chart]:
    return {chart.title: chart for chart in run_charts(read_run(folder)) if chart.shown}


def test_the_curves_of_a_run_match_history_jsonl(tmp_path: Path) -> None:
    """Accuracy is in percent, and times are means over the workers."""
    drawn = shown(finished(tmp_path))
    assert list(drawn) == [
        "Loss", "Accuracy", "Learning rate", "Replica drift", "Throughput", "Epoch time by activity",
    ]  # fmt: skip
    lines = {line.name: list(line.y) for line in drawn["Loss"].shown}
    assert list(lines)[-2:] == ["training, by epoch", "test"] and len(lines["worker 0"]) == 12
    assert lines["training, by epoch"] == pytest.approx([0.5, 0.25, 0.5 / 3])
    assert lines["test"] == pytest.approx([0.6, 0.3, 0.2])
    assert lines["each worker, by epoch"] == pytest.approx([0.4, 0.2, 0.4 / 3])
    assert lines[None] == pytest.approx([0.6, 0.3, 0.2])  # for the other worker
    training, accuracy = drawn["Accuracy"].shown
    assert training.name == "training" and list(training.y) == pytest.approx([60, 80, 100 - 40 / 3])
    assert list(accuracy.x) == [1, 2, 3] and list(accuracy.y) == pytest.approx([80, 90, 100 - 20 / 3])
    spent = {line.name: line.y[0] for line in drawn["Epoch time by activity"].shown}
    assert spent == pytest.approx({"computing": 1.5, "averaging": 0.2, "data": 0.01, "other": 0.29})


def test_the_drift_of_the_layers_with_the_largest_drift_is_drawn(tmp_path: Path) -> None:
    layers = {f"layer{number}": 0.01 * number for number in range(charts.MAX_LAYERS + 2)}
    rows = [row | {"drift": 0.1, "drift_by_layer": layers} for row in history()]
    lines = shown(unfinished(tmp_path, rows=rows))["Replica drift"].shown
    assert [line.name for line in lines] == [*list(layers)[2:], "all weights"]


def test_the_drift_of_a_run_without_reports_is_drawn_from_its_epochs(tmp_path: Path) -> None:
    known = {"learning_rate": 0.1, "drift": 0.1, "drift_by_layer": {"conv1": 0.2}}
    drawn = shown(unfinished(tmp_path, rows=[row | known for row in history(reports=0)]))
    lines = drawn["Replica drift"].shown
    assert [(line.name, list(line.y)) for line in lines] == [("conv1", [0.2] * 3), ("all weights", [0.1] * 3)]


@pytest.mark.parametrize("shape", [(5, 9, 3), (1, 200, 4), (4, 4, 7)], ids=str)
def test_pictures_of_mistakes_of_any_size_are_shown(shape: tuple[int, ...]) -> None:
    image = pictures.example(np.zeros(shape, np.uint8), HOSTILE)
    assert max(image.width, image.height) == 96 and min(image.width, image.height) > 0 and image.alt == HOSTILE


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_of_a_mistake_has_its_pixels(channels: int) -> None:
    image = np.random.default_rng(3).integers(0, 256, (5, 7, channels)).astype(np.uint8)
    source = pictures.example(image, "x").source
    with Pictures.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2]))) as picture:
        np.testing.assert_array_equal(np.asarray(picture).reshape(image.shape), image)
