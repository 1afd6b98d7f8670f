"""Line charts: as SVG in a page, with its colours and fonts, and as a PNG file.

The only file that uses matplotlib, which is imported when something is drawn: `pip install 'cupynet[plots]'`.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cupynet.reporting.folder import RunData, finite

# The colours of the light page (templates/style.css); in an SVG they become its variables. They can be distinguished
# with a colour vision deficiency (Okabe and Ito 2008, "Color universal design"). The last is for lines in the
# background.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0518b", "#c98500", "#7d8793")
BACKGROUND = len(PALETTE) - 1
INK, MUTED, GRID = "#1c2128", "#5b6470", "#dde1e6"
MAX_POINTS = 400  # of a line; a chart is about 500 pixels wide
MAX_WORKERS = 64  # lines for workers
MAX_LAYERS = 5  # lines for layers: those with the largest divergence
SIZE = (5.6, 2.9)  # inches of 72 units
LEFT, RIGHT, BOTTOM = 0.66, 0.12, 0.52  # margins in inches: labels of seven characters, and the name of the axis
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 10.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.linewidth": 0.8,
    "axes.titlesize": 12,
    "axes.formatter.use_mathtext": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a dollar sign
    "text.usetex": False,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
MISSING = "charts need matplotlib: pip install 'cupynet[plots]'"
SECONDS = (  # parts of an epoch's time: key, name, colour
    ("compute_s", "computing", 0),
    ("averaging_s", "averaging", 1),
    ("data_s", "data", 2),
    ("waiting_s", "waiting", 3),
)
OTHER = ("other", 4)


class Entry(NamedTuple):
    """A line of a legend: its name, the number of its colour, and whether it is dashed."""

    name: str
    colour: int
    dashed: bool = False


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: its entry in the legend; None for no entry.
        x, y: coordinates of the points; a y that is None or not finite leaves a gap.
        colour: index into the palette, modulo its length.
        width: in points.
        dashed: draw a dashed line.
        behind: draw it behind the other lines.
        points: mark each point.
    """

    name: str | None
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    width: float = 1.8
    dashed: bool = False
    behind: bool = False
    points: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis.

    Attributes:
        title, x_label, y_label: labels with units.
        lines: those without a finite value are left out.
        log: the vertical axis is logarithmic if all values are positive.
        log_x: the horizontal axis is logarithmic.
        percent: values are fractions, shown as percentages.
        zero: the vertical axis begins at zero.
        stacked: the lines add up, and the areas between them are filled.
        note: a sentence below the chart.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = field(default_factory=tuple)
    log: bool = False
    log_x: bool = False
    percent: bool = False
    zero: bool = False
    stacked: bool = False
    note: str = ""

    @property
    def shown(self) -> list[Line]:
        """The lines that have a finite value."""
        return [line for line in self.lines if any(finite(value) is not None for value in line.y)]

    def legend(self) -> list[Entry]:
        """Return the legend of the chart in a page."""
        return [Entry(each.name, each.colour % len(PALETTE), each.dashed) for each in self.shown if each.name]


