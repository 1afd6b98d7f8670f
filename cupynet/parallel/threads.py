"""Workers that are threads of one process: a meeting point with a time-out, and arrays handed over by reference."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend, create_backend
from cupynet.backend.array import Array
from cupynet.parallel.communicator import Communicator, PeerFailed, WorkerTimeout


class ThreadGroup:
    """What the threads of one run share: a meeting point, slots to hand things over, and the first failure.

    Args:
        size: how many workers.
        timeout_s: how long a worker waits for the others before it takes them for dead.
    """

    def __init__(self, size: int, timeout_s: float = 300.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.slots: tuple[list[Any], list[Any]] = ([None] * size, [None] * size)
        self.failure: BaseException | None = None
        self.failed_rank = -1
        self._condition = threading.Condition()
        self._arrived: set[int] = set()
        self._generation = 0

    def fail(self, rank: int, error: BaseException) -> None:
        """Record a worker's failure and wake everybody; the first one counts."""
        with self._condition:
            if self.failure is None:
                self.failure, self.failed_rank = error, rank
            self._condition.notify_all()

    def meet(self, rank: int) -> None:
        """Wait until all workers are here; raises PeerFailed or WorkerTimeout instead of waiting for ever."""
        with self._condition:
            self.check(rank)
            self._arrived.add(rank)
            if len(self._arrived) == self.size:
                self._arrived.clear()
                self._generation += 1
                self._condition.notify_all()
                return
            generation, deadline = self._generation, time.monotonic() + self.timeout_s
            while generation == self._generation:
                if not self._condition.wait(deadline - time.monotonic()) and generation == self._generation:
                    self._time_out(rank)
                if generation == self._generation:
                    self.check(rank)

    def _time_out(self, rank: int) -> None:
        missing = ", ".join(str(r) for r in range(self.size) if r not in self._arrived)
        raise WorkerTimeout(
            f"worker {missing} has not arrived where worker {rank} waited for it for {self.timeout_s:g} s and is taken "
            "for dead: raise timeout_s if it is only slow"
        )

    def check(self, rank: int) -> None:
        """Raise PeerFailed if a worker has failed."""
        if self.failure is not None:
            raise PeerFailed(f"worker {rank} stops because worker {self.failed_rank} failed")


class ThreadCommunicator(Communicator):
    """A worker that is a thread of this process. Averages are computed in host memory, each worker its own part.

    Args:
        group: what all of them share.
        rank: this one's number.
    """

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self._turn = 0
        self._backend: Backend = create_backend("numpy", "double")

    def attach(self, backend: Backend) -> None:
        self._backend = backend

    def barrier(self) -> None:
        self.group.meet(self.rank)

    def check(self) -> None:
        if self.group.failure is not None:
            self.group.check(self.rank)

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.stack(self._exchange(array.copy()))

    def broadcast(self, array: Array, root: int = 0) -> None:
        hosts = self._exchange(self._backend.to_host(array))
        if self.rank != root:
            self._put(array, hosts[root])
        self.barrier()  # root does not change its array before all have copied it

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        hosts = [self._backend.to_host(array) for array in arrays]
        contributions = self._exchange((hosts, weight))
        total = sum(w for _, w in contributions)
        if total > 0:
            shares = [w / total for _, w in contributions]
            # each worker does it for its own part of everybody's vectors: the work is shared, the bits are the same
            for i, host in enumerate(hosts):
                start, stop = (len(host) * r // self.size for r in (self.rank, self.rank + 1))
                self._backend.mean_in_place([theirs[i][start:stop] for theirs, _ in contributions], shares)
        self.barrier()
        for array, host in zip(arrays, hosts, strict=True):
            if host is not array:
                self._put(array, host)

    def _put(self, array: Array, host: Array) -> None:
        """Write an array of the host into one that is on the host or on this worker's device."""
        array[...] = host if isinstance(array, np.ndarray) else self._backend.asarray(host)

    def _exchange(self, value: Any) -> list[Any]:
        """Every worker's value by reference, in rank order."""
        # two sets of slots in turn: who writes one again has met everybody since they read it
        slots = self.group.slots[self._turn]
        self._turn = 1 - self._turn
        slots[self.rank] = value
        self.barrier()
        return list(slots)
