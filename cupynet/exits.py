"""The way out: what a command shows of its log records and errors, and the exit code it leaves with.

Who listens is no concern of the work: a terminal that is closed or full, a character that it does not have and a log
that cannot be written any more end nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cupynet.checks import one_line
from cupynet.errors import FULL, ConfigError, CupynetError, Interrupted, OutputError
from cupynet.terminal import folded, printable

BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells have it
NOBODY = (OSError, ValueError)  # a stream nobody reads any more, that is full, or closed


def steady_streams() -> None:
    """Let stdin, stdout and stderr be there, and take every character; a command begins with this.

    One that was closed (`>&-`) leads nowhere from here on. Its number is taken, or the next file that is opened would
    get it, and what others print would stand there. What an encoding does not have becomes a question mark.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - to the end
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


class Arguments(argparse.ArgumentParser):
    """A command line of options; what is wrong with it is a ConfigError, told in one line as all others are."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        raw = argparse.RawDescriptionHelpFormatter  # examples stay as they are written
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {self.prog} --help shows what it takes")


def named(text: str) -> str:
    """The name of a file or a folder; an empty one is of a variable that has no value, and would mean this folder."""
    if not text:
        raise argparse.ArgumentTypeError("must be the name of a file or a folder, not ''")
    return text


def named_path(text: str) -> Path:
    """`named`, as a path."""
    return Path(named(text))


def leave_after(work: Callable[[], int | None]) -> NoReturn:
    """Do a command's work, and leave with its exit code, or that of the error it ended with, which is told.

    Where nobody reads the output any more, or it cannot be written, Python complains of nothing at its end.
    """
    code: int | str = 0
    try:
        code = work() or 0
        sys.stdout.flush()
    except BaseException as error:
        code = tell(error)
    stdout_is_gone()
    raise SystemExit(code)


def tell(error: BaseException, log: logging.Logger | None = None, job: str = "") -> int | str:
    """Say what ended a job, in its log if it has one, else on stderr; the exit code.

    Errors raised on purpose are one line, and below it their notes of several lines: where a worker stood. Anything
    else is a bug and shows its traceback, a SystemExit inside a job too: whatever raised it there, a callback say, does
    not know what it ends. `job` goes before the line.
    """
    if isinstance(error, SystemExit) and log is None and not job:
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
    elif out_of_memory(error):
        told = "; ".join([one_line(error) or type(error).__name__, *getattr(error, "__notes__", [])])
        line, code = f"out of memory ({told}): lower batch_size, workers or parallel.prefetch_buffer", 1
    else:
        line, code, bug = f"this is a bug: {type(error).__name__}: {one_line(error)}", 1, True
    for text in [line, *below]:
        if log is not None:
            log.error("%s%s", job, text, exc_info=error if bug else None)
        else:
            say_error(f"{job}{text}", error if bug else None)
    return code


def out_of_memory(error: BaseException) -> bool:
    """Whether the machine or a GPU has no memory left, or no room for another thread; no bug, and no wrong setting.

    CuPy's errors are told by their names: it is not imported for this.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        text = str(error)
        said = ("can't start new thread", "cudaErrorMemoryAllocation", "_STATUS_ALLOC_FAILED")
        return any(each in text for each in said)
    return False


def say_error(line: str, bug: BaseException | None = None) -> None:
    """`cupynet: line` on stderr, below the traceback if it is a bug's; to nobody, where stderr cannot be written."""
    with contextlib.suppress(*NOBODY):
        if bug is not None:
            print(printable("".join(traceback.format_exception(bug))), end="", file=sys.stderr)
        print(f"cupynet: {printable(line)}", file=sys.stderr, flush=True)


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
        text = printable(record.getMessage().strip())
        try:
            if record.levelno >= logging.ERROR:
                say_error(text, record.exc_info[1] if record.exc_info else None)
            else:
                mark = "warning: " if record.levelno >= logging.WARNING else ""
                print(folded(f"[{_CLOCK.formatTime(record, '%H:%M:%S')}] {mark}{text}"), flush=True)
        except NOBODY:
            pass  # the run goes on, and its log file has everything


def quiet() -> None:
    """From here on the terminal is told of warnings and errors alone; logs have everything all the same."""
    for name in ("cupynet", "__main__"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, Console):
                handler.setLevel(logging.WARNING)


class LogFile(logging.FileHandler):
    """A log on the disk; where that can no longer be written, it is told once on stderr, and the run goes on."""

    _lost = False

    def handleError(self, record: logging.LogRecord) -> None:
        """One record could not be written; by default logging prints a traceback for each."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._lost:
            self._lost = True
            say_error(f"warning: {self.baseFilename} cannot be written ({error.strerror}): the run goes on without it")


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
