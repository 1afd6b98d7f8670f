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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet.core.errors import ConfigError

if TYPE_CHECKING:
    from filelock import FileLock

NAME = "running.json"  # in a run's folder while it runs: the lock, and who holds it
TIMEOUT_S = 0.5  # `at_work` holds the lock for a moment


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder, or held it when it was killed."""

    pid: int
    host: str
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class Hold:
    """This process's lock on a run's folder, until `release`.

    Args:
        folder: must exist.

    Attributes:
        found: the process that was killed while it had the folder; None if there was none.
        warning: why the folder is not protected; "" if it is.

    Raises:
        ConfigError: another process has the folder, or the file is a pipe.
    """

    def __init__(self, folder: Path) -> None:
        self.found: Holder | None = None
        self.warning = ""
        self._path, self._lock = folder / NAME, _file_lock(folder / NAME)
        if self._path.exists() and not self._path.is_file():  # reading a pipe would never end
            raise ConfigError(f"{self._path}: must be a plain file: remove it, or name another folder")
        try:
            self._lock.acquire(timeout=TIMEOUT_S)
        except TimeoutError:
            holder = _holder(self._path)
            who = "" if holder is None else f" ({holder})"
            raise ConfigError(
                f"{folder}: a run is in progress there{who}: wait for it, stop it, or name another folder"
            ) from None
        except OSError as error:
            self.warning = f"{self._path}: {error.strerror}: nothing keeps a second run out of this folder"
            return
        self._file, self.found = self._path.stat(), _holder(self._path)
        own = Holder(os.getpid(), platform.node(), time.strftime("%Y-%m-%d %H:%M:%S"))
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            self._path.write_text(json.dumps(asdict(own)) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Release the lock; harmless a second time, and in a forked process."""
        if not self._lock.is_locked:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(self._path.stat(), self._file):  # not of another folder of this name
                self._path.unlink()  # while it is held: a waiting process notices that the file is gone
        self._lock.release()


def at_work(folder: Path) -> bool:
    """Return True if a run is going on in `folder`."""
    path = folder / NAME
    if path.is_symlink() or not path.is_file():
        return False
    lock = _file_lock(path)
    try:
        lock.acquire(timeout=0)
    except TimeoutError:
        return True
    except OSError:  # no locks here, or another user's folder
        return False
    lock.release()
    return False


def _file_lock(path: Path) -> FileLock:
    """Return an operating-system lock: a lock file would be left behind by a killed process."""
    from filelock import FileLock  # imported late: --help can do without

    return FileLock(path, thread_local=False, fallback_to_soft=False, poll_interval=0.05)


def _holder(path: Path) -> Holder | None:
    """Return the process named in the file, or None."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(4096))
        return Holder(int(found["pid"]), str(found["host"]), str(found["started"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
