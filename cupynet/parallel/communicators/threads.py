"""Communicator for the threads of one process. All-reduces read other threads' arrays without copying them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError, DivergedError
from cupynet.parallel.communicators.base import POLL_S, Communicator, PeerFailed, Timeout, timed_out
from cupynet.parallel.communicators.devices import DeviceMeans, means_on_devices


class ThreadWorld:
    """State shared by all worker threads: the timeout and the first failure."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failure: BaseException | None = None
        self.failed_rank = -1
        self.condition = threading.Condition()

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure, and wake the other workers.

        If several workers diverge, the last one is recorded. In a pipeline, it is the nearest to the loss.
        """
        with self.condition:
            later = rank > self.failed_rank and isinstance(error, DivergedError)
            if self.failure is None or (later and isinstance(self.failure, DivergedError)):
                self.failure, self.failed_rank = error, rank
            self.condition.notify_all()

    def forget(self) -> BaseException:
        """Return the failure, and replace it, because its traceback would keep the caller's frames and arrays alive."""
        failure, self.failure = self.failure, PeerFailed(f"worker {self.failed_rank} failed")
        assert failure is not None
        return failure

    def check(self, rank: int) -> None:
        """Raise PeerFailed in worker `rank` if a worker has failed or the task was interrupted."""
        if self.failure is not None:
            raise PeerFailed(f"worker {rank} stopped because worker {self.failed_rank} failed")

    def wait(self, rank: int, ready: Callable[[], bool], whom: str) -> None:
        """Wait until `ready()` is true, or raise PeerFailed or WorkerTimeout. The caller holds the condition's lock."""
        timeout = Timeout(self.timeout_s)
        while not ready():
            self.check(rank)
            self.condition.wait(POLL_S)
            if timeout.expired() and not ready():
                self.check(rank)
                raise timed_out(rank, self.timeout_s, whom)


class ThreadGroup:
    """A group of threads with a barrier, slots for exchanged values, and messages. `ranks` are ranks in the run."""

    def __init__(self, ranks: list[int], world: ThreadWorld) -> None:
        self.ranks, self.size, self.world = ranks, len(ranks), world
        self.slots: tuple[list[Any], list[Any]] = ([None] * self.size, [None] * self.size)
        self.messages: dict[tuple[int, int], deque[NDArray[Any]]] = {}  # (from, to) -> pending messages
        self._arrived = self._generation = 0

    def barrier(self, rank: int) -> None:
        condition = self.world.condition
        with condition:
            self.world.check(self.ranks[rank])
            self._arrived += 1
            if self._arrived == self.size:
                self._arrived, self._generation = 0, self._generation + 1
                condition.notify_all()
                return
            generation = self._generation
            whom = "the other workers in a collective operation"
            self.world.wait(self.ranks[rank], lambda: generation != self._generation, whom)


class ThreadCommunicator(Communicator):
    """Communicator for a worker thread. Each worker averages one slice of host arrays. For GPUs, see devices.py."""

    _on_devices: DeviceMeans | None

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(rank, group.size)
        self.group, self._turn = group, 0

    def split(self, color: int, key: int) -> Communicator:
        pairs = self._exchange((color, key))
        members = sorted((k, rank) for rank, (c, k) in enumerate(pairs) if c == color)
        ranks = [rank for _, rank in members]
        first = ranks[0] == self.rank
        new_group = ThreadGroup([self.group.ranks[rank] for rank in ranks], self.group.world) if first else None
        group = self._exchange(new_group)[ranks[0]]
        return self._adopt(ThreadCommunicator(group, ranks.index(self.rank)))

    def barrier(self) -> None:
        self.group.barrier(self.rank)

    def check(self) -> None:
        self.group.world.check(self.group.ranks[self.rank])

    def all_gather(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        self.traffic.all_gather(vector.nbytes, self.size)
        return [value.copy() for value in self._exchange(vector.copy(), "all_gather")]

    def send(self, array: Array, to: int) -> None:
        message, condition = np.array(self._backend.to_host(array)), self.group.world.condition  # a copy
        self.traffic.message(message.nbytes)
        with condition:
            self.group.messages.setdefault((self.rank, to), deque()).append(message)
            condition.notify_all()

    def recv(self, array: Array, source: int) -> None:
        world, ranks = self.group.world, self.group.ranks
        with world.condition:
            messages = self.group.messages.setdefault((source, self.rank), deque())
            world.wait(ranks[self.rank], lambda: bool(messages), f"worker {ranks[source]} in recv")
            message = messages.popleft()
        self._put(array, message)

    def _mean(self, hosts: list[NDArray[Any]], weight: float) -> None:
        contributions = self._exchange((hosts, weight), f"allreduce_mean of sizes {[len(host) for host in hosts]}")
        total = sum(w for _, w in contributions)
        if total > 0:
            shares = [w / total for _, w in contributions]
            # each worker averages one slice in place, summing in rank order
            for i, host in enumerate(hosts):
                start, stop = (len(host) * r // self.size for r in (self.rank, self.rank + 1))
                self._backend.mean_in_place([vectors[i][start:stop] for vectors, _ in contributions], shares)
        self.barrier()

    def _means_on_devices(self) -> DeviceMeans | None:
        return means_on_devices(self._exchange, self.rank, self._backend, self._reduce)

    def _exchange(self, value: Any, operation: str = "split") -> list[Any]:
        """Gather every worker's value by reference, in rank order. Raise ConfigError if their operations differ."""
        # double buffering: a slot is reused only after all workers have read it
        slots = self.group.slots[self._turn]
        self._turn = 1 - self._turn
        slots[self.rank] = operation, value
        self.barrier()
        operations, values = zip(*slots, strict=True)
        if len(set(operations)) > 1:
            calls = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(operations))
            raise ConfigError(f"workers must make the same calls in the same order, but their calls differ ({calls})")
        return list(values)
