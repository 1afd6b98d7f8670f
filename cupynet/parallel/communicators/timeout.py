"""How long a worker waits for the others."""

from __future__ import annotations

import time

from cupynet.core.checks import setting
from cupynet.parallel.communicators.base import WorkerTimeout

LOOK_S = 0.1  # between two tests; longer gaps count as this much


class Timeout:
    """A timeout for a worker that polls.

    A gap between two tests counts for at most `LOOK_S`: while a process was stopped (Ctrl-Z) or its machine suspended,
    it did not wait, and the others had no time to arrive.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._last = time.monotonic()

    def expired(self) -> bool:
        """Return True if the time is up. Call it at every test."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, LOOK_S)
        self._last = now
        return self._left_s <= 0


def timed_out(rank: int, seconds: float, whom: str) -> WorkerTimeout:
    """Return the error of a worker that waited `seconds` for `whom`."""
    return WorkerTimeout(
        f"worker {rank} waited {seconds:g} s for {whom}. "
        f"If the other workers are only slow, raise {setting('parallel', 'timeout_s')}"
    )
