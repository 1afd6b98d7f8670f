"""Signals: what a command does when it is told to end.

SIGINT, SIGTERM, SIGUSR1 and SIGHUP are asked for together: a terminal that closes and a scheduler that warns mean the
same as Ctrl-C. One that the process was told to ignore, SIGHUP under nohup for one, stays ignored. A handler sets a
flag or raises KeyboardInterrupt, never more: it may stand between any two instructions of the main thread.

What is being saved is saved: a signal that would end the process at once waits until `undisturbed` is over. The next
one does not.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cupynet.core.errors import Interrupted
from cupynet.core.mpiexec import started

LIFELINE = "CUPYNET_LIFELINE"  # in the environment of a process that works for another: see `lifeline`
NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class _Saving:
    """How many threads are writing what must not be left half-done, and the signal that waits for them."""

    def __init__(self) -> None:
        self.threads, self.waiting = 0, 0
        self.lock = threading.Lock()  # of the threads; a handler must not take it: it may have interrupted its owner


_saving = _Saving()


def leave(number: int) -> None:
    """A handler's way out at once: KeyboardInterrupt(number), but after what is being saved, unless asked twice."""
    again, _saving.waiting = _saving.waiting, number
    if again or not _saving.threads:  # asked for after the signal was noted: who ends a save sees one or the other
        _saving.waiting = 0
        raise KeyboardInterrupt(number)  # no Exception: a download takes those for one more thing that can go wrong


@contextmanager
def undisturbed() -> Iterator[None]:
    """No signal ends the process in the middle of this, which takes a moment; from any thread."""
    with _saving.lock:
        _saving.threads += 1
    failed = True
    try:
        yield
        failed = False
    finally:
        with _saving.lock:
            _saving.threads -= 1
            number = 0 if _saving.threads else _saving.waiting
        if number:
            _saving.waiting = 0
            if not failed:  # else that is what ends the process, and has to be told
                signal.pthread_kill(threading.main_thread().ident or 0, number)  # it may be waiting, and wakes up so


@contextmanager
def handled(react: Callable[[int], None]) -> Iterator[None]:
    """Each of these signals calls `react` with its number; in a thread other than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    ours = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in ours:
        signal.signal(number, lambda number, frame: react(number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)


def command(main: Callable[[], None]) -> None:
    """Be a command, whose process ends with it: a signal ends that in one line and with the exit code of `Interrupted`.

    main: what it does; it imports what takes long to import, so that this stands around that too. Until it handles
    signals itself the process ends in the handler: an exception might be met by code that thinks nothing of it. When
    main is done a signal comes too late to change anything: whatever is still waited for, main's exit code counts.
    """
    code = 1
    atexit.register(_deaf)  # first, and so called last
    _tie()
    try:
        with handled(_end):
            main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
    except KeyboardInterrupt as stopped:  # where nobody has told of it yet
        error = Interrupted.by(stopped)
        rank = started()
        if rank is None or rank[0] == 0:
            say(f"cupynet: {error}\n")
        code = error.exit_code
        raise SystemExit(code) from None
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, lambda number, frame: os._exit(code))


@contextmanager
def lifeline() -> Iterator[tuple[int, ...]]:
    """What processes are given (`pass_fds`, and its number as `LIFELINE`) that are told to end when this one is killed.

    A pipe that nobody writes to: it ends when this process does, however it ends. Nothing where none can be given.
    """
    if os.name != "posix":
        yield ()
        return
    theirs, ours = os.pipe()
    try:
        yield (theirs,)
    finally:
        os.close(theirs)
        os.close(ours)


def _tie() -> None:
    """Where this process was given a lifeline, its end is as good as SIGTERM: nobody is left to work for."""
    number = os.environ.pop(LIFELINE, "")
    if not number:
        return

    def wait() -> None:
        with contextlib.suppress(OSError, ValueError):
            os.set_inheritable(int(number), False)
            os.read(int(number), 1)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="cupynet-lifeline", daemon=True).start()


def _deaf() -> None:
    """From here on signals are ignored: as it ends Python gives back what it handles, and the process would die of one
    after all is done. Not so of processes that wait for each other even then: one may have to be ended."""
    if threading.current_thread() is threading.main_thread() and started() is None:
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)


def _end(number: int) -> None:
    error, rank = Interrupted(number), started()
    if rank is None or rank[0] == 0:
        say(f"cupynet: {error}\n")
    os._exit(error.exit_code)


def say(text: str) -> None:
    """Write to the standard error output by itself, which may be done in the middle of another print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
