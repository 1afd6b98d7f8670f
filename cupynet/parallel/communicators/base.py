"""The interface of communicators: every worker runs the same code, only its communicator differs.

Methods have MPI's names and move arrays and numbers, never objects: a worker may be a thread, a process or another
machine. All workers make the same calls in the same order. Sums are computed in rank order, so results do not depend on
timing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend, create_backend
from cupynet.backend.array import Array
from cupynet.core.errors import CupynetError
from cupynet.core.wording import setting

LOOK_S = 0.1  # between two tests of a timeout; longer gaps count as this much
REDUCES = ("auto", "nccl", "device", "host")  # where means of arrays on devices are computed


class PeerFailed(CupynetError):
    """Another worker failed, so this one stops. The error of the failed worker is shown."""


class WorkerTimeout(CupynetError):
    """A worker did not arrive where the others waited for it."""


class Timeout:
    """A timeout for a worker that polls.

    A gap between two tests counts for at most `LOOK_S`: while a process was stopped (Ctrl-Z), it did not wait, and the
    others had no time to arrive.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._last = time.monotonic()

    def expired(self) -> bool:
        """Return True if the time is up. Call it at every test."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, LOOK_S)
        self._last = now
        return self._left_s <= 0


def timed_out(rank: int, seconds: float, whom: str) -> WorkerTimeout:
    """Return the error of a worker that waited `seconds` for `whom`."""
    return WorkerTimeout(
        f"worker {rank} waited {seconds:g} s for {whom}. "
        f"If the other workers are only slow, raise {setting('parallel', 'timeout_s')}"
    )


@dataclass
class Traffic:
    """The bytes that one worker has sent, counted in the same way for threads, which share memory.

    An all-reduce of n bytes is counted as bandwidth-optimal algorithms send it. Small arrays (counts, flags) count too.
    """

    bytes_sent: int = 0

    def all_reduce(self, nbytes: int, workers: int) -> None:
        """Count an all-reduce of `nbytes`: 2 (W - 1) / W of them."""
        self.bytes_sent += 2 * (workers - 1) * nbytes // workers

    def all_gather(self, nbytes: int, workers: int) -> None:
        """Count `nbytes` sent to each other worker."""
        self.bytes_sent += (workers - 1) * nbytes

    def message(self, nbytes: int) -> None:
        """Count a message to one other worker."""
        self.bytes_sent += nbytes

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what is sent meanwhile: the figure is of what training sends."""
        sent = self.bytes_sent
        yield
        self.bytes_sent = sent


