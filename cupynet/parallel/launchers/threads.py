"""The launcher of workers that are threads of this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from cupynet.core.checks import integer
from cupynet.parallel.communicators.base import LOOK_S, Communicator, PeerFailed, SerialCommunicator, Timeout
from cupynet.parallel.communicators.threads import ThreadCommunicator, ThreadGroup
from cupynet.parallel.launchers.base import Launcher, note_worker

T = TypeVar("T")

log = logging.getLogger(__name__)

GRACE_S = 5.0  # how long the others may take to notice that a worker failed
WAKE_S = 0.2  # how often the waiting main thread lets Python run signal handlers
INTERRUPTED = -1  # the failed rank if the caller of `run` or `close` ended the task


class ThreadLauncher(Launcher):
    """Workers in threads, which are started for each task. A single worker runs in the calling thread.

    A worker that hangs is abandoned; if it wakes up, its thread ends.

    Args:
        workers: the number of threads.
        timeout_s: how long a worker waits for the others, and `close` waits for a running task, in seconds.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(self, workers: int, timeout_s: float = 300.0) -> None:
        super().__init__(timeout_s)
        self.workers = self.sharing = integer("workers", workers, 1)
        self.first = 0
        self._alone = SerialCommunicator()  # used if there is one worker
        self._group = ThreadGroup.of(self.workers, self.timeout_s)
        self._communicators = [ThreadCommunicator(self._group, rank) for rank in range(self.workers)]

    def _interrupt(self, error: BaseException) -> None:
        self._alone.failure = error
        self._group.team.fail(INTERRUPTED, error)

    def _release(self) -> None:
        if self.workers > 1:
            self._run(lambda communicator: communicator.close())

    def _run(self, task: Callable[[Communicator], T]) -> T | None:
        if self.workers == 1:
            return task(self._alone)
        team, results = self._group.team, dict[int, T]()

        def work(communicator: ThreadCommunicator) -> None:
            self._inside.add(threading.get_ident())
            try:
                results[communicator.rank] = task(communicator)
            except BaseException as error:
                if not isinstance(error, PeerFailed):
                    note_worker(error, communicator.rank)
                    team.fail(communicator.rank, error)

        threads = [
            threading.Thread(target=work, args=[each], name=f"cupynet worker {each.rank}", daemon=True)
            for each in self._communicators
        ]
        try:
            for thread in threads:
                thread.start()
            # The system may deliver a signal to any thread, but Python runs its handler in the main thread alone, and
            # not while that thread is blocked.
            for thread in threads:
                while thread.is_alive() and team.failure is None:
                    thread.join(WAKE_S)
        except BaseException as error:  # a KeyboardInterrupt: the workers must stop too
            team.fail(INTERRUPTED, error)
            self._stop(threads)
            raise
        if team.failure is not None:
            self._stop(threads)
            log.info("worker %d failed; the others were stopped", team.failed_rank)
            raise team.failure
        return results[0]

    def _stop(self, threads: list[threading.Thread]) -> None:
        """After a failure, abort collectives on devices, and wait for the workers for a grace period.

        Every NCCL rank must be aborted, and a worker that is blocked on its device cannot do so itself. Each rank is
        aborted in a separate thread, because one abort may wait for another.
        """
        aborts = [threading.Thread(target=_abandon, args=[each], daemon=True) for each in self._communicators]
        for thread in aborts:
            thread.start()
        timeout = Timeout(GRACE_S)
        for thread in (*aborts, *threads):
            while thread.is_alive() and not timeout.expired():
                thread.join(LOOK_S)


def _abandon(communicator: Communicator) -> None:
    with suppress(Exception):  # the original failure is reported
        communicator.abandon()