def available() -> bool:
    """Return True if matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def figures(charts: Iterable[Chart]) -> tuple[list[dict[str, Any]], str]:
    """Return the charts that have data, for a template, and the reason if they cannot be drawn."""
    shown = [chart for chart in charts if chart.shown]
    if shown and not available():
        return [], MISSING
    return [
        {"title": chart.title, "svg": svg(chart, f"chart{index}"), "legend": chart.legend(), "note": chart.note}
        for index, chart in enumerate(shown)
    ], ""


def svg(chart: Chart, name: str) -> str:
    """Draw a chart as an `<svg>` element. name: unique in its page."""
    with _style():
        figure = _figure(1, 1)
        _draw(chart, figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _inline(text.getvalue(), name, f"{chart.title}: {chart.y_label} over {chart.x_label}")


def png(charts: Iterable[Chart]) -> bytes:
    """Draw all charts as one picture on white paper."""
    shown = [chart for chart in charts if chart.shown]
    rows, columns = max(math.ceil(len(shown) / 2), 1), max(min(len(shown), 2), 1)
    with _style():
        figure = _figure(rows, columns, top=0.62)
        for place, chart in enumerate(shown):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.set_title(chart.title, loc="left", fontweight="bold", color=INK, pad=22)
            _draw(chart, axes)
            if chart.legend():
                frame = {"frameon": chart.stacked, "facecolor": "white", "edgecolor": "none"}
                many = sum(len(line.y) for line in chart.shown) >= 1000
                axes.legend(fontsize=9, loc="upper right" if many else "best", **frame)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120, facecolor="white", metadata={"Software": None})
    return content.getvalue()


def thinned(x: Sequence[float], y: Sequence[float | None], most: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """Return at most `most` points of a line: means of neighbours, NaN if none is finite. The last x is kept."""
    step = max(math.ceil(len(x) / most), 1)
    xs, ys = [], []
    for begin in range(0, len(x), step):
        values = [value for each in y[begin : begin + step] if (value := finite(each)) is not None]
        xs.append(float(x[min(begin + step, len(x)) - 1]))
        ys.append(math.fsum(values) / len(values) if values else math.nan)
    return xs, ys


# drawing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as a glyph that a font lacks
        yield


def _figure(rows: int, columns: int, top: float = 0.32) -> Any:
    """Return an empty figure with fixed margins: computing them doubles the time of a chart."""
    from matplotlib.figure import Figure  # not pyplot, which chooses a window system and keeps every figure

    width, height = SIZE[0] * columns, SIZE[1] * rows
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        LEFT / width,
        BOTTOM / height,
        1 - RIGHT / width,
        1 - top / height,
        wspace=(LEFT + RIGHT) / (SIZE[0] - LEFT - RIGHT),
        hspace=(BOTTOM + top) / (SIZE[1] - BOTTOM - top),
    )
    return figure


def _draw(chart: Chart, axes: Any) -> None:
    """Draw a chart on matplotlib's axes."""
    lines = chart.shown
    if chart.stacked and lines:
        _stack(lines, axes)
    else:
        for line in lines:
            x, y = thinned(line.x, line.y)
            axes.plot(
                x,
                y,
                label=line.name or "_",
                color=PALETTE[line.colour % len(PALETTE)],
                linewidth=line.width,
                linestyle="--" if line.dashed else "-",
                zorder=1.5 if line.behind else 2,
                marker="o" if line.points or len(x) < 3 else None,
                markersize=4.5,
            )
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label, rotation=0, ha="left", va="bottom")  # above the axis and its labels
    axes.yaxis.set_label_coords(-(LEFT - 0.05) / (SIZE[0] - LEFT - RIGHT), 1.04)
    values = [value for line in lines for each in line.y if (value := finite(each)) is not None]
    if chart.log and values and min(values) > 0 and max(values) / min(values) < 1e30:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        wide = max(values) / min(values) >= 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.ticklabel_format(useOffset=False, style="plain")
    axes.yaxis.set_major_formatter((lambda y, _: f"{100 * y:.4g}") if chart.percent else (lambda y, _: _short(y)))
    if chart.log_x:
        axes.set_xscale("log")
    else:
        axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter(lambda x, _: _short(x))
    if chart.zero:
        axes.set_ylim(bottom=0)


def _stack(lines: Sequence[Line], axes: Any) -> None:
    """Draw areas on top of each other. All lines have the same x."""
    heights = [[0.0 if math.isnan(value) else value for value in thinned(line.x, line.y)[1]] for line in lines]
    x = thinned(lines[0].x, lines[0].y)[0]
    if len(x) == 1:  # an area needs a width
        x, heights = [x[0] - 0.5, x[0] + 0.5], [[value[0], value[0]] for value in heights]
    colours = [PALETTE[line.colour % len(PALETTE)] for line in lines]
    axes.stackplot(x, heights, labels=[line.name or "_" for line in lines], colors=colours, linewidth=0)
    axes.set_xlim(x[0], x[-1])


def _short(value: float) -> str:
    """Format a number of an axis in about six characters: 12,000 and 3.4M."""
    for least, unit, divisor in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e5, "k", 1e3)):
        if abs(value) >= least:
            return f"{value / divisor:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _inline(text: str, name: str, label: str) -> str:
    """Turn matplotlib's SVG file into an element: no prologue, unique ids, the page's font and colours."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<(metadata|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    text = re.sub(
        r"<svg[^>]*>", lambda _: f'<svg {view[0]} role="img" aria-label="{html.escape(label)}">', text, count=1
    )
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in ((INK, "ink"), (MUTED, "muted"), (GRID, "line")):
        text = text.replace(colour, f"var(--{variable})")
    for index, colour in enumerate(PALETTE):
        text = text.replace(colour, f"var(--c{index})")
    return text.replace("xlink:href", "href")


# the charts of a run ----------------------------------------------------------------------------------------------


def run_charts(data: RunData) -> list[Chart]:
    """Return the charts of a run's history."""
    builders = (_loss, _accuracy, _learning_rate, _divergence, _throughput, _epoch_times)
    drawn = [data.section(build.__name__.strip("_").replace("_", " "), build) for build in builders]
    return [chart for chart in drawn if chart is not None]


