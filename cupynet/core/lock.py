"""Locks that let only one process use a run folder at a time.

The operating system releases a lock when its process ends, so locks are never stale. If the file system does not
support locks, the run continues with a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet.core.errors import ConfigError

if TYPE_CHECKING:
    from filelock import FileLock

NAME = "running.json"  # the lock file; describes the process that holds the lock
TIMEOUT_S = 0.5  # longer than `at_work` holds the lock


class Hold:
    """Lock on a run folder, held by this process until `release`.

    Attributes:
        warning: why the folder is not locked, or "".

    Raises:
        ConfigError: another process uses the folder, or the lock file is not a regular file.
    """

    def __init__(self, folder: Path) -> None:
        self.warning = ""
        self._path, self._lock = folder / NAME, _file_lock(folder / NAME)
        if self._path.exists() and not self._path.is_file():  # reading a pipe would block
            raise ConfigError(f"{self._path}: must be a regular file. Remove it, or choose another folder")
        try:
            self._lock.acquire(timeout=TIMEOUT_S)
        except TimeoutError:
            holder = _holder(self._path)
            if holder.get("pid") == os.getpid() and holder.get("host") == platform.node():
                reason = "an open ParallelWrapper of this process is using this folder. Close it"
            else:
                known = f" (process {holder['pid']} on {holder['host']}, since {holder['started']})" if holder else ""
                reason = f"another run is using this folder{known}. Wait for it, stop it"
            raise ConfigError(f"{folder}: {reason}, or choose another folder") from None
        except OSError as error:
            self.warning = f"{self._path}: {error.strerror}. Concurrent runs in this folder will not be detected"
            return
        holder = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # such as a full disk; the lock is already held
            self._path.write_text(json.dumps(holder) + "\n", encoding="utf-8")

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held, for example in a forked process."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._path.unlink()  # before the release, so that a waiting process notices the missing file
            self._lock.release()


def at_work(folder: Path) -> bool:
    """Return True if a run is in progress in `folder`."""
    path = folder / NAME
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with _file_lock(path).acquire(timeout=0):
            return False
    except TimeoutError:
        return True
    except OSError:  # no lock support, or another user's folder
        return False


def _file_lock(path: Path) -> FileLock:
    """Create an operating-system lock, which is released even if the process is killed."""
    from filelock import FileLock  # imported here because --help does not need it

    return FileLock(path, thread_local=False, fallback_to_soft=False, poll_interval=0.05)


def _holder(path: Path) -> dict[str, object]:
    """Return pid, host and start of the process that holds the lock, or {} if unknown."""
    try:
        with path.open("rb") as file:
            holder = json.loads(file.read(4096))
        return {name: holder[name] for name in ("pid", "host", "started")}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
