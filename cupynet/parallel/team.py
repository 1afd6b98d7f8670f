"""What the ranks of an MPI job know of each other: who failed, how long to wait for whom, what is still on its way.

`mpi` is the module mpi4py.MPI throughout, as parallel/mpi.py has imported it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.parallel.communicator import PeerFailed
from cupynet.parallel.waiting import Patience, given_up

JOIN_S = 5.0  # how long the thread that looks at them may take to end
POLL_S = 0.0002  # between two looks at messages that are still on their way while this worker does other things


class Word(IntEnum):
    """What a rank tells all others besides its work: why it ends. Of several that failed, the first kind counts."""

    FAILED = 1  # with an error of its own
    LATE = 2  # because it waited too long for somebody
    STOPPED = 3  # because of another's failure
    LEAVING = 4  # its program is over


class RankTeam:
    """What a rank knows of all the others, whatever groups they form: who failed, who has left; and how long to wait.

    Args:
        mpi: the module mpi4py.MPI.
        world: a communicator of all ranks that nothing else uses.

    Attributes:
        timeout_s: how long a worker waits for another before it takes it for dead.
        ended: rank -> why it ended, and its exit code; of those that did, this one included.
        leaving: the ranks whose programs are over.
        outbox: messages on their way.
        groups: what connects some of the ranks, by their numbers in order; made once, and used by all who need it.
    """

    def __init__(self, mpi: Any, world: Any) -> None:
        self.mpi, self.rank, self.size = mpi, world.Get_rank(), world.Get_size()
        self.timeout_s = 300.0
        self.ended: dict[int, tuple[Word, int]] = {}
        self.leaving: set[int] = set()
        self.outbox = Outbox(mpi)
        self.groups: dict[tuple[int, ...], Any] = {}
        self._world = world
        self._heard = np.zeros(3, np.int64)  # rank, word, exit code
        self._said: list[Any] = []
        self._listening = self._listen() if self.size > 1 else None

    def _listen(self) -> Any:
        return self._world.Irecv(self._heard, self.mpi.ANY_SOURCE)

    def say(self, word: Word, code: int = 0) -> None:
        """Tell all other ranks; they hear of it while they wait, and after each round."""
        self._note(self.rank, word, code)
        message = np.array([self.rank, word, code], np.int64)
        self._said += [self._world.Isend(message, rank) for rank in range(self.size) if rank != self.rank]

    def hear(self) -> None:
        """Take note of what others have said."""
        while self._listening is not None and self._listening.Test():
            rank, word, code = self._heard.tolist()
            self._note(rank, Word(word), code)
            self._listening = self._listen()

    def _note(self, rank: int, word: Word, code: int) -> None:
        if word == Word.LEAVING:
            self.leaving.add(rank)
        else:
            self.ended[rank] = word, code

    def first(self) -> int | None:
        """The rank whose failure counts: one with an error of its own, the lowest of several; None: nobody failed."""
        failed = sorted((word, rank) for rank, (word, _) in self.ended.items() if word != Word.STOPPED)
        return failed[0][1] if failed else None

    def check(self, name: int) -> None:
        """Raise PeerFailed if a rank has failed. name: the rank of the one that asks."""
        self.hear()
        if self.ended and (first := self.first()) is not None:
            raise PeerFailed(f"worker {name} stops because worker {first} failed")

    def close(self) -> None:
        """Nothing more is said or heard: MPI is about to end."""
        self.outbox.close()
        if self._listening is not None:
            self._listening.Cancel()
            self._listening.Wait()
            self._listening = None

    def wait(self, requests: Requests, name: int, *, transfer: bool = False) -> None:
        """Wait until all is done; raises PeerFailed or WorkerTimeout instead of waiting for ever.

        The processor is left to others more and more, but never for longer than an eighth of the time waited so far: a
        worker that comes late costs little more than its lateness.

        name: the rank of the one that waits. transfer: everybody is here already and only data are on their way.
        """
        if requests.done():
            return
        began, patience = time.perf_counter(), Patience(self.timeout_s)
        patient_s, longest_s = (0.002, 0.00005) if transfer else (0.0001, 0.001)
        while True:
            self.check(name)
            for _ in range(10):
                if requests.done():
                    return
                waited = time.perf_counter() - began
                if waited < patient_s:
                    _let_others_run()
                else:
                    time.sleep(min(waited / 8, longest_s))
            if patience.over():
                self.check(name)
                raise given_up(requests.missing(), name, self.timeout_s)


_let_others_run: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Requests:
    """Transfers that have been started, with the worker at the other end of each and what is expected from it.

    MPI reads and writes their arrays until they are done.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._requests: list[Any] = []
        self._names: list[int] = []
        self._expected: list[int] = []  # bytes to receive; -1 for what is sent
        self._statuses: list[Any] = []

    def add(self, request: Any, name: int, expected: int = -1) -> None:
        """One more. name: the rank at the other end; expected: how many bytes are to be received."""
        self._requests.append(request)
        self._names.append(name)
        self._expected.append(expected)
        self._statuses.append(self._mpi.Status())

    def done(self) -> bool:
        """Whether all are; RuntimeError where less was received than expected, or more."""
        try:
            if not self._mpi.Request.Testall(self._requests, self._statuses):
                return False
        except self._mpi.Exception as error:
            kinds = [self._mpi.Get_error_class(status.Get_error()) for status in self._statuses]
            if self._mpi.ERR_TRUNCATE not in kinds:
                raise
            index = kinds.index(self._mpi.ERR_TRUNCATE)
            raise RuntimeError(
                f"more than {self._expected[index]} bytes came from worker {self._names[index]} where no more were "
                "expected: the workers do not make the same calls"
            ) from error
        for status, name, expected in zip(self._statuses, self._names, self._expected, strict=True):
            if expected >= 0 and status.Get_count(self._mpi.BYTE) != expected:
                raise RuntimeError(
                    f"{status.Get_count(self._mpi.BYTE)} bytes came from worker {name} where {expected} were expected: "
                    "the workers do not make the same calls"
                )
        return True

    def missing(self) -> list[int]:
        """The workers from which something is missing, or if nothing is, which have not taken what is theirs."""
        waiting = [
            (name, expected)
            for request, name, expected in zip(self._requests, self._names, self._expected, strict=True)
            if not request.Test()
        ]
        silent = [name for name, expected in waiting if expected >= 0]
        return sorted(set(silent or [name for name, _ in waiting]))


