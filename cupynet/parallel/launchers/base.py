from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from cupynet.core import shared_options
from cupynet.core.errors import ClosedError, CupynetError, annotate
from cupynet.parallel.communicators.base import Communicator

T = TypeVar("T")

BUSY = "these workers are busy. Wait until the running task ends"


class Launcher:
    """Runs a function on every worker. Use it as a context manager. After a failure, no further task can run.

    Args:
        timeout_s: seconds that a worker waits for the others.

    Attributes:
        first: lowest rank in this process.
        sharing: number of workers that share the cores of this process.
    """

    workers: int
    first: int
    sharing: int

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = shared_options.timeout_s("timeout_s", timeout_s)
        self._ended, self._running = "", threading.Lock()  # `_ended`: why no further task can run

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """Run `task(communicator)` on every worker. Return rank 0's result, or None in processes without rank 0.

        An exception in a worker stops the others at their next collective or `check`, and is raised here.

        Raises:
            ClosedError: an earlier task failed or was interrupted, or the launcher was closed.
            PeerFailed: a worker in another process has failed.
            RuntimeError: another task is running.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            if self._ended:
                raise ClosedError(f"the workers {self._ended}. Create a new ParallelWrapper; `predict` still works")
            return self._run(task)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            how = "were interrupted" if interrupted else f"have failed ({type(error).__name__})"
            self._ended = self._ended or how
            raise
        finally:
            self._running.release()

    def check_idle(self) -> None:
        """Raise RuntimeError if a task is running."""
        if self._running.locked():
            raise RuntimeError(BUSY)

    def agree(self, settings: Mapping[str, object]) -> None:
        """Raise ConfigError if another process has other settings. Every process must call this."""

    def close(self) -> None:
        """Release the shared resources, unless a task has failed. A second call has no effect.

        Raises RuntimeError if a task is running.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            usable, self._ended = not self._ended, self._ended or "were closed"
            if usable:
                self._release()
        finally:
            self._running.release()

    def _run(self, task: Callable[[Communicator], T]) -> T | None:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


def note_worker(error: BaseException, rank: int) -> None:
    """Add the worker's rank as a note to an error, unless it has a note already or is a CupynetError."""
    if not isinstance(error, CupynetError) and not getattr(error, "__notes__", None):
        annotate(error, f"worker {rank}")
