"""Starting the workers: long-lived threads, one per replica."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from cupynet.backend.blas import limited, threads_per_worker
from cupynet.errors import ConfigError, CupynetError, annotate
from cupynet.parallel.communicator import Communicator, PeerFailed, SerialCommunicator, ThreadCommunicator, ThreadGroup

T = TypeVar("T")
log = logging.getLogger(__name__)

GRACE_S = 5.0  # how long the others may take to notice that a worker failed


class WorkerTeam:
    """`workers` threads that live until `close`, so that what a thread owns (a GPU's library handles) is made once.

    A context manager. With one worker the task runs in the calling thread: no thread, no parallel code.

    Args:
        workers: how many.
        timeout_s: how long a worker waits for the others before it takes them for dead.
        most_blas_threads: a worker gets no more, see `backend.blas.threads_per_worker`.
        limit_blas: give each worker its share of the cores as BLAS threads; the limit is the whole process's until
            `close`.
    """

    def __init__(
        self, workers: int, timeout_s: float = 300.0, *, limit_blas: bool = True, most_blas_threads: int = 2**30
    ) -> None:
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"workers={workers!r}: must be an integer of at least 1")
        self.workers, self.timeout_s = workers, timeout_s
        self.stop_signal = 0
        self._group: ThreadGroup | None = None
        self._inboxes: list[queue.SimpleQueue[Any]] = []
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._broken = False
        self.blas_threads = min(threads_per_worker("numpy", workers), most_blas_threads)
        self._limits = limited(self.blas_threads) if limit_blas else None
        for rank in range(workers if workers > 1 else 0):
            inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._inboxes.append(inbox)
            name = f"cupynet worker {rank}"
            threading.Thread(target=self._serve, args=(rank, inbox), name=name, daemon=True).start()

    def __enter__(self) -> WorkerTeam:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and lift the BLAS limit; harmless when done before."""
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes = []
        if self._limits is not None:
            self._limits.close()
            self._limits = None

    def stop(self, signal_number: int) -> None:
        """Ask the workers to stop at their next average, all of them at the same one; safe in a signal handler."""
        self.stop_signal = signal_number
        if self._group is not None:
            self._group.stop_signal = signal_number

    def run(self, task: Callable[[Communicator], T]) -> list[T]:
        """Run `task(communicator)` on every worker and return the results in rank order.

        The first worker that raises stops the others where they next meet or look, and its own exception is raised
        here.
        """
        if self.workers == 1:
            return [task(SerialCommunicator(lambda: self.stop_signal))]
        if self._broken or not self._inboxes:
            raise RuntimeError("this team has failed or been closed: make a new one")
        self._group = group = ThreadGroup(self.workers, self.timeout_s)
        group.stop_signal = self.stop_signal
        for rank, inbox in enumerate(self._inboxes):
            inbox.put((task, ThreadCommunicator(group, rank)))
        try:
            return self._collect(group)
        except BaseException as error:
            self._broken = True
            group.fail(-1, error)  # a KeyboardInterrupt here: the workers must not go on alone
            raise

    def _collect(self, group: ThreadGroup) -> list[Any]:
        """Wait for all workers; after a failure, only for a grace period."""
        results: list[Any] = [None] * self.workers
        deadline: float | None = None
        for _ in range(self.workers):
            try:
                rank, result, error = self._results.get(timeout=deadline and max(deadline - time.monotonic(), 0))
            except queue.Empty:
                break
            results[rank] = result
            if error is not None and deadline is None:
                deadline = time.monotonic() + GRACE_S
        if group.failure is not None:
            log.info("worker %d failed; the others were stopped", group.failed_rank)
            raise group.failure
        return results

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
