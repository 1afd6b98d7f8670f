"""What the terminal can show, if there is one."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

# control characters but for newline, line separators, bidirectional controls, halves of surrogate pairs
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def is_terminal() -> bool:
    """Return True if stdout is a terminal."""
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def can_draw() -> bool:
    """Return True if stdout is a terminal that can redraw lines, according to `TERM`."""
    return is_terminal() and os.environ.get("TERM") not in (None, "", "dumb")


def folded(line: str) -> str:
    """Wrap a log line at words to the width of the terminal, indented below its time. Piped output stays one line."""
    width, indent = shutil.get_terminal_size().columns, " " * len("[12:30:05] ")
    if not can_draw() or "\n" in line or width <= 2 * len(indent):
        return line
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def printable(text: str) -> str:
    """Replace every character that could control a terminal or reorder a line by U+FFFD, and a tab by a space.

    For text that was read from a file, such as a run's folder: escape sequences and bidirectional controls in it must
    reach neither the terminal nor a page.
    """
    return UNPRINTABLE.sub("\ufffd", text.replace("\t", " "))


def near(path: Path) -> str:
    """Return a path relative to the current folder if it is inside; else as it is."""
    inside = path.resolve()
    return str(inside.relative_to(Path.cwd())) if inside.is_relative_to(Path.cwd()) else str(path)