def _values(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return a value of each row, NaN if it is not a finite number."""
    return [math.nan if (value := finite(row.get(name))) is None else value for row in rows]


def _line_of(
    rows: Sequence[dict[str, Any]], key: str, name: str | None, colour: int = 0, x: str = "iteration", **look: Any
) -> Line:
    """Return the line of a value over the iterations, or over another value."""
    return Line(name, _values(rows, x), _values(rows, key), colour, **look)


def _loss(data: RunData) -> Chart:
    reports, epochs = data.reports, data.epochs
    lines = [_line_of(reports, "loss", "worker 0", BACKGROUND, width=1.2, behind=True)]
    losses = [row.get("losses") or [] for row in epochs]
    workers = max(map(len, losses), default=0)
    for worker in range(min(workers, MAX_WORKERS) if workers > 1 else 0):
        own = [found[worker] if worker < len(found) else None for found in losses]
        name = None if worker else "each worker, by epoch"
        lines.append(Line(name, _values(epochs, "iteration"), own, 4, 1.2, dashed=True))
    lines.append(_line_of(reports, "score_after_averaging", "all replicas, since the last average"))
    lines.append(_line_of(epochs, "loss", "training, by epoch", 2, points=True))
    for split, colour in (("validation", 3), ("test", 1)):
        lines.append(_line_of(epochs, f"{split}_loss", split, colour, width=2.0, points=True))
    return Chart("Loss", "iteration", "loss (nats for softmax)", lines, log=True)


def _accuracy(data: RunData) -> Chart:
    lines = [
        _line_of(data.epochs, f"{split}_accuracy", split, colour, x="epoch", width=2.0, points=True)
        for split, colour in (("test", 1), ("validation", 3))
    ]
    return Chart("Accuracy", "epoch", "accuracy (%)", lines, percent=True)


def _learning_rate(data: RunData) -> Chart:
    rows = sorted([*data.reports, *data.epochs], key=lambda row: row["iteration"])
    return Chart("Learning rate", "iteration", "learning rate", [_line_of(rows, "learning_rate", None)], zero=True)


def _divergence(data: RunData) -> Chart:
    """Return the chart of the distance between replicas, overall and in the layers with the largest."""
    measured = [row for row in (*data.reports, *data.epochs) if row.get("divergence") is not None]
    rows = sorted(measured, key=lambda row: row["iteration"])
    by_layer = [row.get("divergence_by_layer") or {} for row in rows]
    largest: dict[str, float] = {}
    for row in by_layer:
        for name, value in row.items():
            largest[name] = max(largest.get(name, 0.0), value or 0.0)
    kept = sorted(largest, key=lambda name: -largest[name])[:MAX_LAYERS]
    lines = [
        Line(name, _values(rows, "iteration"), _values(by_layer, name), 1 + place, 1.1)
        for place, name in enumerate(name for name in largest if name in kept)
    ]
    lines.append(_line_of(rows, "divergence", "all weights", width=2.2))
    note = "The largest distance of a replica from the mean, relative to the mean, before an average."
    return Chart("Replica divergence", "iteration", "relative distance", lines, log=True, note=note)


def _throughput(data: RunData) -> Chart:
    lines = [
        _line_of(data.reports, "images_per_s", "since the last report", BACKGROUND, width=1.2, behind=True),
        Line("of the epoch", _values(data.epochs, "iteration"), list(map(_per_s, data.epochs)), 0, 2.0, points=True),
    ]
    return Chart("Throughput", "iteration", "images/s, all replicas", lines, zero=True)


def _per_s(row: dict[str, Any]) -> float | None:
    speed, samples, seconds = row.get("images_per_s"), row.get("samples"), row.get("train_s")
    return speed if speed is not None else samples / seconds if samples is not None and seconds else None


def _epoch_times(data: RunData) -> Chart:
    """Return the chart of the time of each epoch by activity, averaged over the workers."""
    epochs = [row for row in data.epochs if row.get("train_s") and row.get("compute_s")]
    numbers, rest = _values(epochs, "epoch"), _values(epochs, "train_s")
    lines = []
    for key, name, colour in SECONDS:
        means = [math.fsum(found) / max(len(found), 1) for found in (row.get(key, ()) for row in epochs)]
        rest = [left - mean for left, mean in zip(rest, means, strict=True)]
        if any(mean > 0 for mean in means):
            lines.append(Line(name, numbers, means, colour))
    if lines:
        lines.append(Line(OTHER[0], numbers, [max(left, 0.0) for left in rest], OTHER[1]))
    return Chart("Where the time of an epoch goes", "epoch", "seconds", lines, zero=True, stacked=True)
