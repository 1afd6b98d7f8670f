"""Tables and plots for notebooks. Plots require matplotlib (`pip install 'cupynet[plots]'`)."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any


def html_table(heading: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    caption_html = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{caption_html}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def figure(columns: int) -> tuple[Any, list[Any]]:
    """Create a matplotlib figure with axes side by side. Raise ImportError if there is no matplotlib."""
    from matplotlib.figure import Figure  # pyplot keeps every figure alive and may open a window

    class Shown(Figure):
        """A figure that notebooks display without pyplot."""

        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png")
            return content.getvalue()

    shown = Shown(figsize=(4.5 * columns, 3.2), layout="constrained")
    return shown, list(shown.subplots(1, columns, squeeze=False)[0])


def lines(axes: Any, title: str, x: Sequence[Any], values: Mapping[str, Sequence[Any]]) -> None:
    """Draw one line per name, skipping None values."""
    for name, row in values.items():
        points = [(position, value) for position, value in zip(x, row, strict=True) if value is not None]
        axes.plot([position for position, _ in points], [value for _, value in points], marker=".", label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title)
    if len(values) > 1:
        axes.legend()


def matrix(axes: Any, values: Any, names: Sequence[str]) -> None:
    """Draw a confusion matrix (classes, classes) normalized by row, with counts if there are at most 15 classes."""
    totals = values.sum(axis=1, keepdims=True)
    axes.imshow(values / totals.clip(1), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="actual", title="Confusion matrix")
    axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0, parse_math=False)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    if len(names) <= 15:
        for row, column in zip(*values.nonzero(), strict=True):
            dark = values[row, column] > totals[row, 0] / 2
            color = "white" if dark else "black"
            axes.text(column, row, f"{values[row, column]}", ha="center", va="center", color=color, fontsize=8)


def against(axes: Any, true: Any, predicted: Any, title: str) -> None:
    """Plot predicted against true values (N,), with the identity line."""
    axes.plot(true, predicted, ".", alpha=0.6)
    if len(true):
        axes.axline((float(true[0]), float(true[0])), slope=1, color="gray", linewidth=1)
    axes.set(xlabel="actual", ylabel="predicted", title=title)
