"""Terminal output. A run continues even if the terminal is closed or the disk is full."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import sys
import traceback
from pathlib import Path

# control characters except newline, line separators, bidirectional controls, surrogates
UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
UNWRITABLE = (OSError, ValueError)  # raised when a stream is broken or closed, or its disk is full


def is_terminal() -> bool:
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def can_draw() -> bool:
    """Return True if stdout is a terminal that can redraw lines, according to `TERM`."""
    return is_terminal() and os.environ.get("TERM") not in (None, "", "dumb")


def printable(text: str) -> str:
    """Replace the characters in `UNPRINTABLE` with U+FFFD, and tabs with spaces.

    Escape sequences and bidirectional controls from untrusted files must not reach the terminal or an HTML page.
    """
    return UNPRINTABLE.sub("\ufffd", text.replace("\t", " "))


def near(path: Path) -> str:
    """Format a path. Paths inside the current folder become relative to it."""
    absolute, here = path.resolve(), Path.cwd()
    return str(absolute.relative_to(here)) if here in absolute.parents else str(path)


def steady_streams() -> None:
    """Configure the standard streams. Every command calls this first.

    Characters that the terminal cannot encode are printed as "?". If native code crashes, the stacks of all threads are
    printed. Streams closed by the caller (`>&-`) are connected to the null device, because otherwise the next file
    opened would reuse their file descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the process ends
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    with contextlib.suppress(io.UnsupportedOperation):  # stderr is not a file, as in notebooks and tests
        faulthandler.enable()


def say_error(line: str, bug: BaseException | None = None) -> None:
    """Print `cupynet: line` to stderr, after the traceback of a bug. Does nothing if writing to stderr fails."""
    with contextlib.suppress(*UNWRITABLE):
        if bug is not None:
            print(printable("".join(traceback.format_exception(bug))), end="", file=sys.stderr)
        print(f"cupynet: {printable(line)}", file=sys.stderr, flush=True)


def stdout_is_gone(probe: str = "") -> bool:
    """Flush stdout. If its reader has closed it (`--help | head`), suppress Python's error at exit and return True.

    probe: text to write before flushing.
    """
    try:
        print(probe, end="", flush=True)
    except OSError as error:  # other errors, such as a full disk, have already been reported
        with contextlib.suppress(io.UnsupportedOperation):  # stdout is not a file, as in notebooks and tests
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return isinstance(error, BrokenPipeError)
    return False
