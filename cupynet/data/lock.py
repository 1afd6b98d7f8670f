"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock; renaming alone keeps two processes safe, they only do the same work twice
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.1


@contextlib.contextmanager
def locked(folder: Path, wait_s: float, progress: Callable[[], object] | None = None) -> Iterator[bool]:
    """Holds `folder`'s lock, which the system takes back when a process dies, so that it is never stale.

    Yields False where there are no locks (Windows, some network file systems).

    Args:
        wait_s: for another process that holds the lock; then TimeoutError.
        progress: of the other's work; whenever this changes, waiting begins anew.
    """
    with (folder / ".lock").open("a") as file:
        held, seen, since = False, None if progress is None else progress(), time.monotonic()
        while fcntl is not None and not held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if progress is not None and seen != (now := progress()):
                    seen, since = now, time.monotonic()
                if time.monotonic() >= since + wait_s:
                    raise TimeoutError(f"another process is still at work in {folder}") from None
                time.sleep(_POLL_S)
            except OSError:
                break
        yield held
