"""How the workers of a run talk to each other. Every worker runs the same code; its communicator is the only
difference.

Methods carry MPI's names. Every worker makes the same calls in the same order. Sums are made in rank order, so the same
inputs give the same bits whatever the timing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from cupynet.backend.array import Array
from cupynet.errors import CupynetError

Mean: TypeAlias = Callable[[list[Array], list[float]], None]
T = TypeVar("T")


class PeerFailed(CupynetError):
    """Another worker failed; this one stops because of it. The failed worker's own error is the one that is shown."""


class WorkerTimeout(CupynetError):
    """A worker did not arrive where the others waited for it."""


class Communicator:
    """One worker's end of the connection.

    Attributes:
        rank: this worker's number, from 0.
        size: how many workers there are.
    """

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait until every worker is here."""
        raise NotImplementedError

    def all_gather(self, value: T) -> list[T]:
        """Every worker's value, in rank order, on every worker. For small things: counts, flags, losses."""
        raise NotImplementedError

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Overwrite `array` with root's, in place."""
        raise NotImplementedError

    def allreduce_mean(self, arrays: list[Array], weight: float, mean: Mean) -> None:
        """Overwrite each array with the weighted mean over the workers, in place.

        mean = sum_r (weight_r / sum of weights) · array_r, in rank order. A worker of weight 0 adds nothing, not
        even a NaN, and receives the mean. Where all weights are 0 nothing happens.

        Args:
            arrays: contiguous flat vectors, the same shapes on every worker.
            weight: of this worker, at least 0: the samples it has seen, say.
            mean: computes it, see `Backend.mean_in_place`.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise `PeerFailed` if another worker has failed; cheap, so that it can be asked at every iteration."""

    @property
    def stop_signal(self) -> int:
        """The number of the signal that asked this process to stop, 0 if none did."""
        return 0


class SerialCommunicator(Communicator):
    """One worker alone."""

    def __init__(self, stop_signal: Callable[[], int] = lambda: 0) -> None:
        self.rank, self.size = 0, 1
        self._stop_signal = stop_signal

    def barrier(self) -> None:
        pass

    def all_gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, array: Array, root: int = 0) -> None:
        pass

    def allreduce_mean(self, arrays: list[Array], weight: float, mean: Mean) -> None:
        pass

    @property
    def stop_signal(self) -> int:
        return self._stop_signal()


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
        self.stop_signal = 0
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
            "for dead: raise parallel.timeout_s if it is only slow"
        )

    def check(self, rank: int) -> None:
        """Raise PeerFailed if a worker has failed."""
        if self.failure is not None:
            raise PeerFailed(f"worker {rank} stops because worker {self.failed_rank} failed")


class ThreadCommunicator(Communicator):
    """A worker that is a thread of this process; arrays are handed over by reference, and are NumPy's.

    Args:
        group: what all of them share.
        rank: this one's number.
    """

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self._turn = 0

    def barrier(self) -> None:
        self.group.meet(self.rank)

    def check(self) -> None:
        if self.group.failure is not None:
            self.group.check(self.rank)

    @property
    def stop_signal(self) -> int:
        return self.group.stop_signal

    def all_gather(self, value: T) -> list[T]:
        # two sets of slots in turn: who writes one again has met everybody since they read it
        slots = self.group.slots[self._turn]
        self._turn = 1 - self._turn
        slots[self.rank] = value
        self.barrier()
        return list(slots)

    def broadcast(self, array: Array, root: int = 0) -> None:
        arrays = self.all_gather(array)
        if self.rank != root:
            array[...] = arrays[root]
        self.barrier()  # root does not change its array before all have copied it

    def allreduce_mean(self, arrays: list[Array], weight: float, mean: Mean) -> None:
        contributions = self.all_gather((arrays, weight))
        total = sum(w for _, w in contributions)
        if total > 0:
            shares = [w / total for _, w in contributions]
            # each worker does it for its own part of everybody's vectors: the work is shared, the bits are the same
            for i, array in enumerate(arrays):
                start, stop = (len(array) * r // self.size for r in (self.rank, self.rank + 1))
                mean([theirs[i][start:stop] for theirs, _ in contributions], shares)
        self.barrier()
