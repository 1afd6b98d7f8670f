"""Locks on folders: one process at a time in the folder of a run.

The system releases a lock when its process ends in any way, so that none is ever stale. On a file system without locks
a run is unprotected, with a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet.core.errors import ConfigError

if TYPE_CHECKING:
    from filelock import FileLock

NAME = "running.json"  # in a run's folder while it runs: the lock, and who holds it
TIMEOUT_S = 0.5  # `at_work` holds the lock for a moment


class Hold:
    """This process's lock on a run's folder, until `release`.

    Args:
        folder: must exist.

    Attributes:
        warning: why the folder is not protected; "" if it is.

    Raises:
        ConfigError: another process has the folder, or the file is a pipe.
    """

    def __init__(self, folder: Path) -> None:
        self.warning = ""
        self._path, self._lock = folder / NAME, _file_lock(folder / NAME)
        if self._path.exists() and not self._path.is_file():  # reading a pipe would never end
            raise ConfigError(f"{self._path}: must be a plain file: remove it, or name another folder")
        try:
            self._lock.acquire(timeout=TIMEOUT_S)
        except TimeoutError:
            who = _holder(self._path)
            raise ConfigError(
                f"{folder}: a run is in progress there{who}: wait for it, stop it, or name another folder"
            ) from None
        except OSError as error:
            self.warning = f"{self._path}: {error.strerror}: nothing keeps a second run out of this folder"
            return
        own = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            self._path.write_text(json.dumps(own) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Release the lock; harmless a second time, and in a forked process."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._path.unlink()  # while it is held: a waiting process notices that the file is gone
            self._lock.release()


@contextlib.contextmanager
def exclusive(path: Path, timeout_s: float) -> Iterator[None]:
    """Context that only one process at a time enters, by a lock file that is removed afterwards.

    After `timeout_s`, or on a file system without locks, a process enters without the lock.
    """
    lock = _file_lock(path)
    with contextlib.suppress(TimeoutError, OSError):
        lock.acquire(timeout=timeout_s)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                path.unlink()  # as in `Hold.release`
            lock.release()


def at_work(folder: Path) -> bool:
    """Return True if a run is going on in `folder`."""
    path = folder / NAME
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with _file_lock(path).acquire(timeout=0):
            return False
    except TimeoutError:
        return True
    except OSError:  # no locks here, or another user's folder
        return False


def _file_lock(path: Path) -> FileLock:
    """Return an operating-system lock: a lock file would be left behind by a killed process."""
    from filelock import FileLock  # imported late: --help can do without

    return FileLock(path, thread_local=False, fallback_to_soft=False, poll_interval=0.05)


def _holder(path: Path) -> str:
    """Return the process that the file names, in parentheses after a space; "" if it names none."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(4096))
        return f" (process {found['pid']} on {found['host']}, since {found['started']})"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ""
