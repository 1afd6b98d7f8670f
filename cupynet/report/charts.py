"""Charts of lines: as SVG within a page, where text is text and colours are the page's, and as a PNG file.

The only place of matplotlib, which is imported when something is drawn: `pip install 'cupynet[plots]'`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cupynet.errors import ConfigError
from cupynet.report.page import COLOURS, Entry, Markup, escape

# The page's own for light paper (style.css), by which they are found in what matplotlib writes. Each can be told from
# the others with a colour vision deficiency: after Okabe and Ito (2008), "Color universal design".
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b0518b", "#c98500", "#3b9fd8")
INK, MUTED, GRID = "#1c2128", "#5b6470", "#dde1e6"
MOST_POINTS = 400  # of a line in a chart 500 pixels wide
_SIZE = (5.6, 2.9)  # inches of 72 units
_MARGINS = (0.66, 0.12, 0.52)  # left, right, bottom of a chart: labels of seven characters, and what the axis is
MISSING = "charts need matplotlib: pip install 'cupynet[plots]'"


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: in the legend; None: it stands there not at all, as the lines of many workers do.
        x, y: as many numbers; where y is None or not finite there is a gap.
        colour: which of the palette, counted round.
        width: in points. dashed: not solid. faint: behind the others. points: each is marked.
    """

    name: str | None
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    width: float = 1.8
    dashed: bool = False
    faint: bool = False
    points: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis.

    Attributes:
        title, x_label, y_label: labels with units.
        lines: those without a finite value are left out.
        log: the vertical axis is logarithmic, where all values are positive. log_x: so is the horizontal one.
        percent: values are fractions and shown as percentages. zero: the vertical axis begins at zero.
        stacked: the areas between lines that add up.
        note: to be said below it.
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
        """The lines that have anything to show."""
        return [line for line in self.lines if any(_finite(value) for value in line.y)]

    def legend(self) -> list[Entry]:
        """For the page: what each line is."""
        return [Entry(each.name, each.colour % COLOURS, each.dashed) for each in self.shown if each.name is not None]


def available() -> bool:
    """Whether matplotlib can be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def warm_up() -> None:
    """Import what drawing needs, now rather than then; nothing where it is not there."""
    if available():
        svg(Chart("", "", "", [Line("", [0, 1], [1.0, 2.0])], log=True), "warm")
        from matplotlib.backends import backend_agg  # noqa: F401


def svg(chart: Chart, name: str) -> Markup:
    """The chart as an `<svg>` element for a page in which no other has this name. ConfigError without matplotlib."""
    with _style():
        figure = _figure(1, 1)
        _draw(chart, figure.subplots(), legend=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return Markup(_inline(text.getvalue(), name, f"{chart.title}: {chart.y_label} over {chart.x_label}"))


def png(charts: Iterable[Chart]) -> bytes:
    """All charts as one picture on white paper. ConfigError without matplotlib."""
    shown = [chart for chart in charts if chart.shown]
    columns = min(len(shown), 2)
    with _style():
        rows = max(math.ceil(len(shown) / 2), 1)
        figure = _figure(rows, max(columns, 1), top=0.62)
        for place, chart in enumerate(shown):
            axes = figure.add_subplot(rows, columns, place + 1)
            axes.set_title(chart.title, loc="left", fontweight="bold", color=INK, pad=22)
            _draw(chart, axes, legend=True)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120, facecolor="white", metadata={"Software": None})
    return content.getvalue()


def thinned(x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most `most` points of a line: means of neighbours, NaN where none of them is finite; the last x stays."""
    step = max(math.ceil(len(x) / most), 1)
    xs, ys = [], []
    for begin in range(0, len(x), step):
        values = [float(value) for value in y[begin : begin + step] if value is not None and math.isfinite(value)]
        xs.append(float(x[min(begin + step, len(x)) - 1]))
        ys.append(math.fsum(values) / len(values) if values else math.nan)
    return xs, ys


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(MISSING) from error
    settings: dict[str, Any] = {
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
        "text.parse_math": False,  # a name with $ is a name
        "text.usetex": False,
        "axes.unicode_minus": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(settings):
        yield


def _figure(rows: int, columns: int, top: float = 0.32) -> Any:
    """An empty figure for so many charts. Margins are given: to look for them takes as long as all the rest."""
    from matplotlib.figure import Figure  # not pyplot, which chooses a window system and keeps every figure

    width, height = _SIZE[0] * columns, _SIZE[1] * rows
    figure = Figure(figsize=(width, height))
    left, right, bottom = _MARGINS
    figure.subplots_adjust(
        left / width,
        bottom / height,
        1 - right / width,
        1 - top / height,
        wspace=(left + right) / (_SIZE[0] - left - right),
        hspace=(bottom + top) / (_SIZE[1] - bottom - top),
    )
    return figure


def _draw(chart: Chart, axes: Any, *, legend: bool) -> None:
    """The chart on matplotlib's axes."""
    lines = chart.shown
    if chart.stacked:
        _stack(lines, axes)
    else:
        for line in lines:
            _line(line, axes)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label, rotation=0, ha="left", va="bottom")  # above, where no label of the axis is
    axes.yaxis.set_label_coords(-(_MARGINS[0] - 0.05) / (_SIZE[0] - _MARGINS[0] - _MARGINS[1]), 1.04)
    values = [float(value) for line in lines for value in line.y if value is not None and _finite(value)]
    if chart.log and values and min(values) > 0 and max(values) / min(values) < 1e30:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        wide = max(values) / min(values) >= 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, _: _short(value))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.ticklabel_format(useOffset=False, style="plain")
        axes.yaxis.set_major_formatter((lambda x, _: f"{100 * x:.4g}") if chart.percent else (lambda x, _: _short(x)))
    if chart.log_x:
        axes.set_xscale("log")
    else:
        axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter(lambda x, _: _short(x))
    if chart.zero:
        axes.set_ylim(bottom=0)
    names = [line.name for line in lines if line.name is not None]
    if legend and names:
        axes.legend(
            frameon=chart.stacked,
            facecolor="white",
            edgecolor="none",
            fontsize=9,
            loc="best" if len(values) < 1000 else "upper right",
        )


