"""Starting the workers of a run. `Launcher` says what that means; here it is done with long-lived threads."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from cupynet.checks import integer
from cupynet.errors import CupynetError, annotate
from cupynet.parallel.communicator import Communicator, PeerFailed, SerialCommunicator
from cupynet.parallel.threads import ThreadCommunicator, ThreadGroup

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 5.0  # how long the others may take to notice that a worker failed


class Launcher(Protocol):
    """Runs the same task on every worker, each with its communicator."""

    workers: int

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """Run `task(communicator)` on every worker: rank 0's result in the process of rank 0, None elsewhere.

        The first worker that raises stops the others where they next meet or look, and its own exception is raised
        here.
        """

    def close(self) -> None:
        """Let the workers go; harmless when done before."""


class ThreadLauncher:
    """`workers` threads that live until `close`, so that what a thread owns (a GPU's library handles) is made once.

    A context manager. With one worker the task runs in the calling thread: no thread, no parallel code.

    Args:
        workers: how many.
        timeout_s: how long a worker waits for the others before it takes them for dead, in seconds.
    """

    def __init__(self, workers: int, timeout_s: float = 300.0) -> None:
        self.workers, self.timeout_s = integer("workers", workers, 1), timeout_s
        self._inboxes: list[queue.SimpleQueue[Any]] = []
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._broken = False
        for rank in range(self.workers if self.workers > 1 else 0):
            inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._inboxes.append(inbox)
            name = f"cupynet worker {rank}"
            threading.Thread(target=self._serve, args=(rank, inbox), name=name, daemon=True).start()

    def __enter__(self) -> ThreadLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; harmless when done before."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """See `Launcher.run`. RuntimeError after a failure or `close`."""
        if self.workers == 1:
            return task(SerialCommunicator())
        if self._broken or not self._inboxes:
            raise RuntimeError("these workers have failed or been closed: make new ones")
        group = ThreadGroup(self.workers, self.timeout_s)
        for rank, inbox in enumerate(self._inboxes):
            inbox.put((task, ThreadCommunicator(group, rank)))
        try:
            result: T | None = self._collect(group)
            return result
        except BaseException as error:
            self._broken = True
            group.fail(-1, error)  # a KeyboardInterrupt here: the workers must not go on alone
            raise

    def _collect(self, group: ThreadGroup) -> Any:
        """Wait for all workers; after a failure, only for a grace period. Rank 0's result."""
        first: Any = None
        deadline: float | None = None
        for _ in range(self.workers):
            try:
                rank, result, error = self._results.get(timeout=deadline and max(deadline - time.monotonic(), 0))
            except queue.Empty:
                break
            first = result if rank == 0 else first
            if error is not None and deadline is None:
                deadline = time.monotonic() + GRACE_S
        if group.failure is not None:
            log.info("worker %d failed; the others were stopped", group.failed_rank)
            raise group.failure
        return first

    def _serve(self, rank: int, inbox: queue.SimpleQueue[Any]) -> None:
        """A worker's life: take a task, do it, report."""
        while (job := inbox.get()) is not None:
            task, communicator = job
            result: Any = None
            error: BaseException | None = None
            try:
                result = task(communicator)
            except PeerFailed as stopped:
                error = stopped
            except BaseException as failure:
                if not isinstance(failure, CupynetError) and not getattr(failure, "__notes__", None):
                    annotate(failure, f"worker {rank}")
                communicator.group.fail(rank, failure)
                error = failure
            self._results.put((rank, result, error))
            del job, task, communicator, result, error
