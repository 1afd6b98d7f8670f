"""How long a worker waits for the others."""

from __future__ import annotations

import time

from cupynet.core.checks import setting
from cupynet.parallel.communicators.base import WorkerTimeout

LOOK_S = 0.1  # between two looks; a longer gap counts as no more than this


class Timeout:
    """Time that runs out while a worker looks, again and again, whether something has happened.

    A gap between two looks counts for at most `LOOK_S`: a process that was stopped (Ctrl-Z) or a machine that was
    suspended has not waited, and neither have the workers it waits for had their time.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._last = time.monotonic()

    def expired(self) -> bool:
        """Return True if the time has run out. Call it at every look."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, LOOK_S)
        self._last = now
        return self._left_s <= 0


def timed_out(rank: int, seconds: float, whom: str) -> WorkerTimeout:
    """The error of a worker that waited in vain, `seconds`, for `whom`."""
    return WorkerTimeout(
        f"worker {rank} waited {seconds:g} s for {whom}. "
        f"If the other workers are only slow, raise {setting('parallel', 'timeout_s')}"
    )
