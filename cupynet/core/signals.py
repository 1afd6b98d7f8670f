"""Signals that stop a command.

SIGINT, SIGTERM, SIGUSR1 and SIGHUP have the same effect: a closed terminal or a scheduler's warning acts like Ctrl-C. A
signal that is ignored at process start (SIGHUP under nohup) stays ignored. Handlers only set a flag, raise
KeyboardInterrupt or exit, because they may run between any two instructions of the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cupynet.core.errors import Interrupted
from cupynet.core.mpiexec import rank

LIFELINE = "CUPYNET_LIFELINE"  # environment variable that is set if stdin is a `lifeline`
NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
AGAIN_S = 0.05  # seconds until an ignored signal is sent again


def leave(number: int) -> None:
    """Raise KeyboardInterrupt(number) from a handler. `except Exception` in interrupted code does not catch it."""
    raise KeyboardInterrupt(number)


@contextmanager
def handled(react: Callable[[int], None]) -> Iterator[None]:
    """Context manager in which each signal calls `react` with its number. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    ours = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    hook = sys.unraisablehook
    for number in ours:
        signal.signal(number, lambda number, frame: react(number))
    sys.unraisablehook = partial(_repeat, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)


def _repeat(hook: Callable[[Any], object], ignored: Any) -> None:
    """Resend a signal whose KeyboardInterrupt Python ignored, because a destructor or a weakref callback raised it."""
    error = ignored.exc_value
    if isinstance(error, KeyboardInterrupt) and error.args and error.args[0] in NUMBERS:
        threading.Timer(AGAIN_S, os.kill, (os.getpid(), error.args[0])).start()
    else:
        hook(ignored)


@contextmanager
def stopping_at_interrupt(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Context manager in which the first Ctrl-C calls `stop`, and the next one raises KeyboardInterrupt.

    Yields a list to which the first signal is appended. Does nothing outside the main thread, or if the program handles
    SIGINT itself.
    """
    received: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield received
        return

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        received.append(number)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def command(main: Callable[[], None]) -> None:
    """Run `main` as the entry point of the process. A signal prints one line and exits with the code of `Interrupted`.

    `main` should import slow modules itself, so that signals are also handled during imports. Until it installs its own
    handlers, a signal exits immediately, because imported code might catch an exception. During interpreter shutdown, a
    signal exits with the code of `main`.
    """
    if os.environ.pop(LIFELINE, ""):
        threading.Thread(target=_end_with_parent, name="cupynet-lifeline", daemon=True).start()
    code = 1
    try:
        with handled(end):
            main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt as interrupt:  # not yet reported
        code = _report(Interrupted.by(interrupt))
        raise SystemExit(code) from None
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number in NUMBERS if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: os._exit(code))


@contextmanager
def lifeline() -> Iterator[int]:
    """Yield a pipe for the stdin of child processes, which stop when this process closes the pipe or ends."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the pipe closes
    os.kill(os.getpid(), signal.SIGTERM)


def end(number: int) -> None:
    """End the process at once from a handler, during imports: imported code might catch an exception."""
    os._exit(_report(Interrupted(number)))


def _report(error: Interrupted) -> int:
    """Print the error (under mpiexec, only on rank 0), and return its exit code."""
    if rank() == 0:
        say(f"cupynet: {error}\n")
    return error.exit_code


def say(text: str) -> None:
    """Write to stderr without buffering, as required in signal handlers."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
