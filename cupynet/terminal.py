"""What the terminal can show, if there is one: whoever writes there asks here."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

BESIDE = len("[12:30:05] ")
UNIT = r"(?=%|bytes\b|[kMGTPE]B\b)"
# control characters but for tab and newline, line separators, bidirectional controls, halves of surrogate pairs
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def is_terminal() -> bool:
    """Whether somebody sits at the other end of stdout, where there is one."""
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError, OSError):  # there is none, or it is closed
        return False


def can_draw() -> bool:
    """Whether what was written can be written over: on a terminal that says it can do more than write (`TERM`)."""
    return is_terminal() and os.environ.get("TERM") not in (None, "", "dumb")


def folded(line: str) -> str:
    """A record's line as a terminal shows it whole: what is too long goes on below, beside the time, not before it.

    What is piped, or goes to a terminal that can only write, stays in one line.
    """
    width = shutil.get_terminal_size().columns
    if not can_draw() or "\n" in line or width <= 2 * BESIDE:
        return line
    beside = " " * BESIDE
    return "\n".join(wrapped(line, width, beside))


def wrapped(text: str, width: int, beside: str = "") -> list[str]:
    """Lines of at most `width` characters, with words whole and figures beside their unit (% and bytes); `beside` goes
    before all but the first. What is longer by itself, a path say, stays so.
    """
    glued = re.sub(" " + UNIT, "\u00a0", text)
    lines = textwrap.wrap(glued, width, subsequent_indent=beside, break_long_words=False, break_on_hyphens=False)
    return [re.sub("\u00a0" + UNIT, " ", line) for line in lines]


def printable(text: str) -> str:
    """Replace every character that could control a terminal or reorder a line by U+FFFD.

    For text that was read from a file, such as a run's folder: escape sequences and bidirectional controls in it must
    reach neither the terminal nor a page.
    """
    return UNPRINTABLE.sub("\ufffd", text)


def near(path: Path) -> str:
    """A path as short as it can be written from here."""
    try:
        inside = path.resolve().relative_to(Path.cwd().resolve())
    except (OSError, ValueError):
        return str(path)
    return str(inside)
