"""Output and exit codes of commands: log records on the terminal, errors as one line, tracebacks of bugs.

A closed or full terminal does not end a run.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from cupynet.core.checks import one_line
from cupynet.core.errors import FULL, ConfigError, CupynetError, Interrupted, exit_code, signal_of
from cupynet.core.terminal import folded, printable

WARNING = "warning: "  # prefix of warnings on the terminal
BROKEN_PIPE = 141  # 128 + SIGPIPE, as in shells
UNWRITABLE = (OSError, ValueError)  # raised by a stream that is full, broken or closed


def steady_streams() -> None:
    """Print "?" for characters that the terminal cannot encode, and the stack of each thread if native code crashes.

    Streams that the caller closed (`>&-`) are opened on the null device: the next file opened would get the number of
    such a stream. Every command calls this first.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")
    with contextlib.suppress(io.UnsupportedOperation):  # stderr is not a file: in a notebook, in a test
        faulthandler.enable()


class Arguments(argparse.ArgumentParser):
    """A parser of command-line options that raises ConfigError, which is reported in one line."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks of examples
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {self.prog} --help shows the arguments")


def leave_after(work: Callable[[], int | None]) -> NoReturn:
    """Do the work of a command, report its error if it fails, and exit with its code."""
    steady_streams()
    code: int | str = 0
    try:
        code = work() or 0
        sys.stdout.flush()
    except BaseException as error:
        code = tell(error)
    stdout_is_gone()
    raise SystemExit(code)


def tell(error: BaseException, log: logging.Logger | None = None, job: str = "") -> int | str:
    """Report the error that ended a job, in its log or on stderr; return the exit code.

    A CupynetError is reported in one line, with its notes. Any other error is reported with its traceback,
    including a SystemExit or KeyboardInterrupt that a job's callback raised.

    Args:
        job: prefix of the line.
    """
    if isinstance(error, SystemExit) and log is None and not job:
        return 0 if error.code is None else error.code
    if isinstance(error, BrokenPipeError) and stdout_is_gone("\n"):
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt) and signal_of(error):
        error = Interrupted.by(error)
    notes = [one_line(note) for note in getattr(error, "__notes__", [])]  # the worker and the batch
    unexpected = False
    if isinstance(error, CupynetError):
        line = "; ".join([one_line(error), *notes])
    elif isinstance(error, OSError) and error.errno in FULL:
        line = f"the output cannot be written: {error.strerror}"
    elif out_of_memory(error):
        what = "; ".join([one_line(error) or type(error).__name__, *notes])
        line = f"out of memory ({what}): lower batch_size, workers or prefetch_buffer"
    else:
        unexpected = True
        module = _module_of(error)
        line = ": ".join(filter(None, [type(error).__name__, one_line(error)])) + (module and f" (in module {module})")
    if log is not None:
        log.error("%s%s", job, line, exc_info=error if unexpected else None)
    else:
        say_error(f"{job}{line}", error if unexpected else None)
    return exit_code(error)


def _module_of(error: BaseException) -> str:
    """Return the user module that raised an error, directly or in a library it called; "" if cupynet did."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == "cupynet":
            found = ""
        elif package not in sys.stdlib_module_names and "-packages" not in frame.f_code.co_filename:
            found = str(frame.f_globals.get("__name__", ""))
    return found


def out_of_memory(error: BaseException) -> bool:
    """Return True if the machine or a GPU has no memory left, or no room for another thread.

    CuPy's errors are recognized by their names, so that CuPy need not be imported.
    """
    said = ("can't start new thread", "cudaErrorMemoryAllocation", "_STATUS_ALLOC_FAILED")
    return (
        isinstance(error, MemoryError)
        or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(each in str(error) for each in said))
    )


def say_error(line: str, bug: BaseException | None = None) -> None:
    """Print `cupynet: line` on stderr, after the traceback of a bug. Do nothing if stderr cannot be written."""
    with contextlib.suppress(*UNWRITABLE):
        if bug is not None:
            print(printable("".join(traceback.format_exception(bug))), end="", file=sys.stderr)
        print(f"cupynet: {printable(line)}", file=sys.stderr, flush=True)


def stdout_is_gone(probe: str = "") -> bool:
    """Return True if the reader of stdout has left (`--help | head`). Python then does not complain at exit.

    Args:
        probe: written to find out; without it, only what is still buffered.
    """
    try:
        print(probe, end="", flush=True)
    except OSError as error:  # any other than BrokenPipeError, such as of a full disk, has been reported
        with contextlib.suppress(io.UnsupportedOperation):  # stdout is not a file: in a notebook, in a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return isinstance(error, BrokenPipeError)
    return False


class Console(logging.Handler):
    """Log records on the terminal: `[12:30:05] text` on stdout; errors as `cupynet: text` on stderr.

    It looks up sys.stdout for every record, because a live display replaces it for a while.

    Attributes:
        label: a prefix for the text of each warning of this process, such as the number of a job.
    """

    label = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(record.getMessage().strip())
        try:
            if record.levelno >= logging.ERROR:
                say_error(text, record.exc_info[1] if record.exc_info else None)
            else:
                mark = f"{WARNING}{self.label}" if record.levelno >= logging.WARNING else ""
                print(folded(f"[{_CLOCK.formatTime(record, '%H:%M:%S')}] {mark}{text}"), flush=True)
        except UNWRITABLE:
            pass  # the run continues, and its log file has the record


def quiet() -> None:
    """Show only warnings and errors on the terminal from now on. Log files are not affected."""
    for name in ("cupynet", "__main__"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, Console):
                handler.setLevel(logging.WARNING)


class LineFormatter(logging.Formatter):
    """Formatter of logs: texts read from files cannot control the terminal that shows them."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


_CLOCK = logging.Formatter()
