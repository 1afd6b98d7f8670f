"""Error reports and exit codes of commands."""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from cupynet.core.errors import FULL, CupynetError, Interrupted, exit_code, signal_of
from cupynet.core.terminal import say_error, stdout_is_gone, steady_streams
from cupynet.core.wording import one_line

BROKEN_PIPE = 141  # 128 + SIGPIPE, as in shells
# matches error names, so that CuPy need not be imported
GPU_MEMORY = re.compile("OutOfMemoryError|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|_STATUS_ALLOC_FAILED")


def run_and_exit(work: Callable[[], int | None]) -> NoReturn:
    """Run a command, report its error, and exit with its exit code."""
    steady_streams()
    code: int | str = 0
    try:
        code = work() or 0
        sys.stdout.flush()
    except BaseException as error:
        code = report_error(error)
    stdout_is_gone()
    raise SystemExit(code)


def report_error(error: BaseException, log: logging.Logger | None = None, job: str = "") -> int | str:
    """Report the error that ended a job, in its log or on stderr. Return the exit code.

    CupynetErrors, a full disk and exhausted memory are reported on one line. Other errors, including a SystemExit or
    KeyboardInterrupt raised by a callback, are reported with a traceback. A SystemExit outside a job and a closed
    stdout only end the command. job: prefix of the line.
    """
    if isinstance(error, SystemExit) and log is None and not job:
        return 0 if error.code is None else error.code
    if isinstance(error, BrokenPipeError) and stdout_is_gone("\n"):
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt) and signal_of(error):
        error = Interrupted.by(error)
    notes = [one_line(note) for note in getattr(error, "__notes__", [])]  # such as the worker and the batch
    unexpected = False
    if isinstance(error, CupynetError):
        line = "; ".join([one_line(error), *notes])
    elif isinstance(error, OSError) and error.errno in FULL:
        line = f"cannot write the output: {error.strerror}"
    elif out_of_memory(error):
        details = "; ".join([one_line(error) or type(error).__name__, *notes])
        line = f"out of memory ({details}). Lower batch_size, workers or prefetch_buffer"
    else:
        unexpected = True
        line = ": ".join(filter(None, [type(error).__name__, one_line(error)]))
    if log is not None:
        log.error("%s%s", job, line, exc_info=error if unexpected else None)
    else:
        say_error(f"{job}{line}", error if unexpected else None)
    return exit_code(error)


def out_of_memory(error: BaseException) -> bool:
    """Return True if the machine or a GPU is out of memory, or a thread cannot be started."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
        or out_of_gpu_memory(error)
    )


def out_of_gpu_memory(error: BaseException) -> bool:
    """Return True if CuPy, CUDA or one of its libraries raised `error` because a GPU is out of memory."""
    return GPU_MEMORY.search(f"{type(error).__name__}: {error}") is not None