class Outbox:
    """Messages that were sent and are still on their way, in buffers that are used again.

    Some networks move a large message only while its sender calls MPI. A thread does so as long as there are any: the
    receiver must not wait until the sender has finished computing.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._underway: deque[tuple[list[Any], NDArray[np.uint8]]] = deque()
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock, self._work, self._closed = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None

    def copy(self, host: NDArray[Any]) -> NDArray[np.uint8]:
        """The bytes of an array, in a buffer of this outbox."""
        with self._lock:
            buffers = self._free.get(host.nbytes)
            buffer = buffers.pop() if buffers else np.empty(host.nbytes, np.uint8)
        buffer.view(host.dtype).reshape(host.shape)[...] = host
        return buffer

    def send(self, requests: list[Any], buffer: NDArray[np.uint8]) -> None:
        """Keep `buffer`, which `requests` send, until it has left."""
        with self._lock:
            self._underway.append((requests, buffer))
            self._sweep()
            if not self._underway:
                return
        if self._thread is None:
            self._thread = threading.Thread(target=self._attend, name="cupynet messages", daemon=True)
            self._thread.start()
        self._work.set()

    def _sweep(self) -> None:
        """Take back what has left, the oldest first; with the lock held."""
        while self._underway and self._mpi.Request.Testall(self._underway[0][0]):
            buffer = self._underway.popleft()[1]
            self._free.setdefault(buffer.nbytes, []).append(buffer)

    def _attend(self) -> None:
        """The thread."""
        while not self._closed:
            with self._lock:
                self._sweep()
                if not self._underway and not self._closed:
                    self._work.clear()
            if self._work.is_set():
                time.sleep(POLL_S)
            else:
                self._work.wait()

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            self._work.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
