"""One process at a time in a folder, which the others can tell.

The system takes its lock (flock) back when a process dies, however it dies: so none is ever stale. Where it cannot
speak for all who may come (there are file systems without locks, and some that lock for one machine only), a run is
also known by its heart: as long as it lives it touches the file that says who it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cupynet.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows: no lock; renaming alone keeps two processes safe, they only do the same work twice
    fcntl = None  # type: ignore[assignment]

NAME = "running.json"  # in a run's folder as long as the run lives, or if it was killed
BEAT_S = 5.0
SILENT_S = 20.0  # a process that has not touched its file for so long is taken for dead
LONG_SILENT_S = 600.0  # and for so long, without another look: no clocks differ that much
PATIENCE_S = 0.5  # whoever only looks (`at_work`) holds the lock for a moment
_POLL_S = 0.1
# in a folder that somebody has sent a link would have its target emptied, and a pipe be waited for
_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextlib.contextmanager
def locked(folder: Path, wait_s: float, progress: Callable[[], object] | None = None) -> Iterator[bool]:
    """Holds `folder`'s lock for a piece of work that others wait for.

    Yields False where there are no locks (Windows, some network file systems).

    Args:
        wait_s: for another process that holds the lock; then TimeoutError.
        progress: of the other's work; whenever this changes, waiting begins anew.
    """
    with (folder / ".lock").open("a") as file:
        seen, since = None if progress is None else progress(), time.monotonic()
        while (held := _flock(file.fileno())) is False:
            if progress is not None and seen != (now := progress()):
                seen, since = now, time.monotonic()
            if time.monotonic() >= since + wait_s:
                raise TimeoutError(f"another process is still at work in {folder}") from None
            time.sleep(_POLL_S)
        yield held is True


@dataclass(frozen=True)
class Holder:
    """The process that a folder belongs to, or did when it was killed."""

    pid: int
    host: str
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class Hold:
    """This process's claim to a run's folder, from when it is made until `release`.

    Where the folder cannot be locked the run goes on without, and `warning` says so.

    Args:
        folder: exists.

    Attributes:
        found: the process that had the folder and is no more; None where it was left in order.
        warning: why nothing keeps others out; "" where something does.

    Raises:
        ConfigError: a run is going on there.
    """

    def __init__(self, folder: Path) -> None:
        self.found: Holder | None = None
        self.warning = ""
        self._path, self._pid, self._ended = folder / NAME, os.getpid(), threading.Event()
        self._descriptor: int | None = None
        try:
            self._descriptor, sure = self._opened(folder)
        except OSError as error:
            self.warning = f"{self._path}: {error.strerror}: nothing keeps a second run out of this folder"
            return
        self.found = _holder(self._descriptor)
        if self.found is not None and _lives(self.found, self._path, sure=sure):
            os.close(self._descriptor)
            raise _busy(folder, self.found)
        if not sure:
            self.warning = f"{folder}: no locks here: of two runs that begin there at once none would be kept out"
        own = Holder(self._pid, platform.node(), time.strftime("%Y-%m-%d %H:%M:%S"))
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, (json.dumps(own.__dict__) + "\n").encode(), 0)
        self._heart = threading.Thread(target=self._beat, name="cupynet-heart", daemon=True)
        self._heart.start()

    def _opened(self, folder: Path) -> tuple[int, bool]:
        """The file, open and locked, and whether there are locks. OSError, ConfigError."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | _PLAIN, 0o644)
            held = _flock(descriptor)
            if held is not False and _is_file(descriptor, self._path):  # else who had it has just removed it
                return descriptor, held is True
            found = _holder(descriptor)
            os.close(descriptor)
            if held is False and time.monotonic() >= deadline:
                raise _busy(folder, found)
            time.sleep(_POLL_S)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):  # somebody has removed the folder
                os.utime(self._path)

    def release(self) -> None:
        """Leave the folder to others, in order; harmless a second time, and in a process that was forked."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or self._pid != os.getpid():
            return
        self._ended.set()
        self._heart.join(BEAT_S)
        with contextlib.suppress(OSError):
            if _is_file(descriptor, self._path):
                self._path.unlink()
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a forked process has it too
        os.close(descriptor)


def at_work(folder: Path, *, patient: bool = True) -> bool:
    """Whether a run is going on in a folder. patient: take a while, where it may be on another machine; else it may."""
    path = folder / NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | _PLAIN)
    except OSError:
        return False
    try:
        held, found = _flock(descriptor, shared=True), _holder(descriptor)
    finally:
        os.close(descriptor)
    return held is False or (found is not None and _lives(found, path, sure=held is True, patient=patient))


def _flock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Whether the lock of an open file is held now; None where there are none."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lives(holder: Holder, path: Path, *, sure: bool, patient: bool = True) -> bool:
    """Whether the process that left its name in `path` is still there. Takes a while where it may be elsewhere.

    sure: the lock was to be had, which says all of a process of this machine.
    """
    if holder.host == platform.node() and (sure or not _exists(holder.pid)):
        return False
    if _age_s(path) > LONG_SILENT_S:
        return False
    if not patient:
        return True
    first, deadline = _touched(path), time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if _touched(path) != first:
            return True
    return False


def _age_s(path: Path) -> float:
    """Since the file was last touched, by this machine's clock, which may not be that of who keeps it."""
    touched = _touched(path)
    return 0.0 if touched is None else time.time() - touched / 1e9


def _touched(path: Path) -> int | None:
    """When the file was last touched, by the clock of who keeps it; None where it is gone."""
    try:
        with path.open("rb") as file:  # a network file system looks anew when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's
        return True
    return True


def _is_file(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _holder(descriptor: int) -> Holder | None:
    """Who the file says it belongs to; None where it does not say."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(int(found["pid"]), str(found["host"]), str(found["started"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _busy(folder: Path, holder: Holder | None) -> ConfigError:
    who = "" if holder is None else f" ({holder})"
    return ConfigError(f"{folder}: a run is going on there{who}: let it end, stop it, or name another folder")
