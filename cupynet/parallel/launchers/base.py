"""The base class of launchers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from cupynet.core.errors import CupynetError, annotate
from cupynet.parallel.communicators.base import Communicator

T = TypeVar("T")


class Launcher:
    """Runs the same task on every worker, each with its communicator. Use it as a context manager.

    After a failure no further task can run.

    Attributes:
        workers: the number of workers.
        first: the lowest rank in this process.
        sharing: the number of workers that share this process's cores.
    """

    workers: int
    first: int
    sharing: int

    def __init__(self) -> None:
        self._usable, self._running = True, threading.Lock()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """Run `task(communicator)` on every worker. Return rank 0's result in the process of rank 0, None elsewhere.

        The first worker that raises stops the others at their next exchange or check, and its exception is raised here.

        Raises:
            RuntimeError: after a failure or `close`, and during another task.
        """
        if not self._usable:
            raise RuntimeError("these workers have failed, been interrupted or closed: create a new ParallelWrapper")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("these workers are busy: a task cannot begin in the middle of another")
        try:
            return self._run(task)
        except BaseException:
            self._usable = False
            raise
        finally:
            self._running.release()

    def _run(self, task: Callable[[Communicator], T]) -> T | None:
        raise NotImplementedError

    def close(self) -> None:
        """Release what the workers hold together, unless there was a failure. A second call has no effect."""
        raise NotImplementedError


def note_worker(error: BaseException, rank: int) -> None:
    """Name the worker in the traceback of an unexpected error."""
    if not isinstance(error, CupynetError) and not getattr(error, "__notes__", None):
        annotate(error, f"worker {rank}")
