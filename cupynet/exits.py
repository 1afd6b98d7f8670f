"""The way out: what a command shows of its log records and errors, and the exit code it leaves with."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
import traceback

from cupynet.checks import one_line
from cupynet.errors import CupynetError, Interrupted, OutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells have it


def tell(error: BaseException, log: logging.Logger | None = None, job: str = "") -> int | str:
    """Say what ended a job, in its log if it has one, else on stderr; the exit code.

    Errors raised on purpose are one line, and below it their notes of several lines: where a worker stood. Anything
    else is a bug and shows its traceback. `job` goes before the line.
    """
    if isinstance(error, SystemExit):
        return 0 if error.code is None else error.code
    if isinstance(error, BrokenPipeError) and stdout_is_gone("\n"):
        return BROKEN_PIPE
    bug, below = False, []
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted.by(error)
    if isinstance(error, CupynetError):
        notes = getattr(error, "__notes__", [])  # the worker and the batch, noted where it passed
        below = [note for note in notes if "\n" in note]
        where = [note for note in notes if "\n" not in note]
        line, code = one_line("; ".join([str(error), *where])), error.exit_code
    elif isinstance(error, OSError) and error.errno in FULL:
        line, code = f"the output cannot be written: {error.strerror}", OutputError.exit_code
    else:
        line, code, bug = f"this is a bug: {type(error).__name__}: {one_line(error)}", 1, True
    for text in [line, *below]:
        if log is not None:
            log.error("%s%s", job, text, exc_info=error if bug else None)
        else:
            say_error(f"{job}{text}", error if bug else None)
    return code


def say_error(line: str, bug: BaseException | None = None) -> None:
    """`cupynet: line` on stderr, below the traceback if it is a bug's."""
    if bug is not None:
        traceback.print_exception(bug, file=sys.stderr)
    print(f"cupynet: {line}", file=sys.stderr, flush=True)


def stdout_is_gone(probe: str = "") -> bool:
    """Whether whoever read the output has left (`--help | head`); if so, nothing more is complained about at exit.

    probe: written to find out; without it only what still waits in the buffer tells.
    """
    try:
        print(probe, end="", flush=True)
    except BrokenPipeError:
        with contextlib.suppress(io.UnsupportedOperation):  # raised where stdout is no file: a notebook, a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    except OSError:  # a full disk, reported when it was met
        with contextlib.suppress(io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return False


class Console(logging.Handler):
    """Log records on the terminal: `[12:30:05] text`, warnings marked, on stdout; errors as `cupynet: text` on stderr.

    It asks for the stream at every record: a live display puts its own in place of sys.stdout while it is on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().strip()
        try:
            if record.levelno >= logging.ERROR:
                say_error(text, record.exc_info[1] if record.exc_info else None)
            else:
                mark = "warning: " if record.levelno >= logging.WARNING else ""
                print(f"[{_CLOCK.formatTime(record, '%H:%M:%S')}] {mark}{text}", flush=True)
        except BrokenPipeError:
            pass  # nobody reads any more; the run goes on, and its log file has everything


class RankConsole(logging.Handler):
    """Warnings and errors of a process that is one of several, on stderr: `cupynet: rank 3: text`.

    Only rank 0 has a log and the terminal for itself.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno < logging.ERROR else ""
        bug = record.exc_info[1] if record.exc_info else None
        say_error(f"rank {self.rank}: {mark}{record.getMessage().strip()}", bug)


_CLOCK = logging.Formatter()