class Communicator:
    """Connects one worker to the others.

    Subclasses implement `split`, `all_gather`, `send`, `recv` and `_mean`.

    Args:
        rank: the worker's number, from 0.
        size: the number of workers.

    Attributes:
        traffic: what this worker has sent through this communicator and those split from it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.traffic = rank, size, Traffic()
        self._groups: list[Communicator] = []  # made by `split`
        self.attach(create_backend("numpy", "double"))

    def attach(self, backend: Backend, reduce: str = "auto") -> None:
        """Set the backend of this worker's arrays, which copies them to the host and back and computes means.

        Before this call only arrays on the host can be exchanged.

        reduce: where means of arrays on a device are computed, one of `REDUCES`.
        """
        self._backend, self._reduce = backend, reduce
        self._on_devices: Any = None  # see devices.py
        self._decided = False  # True if `_on_devices` is known

    def close(self) -> None:
        """Release NCCL and buffers on devices. All workers call it, each in its own thread, or none."""
        for each in (*self._groups, self._on_devices):
            if each is not None:
                each.close()

    def abandon(self) -> None:
        """Abort NCCL after a failure. Any thread may call it: the worker may be waiting for its device."""
        for each in (*self._groups, self._on_devices):
            if each is not None:
                each.abandon()

    def split(self, color: int, key: int) -> Communicator:
        """Return a communicator of the workers with the same color, ordered by key, then by rank here.

        All workers call it. The new communicator is attached to the same backend.
        """
        raise NotImplementedError

    def _adopt(self, group: Communicator) -> Communicator:
        """Return a new group of `split`, with the traffic and the backend of this communicator."""
        group.traffic = self.traffic
        group.attach(self._backend, self._reduce)
        self._groups.append(group)
        return group

    def barrier(self) -> None:
        """Wait until every worker has called this."""
        self.gather_numbers()

    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        """Return the numbers of all workers in rank order, (size, len(values)): counts, flags, losses."""
        return np.stack(self.all_gather(np.array(values, np.float64)))

    def all_gather(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the vectors (n_rank,) of all workers in rank order.

        vector: on the host, of the same dtype on every worker; the lengths may differ.
        """
        raise NotImplementedError

    def send(self, array: Array, to: int) -> None:
        """Send `array`, on the host or on this worker's device, to worker `to`.

        Returns at once: the array may be changed, and two workers may send to each other before they receive.
        """
        raise NotImplementedError

    def recv(self, array: Array, source: int) -> None:
        """Overwrite `array` with the next message of worker `source`, of the same shape and dtype.

        Messages from one worker to another arrive in order.
        """
        raise NotImplementedError

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Overwrite `array`, on the host or on this worker's device, with root's, in place."""
        if self.rank != root:
            self.recv(array, root)
            return
        for rank in range(self.size):
            if rank != root:
                self.send(array, rank)

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        """Overwrite each array with the weighted mean over the workers, in place.

        mean = sum_r (weight_r / sum of weights) · array_r, in rank order. A worker of weight 0 adds nothing, not
        even a NaN, and receives the mean. If all weights are 0 nothing happens.

        Args:
            arrays: contiguous flat vectors, the same shapes on every worker, on the host or on this worker's device.
            weight: of this worker, at least 0; for example its number of samples.
        """
        on_host = all(isinstance(array, np.ndarray) for array in arrays)
        if not on_host and not self._decided:
            self._on_devices, self._decided = self._means_on_devices(), True
        if not on_host and self._on_devices is not None:
            self.traffic.all_reduce(sum(array.nbytes for array in arrays), self.size)
            self._on_devices.mean(arrays, weight)
            return
        hosts = [self._backend.to_host(array) for array in arrays]
        self.traffic.all_reduce(sum(host.nbytes for host in hosts), self.size)
        self._mean(hosts, weight)
        for array, host in zip(arrays, hosts, strict=True):
            if host is not array:
                self._put(array, host)

    def check(self) -> None:
        """Raise `PeerFailed` if another worker has failed, or the error with which `Launcher.close` ends the task.

        Cheap enough for every round.
        """

    def _mean(self, hosts: list[NDArray[Any]], weight: float) -> None:
        """Compute the means of vectors on the host, see `allreduce_mean`."""
        raise NotImplementedError

    def _means_on_devices(self) -> Any:
        """Return what computes means on devices; None if the host does. All workers call it."""

    def _put(self, array: Array, host: Array) -> None:
        """Copy an array of the host into one on the host or on this worker's device."""
        array[...] = host if isinstance(array, np.ndarray) else self._backend.asarray(host)


class SerialCommunicator(Communicator):
    """The communicator of a single worker.

    Attributes:
        failure: raised by `check`; another thread sets it to end the worker's task.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.failure: BaseException | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def split(self, color: int, key: int) -> Communicator:
        return self._adopt(SerialCommunicator())

    def all_gather(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        return [vector.copy()]

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        pass


@dataclass(frozen=True)
class Groups:
    """The groups of a worker.

    Attributes:
        world: all workers of the run: they fail and stop together.
        replicas: workers with the same weights: batches are divided among them, and they are averaged.
        stages: workers that together hold one replica, in the order of its stages.
    """

    world: Communicator
    replicas: Communicator
    stages: Communicator

    @classmethod
    def of(cls, world: Communicator | None = None) -> Groups:
        """Return groups in which every worker is a whole replica; a single worker without a communicator."""
        world = SerialCommunicator() if world is None else world
        return cls(world, replicas=world, stages=SerialCommunicator())

    @classmethod
    def grid(cls, world: Communicator, stages: int) -> Groups:
        """Return groups of `stages` workers per replica: worker r is stage r % stages of replica r // stages.

        Every worker calls it. The number of workers is a multiple of `stages`.
        """
        if stages == 1:
            return cls.of(world)
        replica, stage = divmod(world.rank, stages)
        return cls(world, replicas=world.split(stage, replica), stages=world.split(replica, stage))