def _line(line: Line, axes: Any) -> None:
    x, y = thinned(line.x, line.y)
    axes.plot(
        x,
        y,
        label="_" if line.name is None else line.name,
        color=PALETTE[line.colour % COLOURS],
        linewidth=line.width,
        linestyle="--" if line.dashed else "-",
        alpha=0.55 if line.faint else 1.0,
        zorder=1.5 if line.faint else 2,
        marker="o" if line.points or len(x) < 3 else None,
        markersize=4.5,
        clip_on=True,
    )


def _stack(lines: Sequence[Line], axes: Any) -> None:
    """Areas on top of each other; all lines have the same x."""
    if not lines:
        return
    heights = [[0.0 if math.isnan(value) else value for value in thinned(line.x, line.y)[1]] for line in lines]
    x = thinned(lines[0].x, lines[0].y)[0]
    if len(x) == 1:  # an area needs a width
        x, heights = [x[0] - 0.5, x[0] + 0.5], [[value[0], value[0]] for value in heights]
    colours = [PALETTE[line.colour % COLOURS] for line in lines]
    axes.stackplot(x, heights, labels=[line.name or "_" for line in lines], colors=colours, linewidth=0)
    axes.set_xlim(x[0], x[-1])


def _short(value: float) -> str:
    """A number of an axis in six characters or so: 12,000 and 3.4M."""
    for least, unit in ((1e9, "G"), (1e6, "M"), (1e5, "k")):
        if abs(value) >= least:
            return f"{value / (1000 if unit == 'k' else least):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


_REFERENCE = re.compile(r'(id="|url\(#|href="#)')
_FONT = re.compile(r"font: ([\d.]+)px [^;\"]*")
_FAMILY = re.compile(r"font-family: [^;\"]*;?")


def _inline(text: str, name: str, label: str) -> str:
    """matplotlib's SVG file as an element of a page: no prologue, names of its own, the page's font and colours."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<(metadata|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    opening = re.match(r"<svg[^>]*>", text)
    view = re.search(r'viewBox="[^"]*"', text)
    assert opening is not None and view is not None
    text = f'<svg {view.group()} role="img" aria-label="{escape(label)}">' + text[opening.end() :]
    text = _REFERENCE.sub(lambda found: f"{found.group()}{name}-", text)
    text = _FONT.sub(r"font-size: \1px", text)
    text = _FAMILY.sub("", text)
    for colour, variable in zip((INK, MUTED, GRID), ("ink", "muted", "line"), strict=True):
        text = text.replace(colour, f"var(--{variable})")
    for index, colour in enumerate(PALETTE):
        text = text.replace(colour, f"var(--c{index})")
    return text.replace("xlink:href", "href")
