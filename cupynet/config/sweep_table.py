"""Rows of figures as a table: on a terminal and as CSV."""

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

from cupynet.core.terminal import printable

PIPED = 80  # columns if stdout is not a terminal
GAP = 2  # between two columns
LEAST = 5  # characters that a shortened cell keeps
FORMULA = re.compile(r"\s*[=+@]|\s*-.|[\t\r]")  # the start of a formula; a single minus is not one


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: name in files.
        title: heading on a terminal, with its line breaks.
        cells: text of each row.
        values: value of each row, for files.
        right: True to align to the right, as figures are.
        weight: on a narrow terminal the columns of the lowest weight are left out first.
    """

    key: str
    title: str
    cells: Sequence[str]
    values: Sequence[Any] = field(default=())
    right: bool = True
    weight: int = 1

    @property
    def width(self) -> int:
        """Width in characters."""
        return max([*map(len, self.title.splitlines()), *map(len, self.cells)], default=0)


def heading(key: str) -> str:
    """Return a setting's name as a title; a long one is broken at underscores."""
    return key if len(key) <= 12 else key.replace("_", "_\n")


def shortened(keys: Sequence[str]) -> dict[str, str]:
    """Map dotted keys to their shortest unambiguous endings, of at least two parts if the key has more than two."""
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
    """Return the columns that fit into a width, and those that do not."""
    kept, left = list(columns), []
    while sum(column.width for column in kept) + GAP * (len(kept) - 1) > width and len(kept) > 1:
        least = min(kept, key=lambda column: (column.weight, -kept.index(column)))
        kept.remove(least)
        left.append(least)
    return kept, [column for column in columns if column in left]


class Screen(Console):
    """A console on stdout, 80 columns wide if that is not a terminal. Raises BrokenPipeError if the reader is gone.

    Control characters are replaced, because names of runs and errors are untrusted.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = PIPED

    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **how)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError from sys.exc_info()[1]


def show(columns: Sequence[Column], styles: Mapping[int, str], screen: Screen) -> list[Column]:
    """Print a table within the terminal's width. Return the columns left out. styles: row number -> style, as bold."""
    kept, left = fitting(columns, screen.width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in kept:
        table.add_column(
            Text(printable(column.title)), justify="right" if column.right else "left", vertical="bottom",
            no_wrap=True, overflow="ellipsis", min_width=min(column.width, LEAST),
        )  # fmt: skip
    for number, cells in enumerate(zip(*(column.cells for column in kept), strict=True)):
        table.add_row(*(Text(printable(cell)) for cell in cells), style=styles.get(number))
    screen.print(table)
    return left


def as_csv(columns: Sequence[Column]) -> str:
    """Return comma-separated values, with a line of names first. None is an empty cell.

    A text that a spreadsheet would take for a formula gets an apostrophe before it, because names of runs are not
    trusted. Numbers are unchanged.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    writer.writerows(zip(*(map(_no_formula, column.values) for column in columns), strict=True))
    return text.getvalue().encode(errors="replace").decode()  # a folder's name may not be valid UTF-8


def _no_formula(value: Any) -> Any:
    if not isinstance(value, str) or not FORMULA.match(value):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"
