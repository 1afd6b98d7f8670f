from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from cupynet.core.checks import integer
from cupynet.parallel.communicators.base import POLL_S, Communicator, PeerFailed, SerialCommunicator, Timeout
from cupynet.parallel.communicators.threads import ThreadCommunicator, ThreadGroup, ThreadWorld
from cupynet.parallel.launchers.base import Launcher, note_worker

T = TypeVar("T")

log = logging.getLogger(__name__)

GRACE_S = 5.0  # seconds for the other workers to notice a failure
WAKE_S = 0.2  # interval at which the main thread wakes up to let Python run signal handlers
INTERRUPTED = -1  # recorded as the failed rank if the caller of `run` was interrupted


class ThreadLauncher(Launcher):
    """Runs workers in threads, started for each task. A single worker runs in the calling thread.

    A worker that hangs is abandoned; its thread ends when it wakes up. For `timeout_s`, see `Launcher`.
    """

    def __init__(self, workers: int, timeout_s: float = 300.0) -> None:
        super().__init__(timeout_s)
        self.workers = self.sharing = integer("workers", workers, 1)
        self.first = 0
        self._alone = SerialCommunicator()  # used if there is one worker
        self._group = ThreadGroup(list(range(self.workers)), ThreadWorld(self.timeout_s))
        self._communicators = [ThreadCommunicator(self._group, rank) for rank in range(self.workers)]

    def _release(self) -> None:
        if self.workers > 1:
            self._run(lambda communicator: communicator.close())

    def _run(self, task: Callable[[Communicator], T]) -> T | None:
        if self.workers == 1:
            return task(self._alone)
        world, results = self._group.world, dict[int, T]()

        def work(communicator: ThreadCommunicator) -> None:
            try:
                results[communicator.rank] = task(communicator)
            except BaseException as error:
                if not isinstance(error, PeerFailed):
                    note_worker(error, communicator.rank)
                    world.fail(communicator.rank, error)

        threads = [
            threading.Thread(target=work, args=[each], name=f"cupynet worker {each.rank}", daemon=True)
            for each in self._communicators
        ]
        try:
            for thread in threads:
                thread.start()
            # Python runs signal handlers only in the main thread, and only while that thread is not blocked.
            for thread in threads:
                while thread.is_alive() and world.failure is None:
                    thread.join(WAKE_S)
        except BaseException as error:  # such as KeyboardInterrupt
            world.fail(INTERRUPTED, error)
            self._stop(threads)
            world.forget()
            raise
        if world.failure is not None:
            self._stop(threads)
            log.info("worker %d failed; the others were stopped", world.failed_rank)
            raise world.forget()
        return results[0]

    def _stop(self, threads: list[threading.Thread]) -> None:
        """Abort NCCL on all ranks in parallel, because aborts may wait for each other. Then wait for the workers."""
        aborts = [threading.Thread(target=_abandon, args=[each], daemon=True) for each in self._communicators]
        for thread in aborts:
            thread.start()
        timeout = Timeout(GRACE_S)
        for thread in (*aborts, *threads):
            while thread.is_alive() and not timeout.expired():
                thread.join(POLL_S)


def _abandon(communicator: Communicator) -> None:
    with suppress(Exception):  # only the original failure is reported
        communicator.abandon()
