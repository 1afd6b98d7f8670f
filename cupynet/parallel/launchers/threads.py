"""The launcher of workers that are threads of this process."""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from cupynet.core.checks import integer, number
from cupynet.core.errors import ConfigError, CupynetError, annotate
from cupynet.parallel.communicators.base import Communicator, PeerFailed
from cupynet.parallel.communicators.serial import SerialCommunicator
from cupynet.parallel.communicators.threads import ThreadCommunicator, ThreadGroup
from cupynet.parallel.communicators.timeout import LOOK_S, Timeout

T = TypeVar("T")
Inbox: TypeAlias = "queue.SimpleQueue[Callable[[Communicator], Any] | None]"
Results: TypeAlias = "queue.SimpleQueue[tuple[int, Any]]"  # rank, what its task returned

log = logging.getLogger(__name__)

GRACE_S = 5.0  # how long the others may take to notice that a worker failed
WAKE_S = 0.2  # how often the waiting main thread lets Python run signal handlers
INTERRUPTED = -1  # the failed rank if the caller of `run` or `close` ended the task


class ThreadLauncher:
    """Workers in threads. The threads live until `close`, so that a GPU's library handles are created once per thread.

    Use it as a context manager. A single worker runs in the calling thread. After a failure no further task can run. A
    worker that hangs is abandoned; if it wakes up, its thread ends.

    Args:
        workers: the number of threads.
        timeout_s: how long a worker waits for the others, in seconds.

    Raises:
        ConfigError: an argument is invalid, or so many threads cannot be started.
    """

    def __init__(self, workers: int, timeout_s: float = 300.0) -> None:
        self.workers = self.sharing = integer("workers", workers, 1)
        self.first = 0
        self._group = ThreadGroup.of(self.workers, number("timeout_s", timeout_s, above=0, unit="seconds"))
        self._results: Results = queue.SimpleQueue()
        self._inboxes: list[Inbox] = []
        self._threads: list[threading.Thread] = []
        self._left_behind: list[threading.Thread] = []  # workers that hang; they are not waited for again
        self._usable, self._running, self._process = True, threading.Lock(), os.getpid()
        # ends the threads of a launcher that is dropped without `close`; they hold no reference to it
        self._dismiss = weakref.finalize(self, _dismiss, self._inboxes)
        for rank in range(self.workers if self.workers > 1 else 0):
            inbox: Inbox = queue.SimpleQueue()
            arguments = (ThreadCommunicator(self._group, rank), inbox, self._results)
            thread = threading.Thread(target=_serve, args=arguments, name=f"cupynet worker {rank}", daemon=True)
            self._inboxes.append(inbox)
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise ConfigError(
                    f"workers={workers}: this machine starts only {rank} threads: ask for fewer"
                ) from error
            self._threads.append(thread)

    def __enter__(self) -> ThreadLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and wait for them, for a grace period. A second call has no effect.

        A running task ends with a RuntimeError at the next exchange of the workers.
        """
        self._usable = False
        if self._running.locked() and self._process == os.getpid():
            error = RuntimeError("these workers were closed in the middle of a task: close them when it is done")
            self._group.team.fail(INTERRUPTED, error)
        self._dismiss()
        timeout = Timeout(GRACE_S)
        for thread in filter(lambda thread: thread not in self._left_behind, self._threads):
            while thread.is_alive() and thread is not threading.current_thread() and not timeout.expired():
                thread.join(LOOK_S)

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """See `Launcher.run`. RuntimeError after a failure or `close`, during another task, and in a forked process."""
        if not self._usable:
            raise RuntimeError("these workers have failed, been interrupted or closed: create a new ParallelWrapper")
        if self._process != os.getpid() and self.workers > 1:
            raise RuntimeError(
                "these workers are threads of the process that this one was forked from: create a ParallelWrapper here"
            )
        if not self._running.acquire(blocking=False):
            raise RuntimeError("these workers are busy: a task cannot begin in the middle of another")
        try:
            return task(SerialCommunicator()) if self.workers == 1 else self._on_threads(task)
        except BaseException:
            self._usable = False
            raise
        finally:
            self._running.release()

    def _on_threads(self, task: Callable[[Communicator], T]) -> T | None:
        first, waiting = None, set(range(self.workers))
        try:
            for inbox in self._inboxes:
                inbox.put(task)
            while waiting and self._group.team.failure is None:
                # The system may deliver a signal to any thread, but Python runs its handler in the main thread alone,
                # and not while that thread is blocked.
                with suppress(queue.Empty):
                    rank, result = self._results.get(timeout=WAKE_S)
                    waiting.remove(rank)
                    first = result if rank == 0 else first
        except BaseException as error:  # a KeyboardInterrupt: the workers must stop too
            self._group.team.fail(INTERRUPTED, error)
            self._wait(waiting)
            raise
        if self._group.team.failure is not None:
            self._wait(waiting)
            log.info("worker %d failed; the others were stopped", self._group.team.failed_rank)
            raise self._group.team.failure
        return first

    def _wait(self, waiting: set[int]) -> None:
        """Wait after a failure for workers that are still running, for a grace period."""
        timeout = Timeout(GRACE_S)
        while waiting and not timeout.expired():
            with suppress(queue.Empty):
                waiting.discard(self._results.get(timeout=LOOK_S)[0])
        self._left_behind = [self._threads[rank] for rank in waiting]


def _serve(communicator: ThreadCommunicator, inbox: Inbox, results: Results) -> None:
    """Run tasks in a worker's thread until there are no more."""
    while (task := inbox.get()) is not None:
        result: Any = None
        try:
            result = task(communicator)
        except PeerFailed:
            _abandon(communicator)
        except BaseException as failure:
            if not isinstance(failure, CupynetError) and not getattr(failure, "__notes__", None):
                annotate(failure, f"worker {communicator.rank}")
            communicator.group.team.fail(communicator.rank, failure)
            _abandon(communicator)
        results.put((communicator.rank, result))
        del task, result
    if communicator.group.team.failure is None:  # otherwise the others may not arrive to release NCCL together
        with suppress(Exception):  # no one is left to report it to
            communicator.close()


def _abandon(communicator: ThreadCommunicator) -> None:
    with suppress(Exception):  # the original failure is reported
        communicator.abandon()


def _dismiss(inboxes: list[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)
