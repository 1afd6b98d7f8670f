"""Rows of figures as a table: on a terminal, as CSV and as Markdown."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED = 80  # columns where there is no terminal that has a width of its own
GAP = 2  # between two columns
LEAST = 5  # characters of a cell that is cut
FORMULA = re.compile(r"\s*[=+@]|\s*-.|[\t\r]")  # how one begins; a minus by itself is none


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: its name in files; title: at its head on a terminal, its lines broken as they are to stand there.
        cells: of each row, as text; values: the same for files.
        right: whether the cells end in one line: figures.
        weight: which columns go first where not all have room: those of the lowest.
    """

    key: str
    title: str
    cells: Sequence[str]
    values: Sequence[Any] = field(default=())
    right: bool = True
    weight: int = 1

    @property
    def width(self) -> int:
        """Characters that it needs."""
        return max([*map(len, self.title.splitlines()), *map(len, self.cells)], default=0)


def heading(key: str) -> str:
    """A setting's name as a title: in lines of no more than a dozen characters where it has underscores to break at."""
    lines, line = [], ""
    for word in key.replace("_", "_ ").split():
        if line and len(line) + len(word) > 12:
            lines.append(line)
            line = ""
        line += word
    return "\n".join([*lines, line])


def shortened(keys: Sequence[str]) -> dict[str, str]:
    """Map dotted keys to their last parts, as many as tell them apart, and the layer or part that a setting is of."""
    found = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1 if len(parts) <= 2 else 2, len(parts) + 1):
            short = ".".join(parts[-count:])
            if sum(other == short or other.endswith(f".{short}") for other in keys) == 1:
                break
        found[key] = short
    return found


def fitting(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Column]]:
    """The columns that have room beside each other, and those that have to be left out."""
    kept, left = list(columns), []
    while sum(column.width for column in kept) + GAP * (len(kept) - 1) > width and len(kept) > 1:
        least = min(kept, key=lambda column: (column.weight, -kept.index(column)))
        kept.remove(least)
        left.append(least)
    return kept, [column for column in columns if column in left]


class Screen(Console):
    """stdout, as wide as it is, or 80 columns where it is no terminal. BrokenPipeError where nobody reads any more."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = PIPED

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError from sys.exc_info()[1]


def show(columns: Sequence[Column], styles: Mapping[int, str], screen: Screen) -> list[Column]:
    """Print a table of at most the terminal's width; what had no room. styles: of rows, by number, such as bold."""
    kept, left = fitting(columns, screen.width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in kept:
        table.add_column(
            Text(column.title), justify="right" if column.right else "left", no_wrap=True, overflow="ellipsis",
            vertical="bottom", min_width=min(column.width, LEAST),
        )  # fmt: skip
    for number, cells in enumerate(zip(*(column.cells for column in kept), strict=True)):
        table.add_row(*map(Text, cells), style=styles.get(number))
    screen.print(table)
    return left


def as_csv(columns: Sequence[Column]) -> str:
    """Comma-separated values, a line of names first; empty where there is none.

    A text that a spreadsheet would take for a formula has an apostrophe before it: what a run was called may be
    anybody's. Numbers, negative ones too, are as they are.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    writer.writerows(zip(*(map(_no_formula, column.values) for column in columns), strict=True))
    return text.getvalue().encode(errors="replace").decode()  # a folder's name may be no text


def _no_formula(value: Any) -> Any:
    if not isinstance(value, str) or not FORMULA.match(value):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def as_markdown(columns: Sequence[Column]) -> str:
    """A table of Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("---:" if column.right else "---" for column in columns) + "|"
    rows = zip(*(column.cells for column in columns), strict=True)
    head = [column.title.replace("_\n", "_").replace("-\n", "-").replace("\n", " ").strip() for column in columns]
    return "\n".join([line(head), rule, *map(line, rows)]) + "\n"
