"""Line charts as SVG elements of HTML pages, and as PNG files.

Requires matplotlib, which is imported on first use: `pip install 'cupynet[plots]'`.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

from cupynet.core.checks import finite
from cupynet.reporting.folder import RunData

# Colors of the light page (templates/style.css). In an SVG, they are replaced with CSS variables. Readers with color
# vision deficiencies can distinguish them (Okabe and Ito 2008, "Color universal design"). The last color is for
# background lines.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0518b", "#c98500", "#7d8793")
BACKGROUND = len(PALETTE) - 1
INK, MUTED, GRID = "#1c2128", "#5b6470", "#dde1e6"
MAX_POINTS = 400  # per line; a chart is about 500 pixels wide
LARGEST = 1e100  # values are clipped to this magnitude, because matplotlib fails near the largest float
MAX_WORKERS = 64  # maximum number of workers to plot
MAX_LAYERS = 5  # maximum number of layers to plot; those that drift the most are chosen
MAX_METRICS = 24  # maximum number of other metrics to plot
SPLITS = (("test", 1), ("validation", 3))  # evaluated data and indices of their colors
SIZE = (5.6, 2.9)  # inches (72 SVG units each)
LEFT, RIGHT, BOTTOM = 0.66, 0.12, 0.52  # margins in inches, for tick labels of seven characters and an axis label
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text, not paths
    "font.size": 10.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "text.parse_math": False,  # so that names may contain $
    "text.usetex": False,
    "grid.color": GRID,
}
MISSING = "Charts require matplotlib: pip install 'cupynet[plots]'"
SECONDS = (  # activities during an epoch: key, name, color
    ("compute_s", "computing", 0),
    ("averaging_s", "averaging", 1),
    ("data_s", "data", 2),
    ("waiting_s", "waiting", 3),
)
OTHER = ("other", 4)


@dataclass(frozen=True)
class Line:
    name: str | None  # legend entry; None for no entry
    x: Sequence[float]
    y: Sequence[float | None]  # a value that is None or not finite leaves a gap
    color: int = 0  # index into the palette
    width: float = 1.8
    dashed: bool = False
    points: bool = False  # True to mark each point


@dataclass(frozen=True)
class Chart:
    """Chart of one or more lines. Labels include units."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]  # lines without a finite value are omitted
    log: bool = False  # logarithmic y-axis if all values are positive
    zero: bool = False  # start the y-axis at zero
    stacked: bool = False  # stack the lines and fill the areas between them
    note: str = ""  # a sentence below the chart

    @property
    def shown(self) -> list[Line]:
        """The lines that have a finite value."""
        return [line for line in self.lines if any(finite(value) is not None for value in line.y)]

    @property
    def legend(self) -> list[tuple[str, int, bool]]:
        """Name and color of each named line, and True if it is dashed."""
        return [(line.name, line.color, line.dashed) for line in self.shown if line.name]


def figures(charts: Iterable[Chart]) -> tuple[list[tuple[Chart, str]], str]:
    """Return the charts that have data, each with its SVG, and "". Without matplotlib, return [] and the reason."""
    try:
        charts_with_data = enumerate(chart for chart in charts if chart.shown)
        return [(chart, svg(chart, f"chart{index}")) for index, chart in charts_with_data], ""
    except ImportError:
        return [], MISSING


def svg(chart: Chart, name: str) -> str:
    """Draw a chart as an `<svg>` element whose ids begin with `name`. Raise ImportError without matplotlib."""
    with _style():
        text = io.StringIO()
        _figure([chart], 0.32).savefig(text, format="svg", transparent=True)
    return _inline(text.getvalue(), name, f"{chart.title}: {chart.y_label} over {chart.x_label}")


def png(charts: Sequence[Chart]) -> bytes:
    """Draw charts side by side as a PNG with a white background. Raise ImportError without matplotlib."""
    with _style():
        figure, content = _figure(charts, 0.62), io.BytesIO()
        for chart, axes in zip(charts, figure.axes, strict=True):
            axes.set_title(chart.title, loc="left", fontsize=12, fontweight="bold", pad=22)
            axes.legend(fontsize=9, frameon=False)
        figure.savefig(content, format="png", dpi=120, facecolor="white", metadata={"Software": None})
    return content.getvalue()


