"""Tables on the terminal and in CSV files."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from cupynet.core.terminal import printable

ABSENT = "-"  # a cell without a value
PIPED = 80  # width if stdout is not a terminal
GAP = 2  # spaces between columns


@dataclass(frozen=True)
class Column:
    key: str  # name in files
    title: str  # heading on the terminal; may contain line breaks
    cells: Sequence[str]  # formatted values, for the terminal
    values: Sequence[Any] = field(default=())  # raw values, for files
    right: bool = True  # aligned right on the terminal

    @property
    def width(self) -> int:
        return max([*map(len, self.title.splitlines()), *map(len, self.cells)], default=0)


def column(
    key: str, values: Sequence[Any], form: Callable[[Any], str] = str, title: str | None = None, *, right: bool = True
) -> Column:
    """Create a column from values. None is shown as `-` on the terminal and left empty in files."""
    cells = [ABSENT if value is None else form(value) for value in values]
    return Column(key, key if title is None else title, cells, values, right)


def setting_columns(values: Mapping[str, Sequence[Any]]) -> list[Column]:
    """Create a column for each setting, titled with its shortened name. Long titles break at underscores."""
    short = shortened(list(values))
    titles = {key: name if len(name) <= 12 else name.replace("_", "_\n") for key, name in short.items()}
    return [column(key, of_key, title=titles[key]) for key, of_key in values.items()]


def shortened(keys: Sequence[str]) -> dict[str, str]:
    """Map dotted keys to their shortest unambiguous suffixes, with at least two parts if a key has more than two.

    `data.seed` stays, because `seed` is another setting, which a comparison does not list.
    """
    result, known = {}, {*keys, "seed"}
    for key in keys:
        parts = key.split(".")
        for count in range(1 if len(parts) <= 2 else 2, len(parts) + 1):
            short = ".".join(parts[-count:])
            if sum(other == short or other.endswith(f".{short}") for other in known) == 1:
                break
        result[key] = short
    return result


class Screen(Console):
    """Console on stdout, 80 columns wide if piped. Raises BrokenPipeError if the reader has closed the pipe.

    Control characters are replaced, because names of runs and errors are untrusted.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = PIPED

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **options)

    def on_broken_pipe(self) -> None:  # by default rich exits the process
        raise BrokenPipeError from sys.exc_info()[1]


def show(columns: Sequence[Column], screen: Screen, remedy: str, needed: Sequence[str] = ()) -> None:
    """Print a table. If it is too wide, wrap long cells, omit the last columns and print `remedy` (where they are).

    needed: keys of columns that are not omitted; the first column is never omitted either.
    """
    widths = {item.key: item.width for item in columns}
    if _total(widths.values()) > screen.width:
        widths = {key: min(width, screen.width // 3) for key, width in widths.items()}
    for item in reversed(columns[1:]):
        if _total(widths.values()) > screen.width and item.key not in needed:
            del widths[item.key]
    shown = [item for item in columns if item.key in widths]
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for item in shown:
        width = widths[item.key]
        justify: Any = "right" if item.right else "left"
        wraps: Any = {"overflow": "fold"} if width < item.width else {"no_wrap": True}
        table.add_column(printable(item.title), justify=justify, vertical="bottom", max_width=width, **wraps)
    for cells in zip(*(item.cells for item in shown), strict=True):
        table.add_row(*map(printable, cells))
    screen.print(table)
    if omitted := [item.key for item in columns if item.key not in widths]:
        screen.print(f"omitted columns: {', '.join(omitted)}. {remedy}", soft_wrap=True)


def _total(widths: Collection[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def as_csv(columns: Sequence[Column]) -> bytes:
    """Format columns as CSV with a header line. None becomes an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.key for column in columns])
    writer.writerows(zip(*(column.values for column in columns), strict=True))
    return text.getvalue().encode(errors="replace")  # folder names need not be valid UTF-8
