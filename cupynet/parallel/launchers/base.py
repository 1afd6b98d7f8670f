from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from cupynet.core import shared_options
from cupynet.core.errors import ClosedError, CupynetError, annotate
from cupynet.parallel.communicators.base import Communicator

T = TypeVar("T")

BUSY = "these workers are busy. Wait for the running task to end before starting another one"


class Launcher:
    """Runs a function on every worker. Use it as a context manager. After a failure, no further task can run.

    Args:
        timeout_s: seconds that a worker waits for the others, and that `close` waits for a running task.

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
        self._inside: set[int] = set()  # identifiers of the threads of the running task

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
            self._inside = {threading.get_ident()}
            return self._run(task)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            how = "were interrupted" if interrupted else f"have failed ({type(error).__name__})"
            self._ended = self._ended or how
            raise
        finally:
            self._inside = set()
            self._running.release()

    def check_idle(self) -> None:
        """Raise RuntimeError if a task is running."""
        if not self.idle:
            raise RuntimeError(BUSY)

    def agree(self, settings: Mapping[str, object]) -> None:
        """Raise ConfigError if another process has other settings. Every process must call this."""

    @property
    def idle(self) -> bool:
        return not self._running.locked()

    def close(self) -> None:
        """Release the shared resources, unless a task has failed or is running. A second call has no effect.

        A running task ends with a RuntimeError at a worker's next collective or `check`. Unless it is called by a
        thread of the task, `close` waits up to `timeout_s` for the end of the task.
        """
        usable, self._ended = not self._ended, self._ended or "were closed"
        if self._running.acquire(blocking=False):
            try:
                if usable:
                    self._release()
            finally:
                self._running.release()
            return
        self._interrupt(RuntimeError("these workers were closed during a task. Close them after it has ended"))
        if threading.get_ident() not in self._inside and self._running.acquire(timeout=self.timeout_s):
            self._running.release()

    def _run(self, task: Callable[[Communicator], T]) -> T | None:
        raise NotImplementedError

    def _interrupt(self, error: BaseException) -> None:
        """End the running task with an error. This may be called from any thread."""
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


def note_worker(error: BaseException, rank: int) -> None:
    """Add the worker's rank as a note to an error, unless it has a note already or is a CupynetError."""
    if not isinstance(error, CupynetError) and not getattr(error, "__notes__", None):
        annotate(error, f"worker {rank}")