def thinned(x: Sequence[float], y: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Reduce a line to at most `MAX_POINTS` points.

    Each point is the mean of the finite values of neighboring points, or NaN if there are none, at the x of the last of
    them. Values are clipped to `LARGEST`.
    """
    step = max(math.ceil(len(x) / MAX_POINTS), 1)
    xs, ys = [], []
    for start in range(0, len(x), step):
        values = [_clipped(value) for item in y[start : start + step] if (value := finite(item)) is not None]
        xs.append(_clipped(float(x[min(start + step, len(x)) - 1])))
        ys.append(math.fsum(values) / len(values) if values else math.nan)
    return xs, ys


def _clipped(value: float) -> float:
    return value if math.isnan(value) else max(-LARGEST, min(value, LARGEST))


# drawing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as a missing glyph
        yield


def _figure(charts: Sequence[Chart], top: float) -> Any:
    """Draw charts side by side, with an upper margin of `top` inches."""
    from matplotlib.figure import Figure  # pyplot selects a GUI backend and keeps every figure alive

    (width, height), columns = SIZE, len(charts)
    figure = Figure(figsize=(width * columns, height))
    inner = (1 - (LEFT + RIGHT) / width) / columns, 1 - (BOTTOM + top) / height  # automatic margins would be slow
    for column, chart in enumerate(charts):
        _draw(chart, figure.add_axes(((column + LEFT / width) / columns, BOTTOM / height, *inner)))
    return figure


def _draw(chart: Chart, axes: Any) -> None:
    lines = chart.shown
    points = [thinned(line.x, line.y) for line in lines]
    if chart.stacked:
        colors = [PALETTE[line.color] for line in lines]
        axes.stackplot(points[0][0], *(y for _, y in points), colors=colors, linewidth=0)
        axes.margins(x=0)
    else:
        for line, (x, y) in zip(lines, points, strict=True):
            axes.plot(
                x,
                y,
                label=line.name or "_",
                color=PALETTE[line.color],
                linewidth=line.width,
                linestyle="--" if line.dashed else "-",
                marker="o" if line.points or len(x) < 3 else None,
                markersize=4.5,
            )
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel(chart.x_label)
    left = (LEFT - 0.05) / (SIZE[0] - LEFT - RIGHT)
    axes.text(-left, 1.04, chart.y_label, transform=axes.transAxes, color=MUTED, va="bottom")  # above the axis
    values = [value for _, y in points for value in y if not math.isnan(value)]
    if chart.log and min(values) > 0 and max(values) / min(values) < 1e30:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.locator_params(axis="y", subs=(1.0,) if max(values) / min(values) >= 1000 else (1.0, 2.0, 5.0))
    axes.locator_params(axis="x", nbins=6, integer=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.6g}")
    if chart.zero:
        axes.set_ylim(bottom=0)


def _inline(text: str, name: str, label: str) -> str:
    """Convert matplotlib's SVG file to an element with unique ids and with the fonts and colors of the page."""
    text = re.sub(r"<(metadata|style)[^>]*>.*?</\1>", "", text[text.index("<svg") :].strip(), flags=re.DOTALL)
    head = f'role="img" aria-label="{html.escape(label)}"'
    text = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', lambda match: f"<svg {match[1]} {head}>", text, count=1)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    variables = {INK: "ink", MUTED: "muted", GRID: "line"}
    variables |= {color: f"c{index}" for index, color in enumerate(PALETTE)}
    for color, variable in variables.items():
        text = text.replace(color, f"var(--{variable})")
    return text.replace("xlink:href", "href")


# the charts of a run ----------------------------------------------------------------------------------------------


def run_charts(data: RunData) -> list[Chart]:
    builders = (_loss, _accuracy, _learning_rate, _drift, _throughput, _epoch_times)
    charts = [chart for build in builders if (chart := data.section(build)) is not None]
    return [*charts, *(data.section(_metrics) or [])]


def metrics_of(epochs: Sequence[dict[str, Any]]) -> list[str]:
    """Return up to `MAX_METRICS` columns of evaluation metrics other than loss and accuracy."""
    names = dict.fromkeys(name for row in epochs for name in row if name.startswith(("test_", "validation_")))
    return [name for name in names if name.partition("_")[2] not in ("loss", "accuracy")][:MAX_METRICS]


def _values(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return a column, with NaN for values that are not finite numbers."""
    return [math.nan if (value := finite(row.get(name))) is None else value for row in rows]


def _line(rows: Sequence[dict[str, Any]], key: str, name: str | None, color: int = 0, **style: Any) -> Line:
    return Line(name, _values(rows, "iteration"), _values(rows, key), color, **style)


def _loss(data: RunData) -> Chart:
    lines = [_line(data.reports, "loss", "worker 0", BACKGROUND, width=1.2)]
    workers = list(zip_longest(*(row.get("losses") or () for row in data.epochs)))[:MAX_WORKERS]
    for worker, losses in enumerate(workers if len(workers) > 1 else ()):
        name = None if worker else "each worker, by epoch"
        lines.append(Line(name, _values(data.epochs, "iteration"), losses, 4, 1.2, dashed=True))
    lines += [
        _line(data.reports, "score_after_averaging", "all replicas, since the last averaging step"),
        _line(data.epochs, "loss", "training, by epoch", 2, points=True),
        _line(data.epochs, "validation_loss", "validation", 3, width=2.0, points=True),
        _line(data.epochs, "test_loss", "test", 1, width=2.0, points=True),
    ]
    return Chart("Loss", "iteration", "loss (nats for softmax)", lines, log=True)


def _accuracy(data: RunData) -> Chart:
    lines = []
    for name, key, color in (("training", "accuracy", 2), *((split, f"{split}_accuracy", c) for split, c in SPLITS)):
        shares = [100 * value for value in _values(data.epochs, key)]
        lines.append(Line(name, _values(data.epochs, "epoch"), shares, color, 2.0, points=True))
    return Chart("Accuracy", "epoch", "accuracy (%)", lines)


def _metrics(data: RunData) -> list[Chart]:
    """Return a chart for each metric other than loss and accuracy."""
    charts, epochs = [], _values(data.epochs, "epoch")
    for name in dict.fromkeys(column.partition("_")[2] for column in metrics_of(data.epochs)):
        splits = ((split, _values(data.epochs, f"{split}_{name}"), color) for split, color in SPLITS)
        lines = [Line(split, epochs, values, color, 2.0, points=True) for split, values, color in splits]
        charts.append(Chart(name, "epoch", "value", lines))  # any name, because an SVG has no title
    return charts


def _learning_rate(data: RunData) -> Chart:
    return Chart("Learning rate", "iteration", "learning rate", [_line(data.rows, "learning_rate", None)], zero=True)


def _drift(data: RunData) -> Chart:
    """Return the chart of replica drift, for all weights and for the layers with the largest drift."""
    rows = [row for row in data.rows if row.get("drift") is not None]
    layers = [row.get("drift_by_layer") or {} for row in rows]
    names = dict.fromkeys(name for row in layers for name in row)
    largest = sorted(names, key=lambda name: -max(row.get(name) or 0.0 for row in layers))[:MAX_LAYERS]
    lines = [
        Line(name, _values(rows, "iteration"), _values(layers, name), color, 1.1)
        for color, name in enumerate(filter(largest.__contains__, names), 1)
    ]
    lines.append(_line(rows, "drift", "all weights", width=2.2))
    note = "The largest distance of a replica from the mean, relative to the norm of the mean, before averaging."
    return Chart("Replica drift", "iteration", "relative distance", lines, log=True, note=note)


def _throughput(data: RunData) -> Chart:
    lines = [
        _line(data.reports, "images_per_s", "since the last report", BACKGROUND, width=1.2),
        _line(data.epochs, "images_per_s", "whole epoch", width=2.0, points=True),
    ]
    return Chart("Throughput", "iteration", "images/s, all replicas", lines, zero=True)


def _epoch_times(data: RunData) -> Chart:
    """Return the chart of the time of each epoch by activity, as means over the workers."""
    epochs = [row for row in data.epochs if row.get("train_s") and row.get("compute_s")]
    numbers, rest = _values(epochs, "epoch"), _values(epochs, "train_s")
    lines = []
    for key, name, color in SECONDS if len(epochs) > 1 else ():
        means = [fmean(row.get(key) or (0.0,)) for row in epochs]
        rest = [total - mean for total, mean in zip(rest, means, strict=True)]
        if any(means):
            lines.append(Line(name, numbers, means, color))
    if lines:
        lines.append(Line(OTHER[0], numbers, [max(total, 0.0) for total in rest], OTHER[1]))
    return Chart("Epoch time by activity", "epoch", "seconds", lines, zero=True, stacked=True)
