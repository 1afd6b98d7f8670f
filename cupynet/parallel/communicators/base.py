"""The communicator interface, modeled on MPI, and the communicator of a single worker.

All workers must make the same calls in the same order. Only arrays and numbers are transferred, because workers may run
in different processes or on different machines. Sums on the host are computed in rank order, so results do not depend
on timing; for sums on GPUs, see devices.py.
"""

from __future__ import annotations

import json
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

POLL_S = 0.1  # polling interval in seconds


class PeerFailed(CupynetError):
    """Raised if another worker has failed. The failed worker reports its own error."""


class WorkerTimeout(CupynetError):
    """Raised if another worker does not reach a collective operation in time."""


class Timeout:
    """Timeout of a polling loop. Time during which the process is suspended (Ctrl-Z) does not count."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._last = time.monotonic()

    def expired(self) -> bool:
        """Return True if the time is up. Call it in every iteration of the loop."""
        now = time.monotonic()
        self._left_s -= min(now - self._last, POLL_S)
        self._last = now
        return self._left_s <= 0


def timed_out(rank: int, seconds: float, whom: str) -> WorkerTimeout:
    return WorkerTimeout(
        f"worker {rank} waited {seconds:g} s for {whom}. "
        f"If nothing is stuck, increase {setting('parallel', 'timeout_s')}"
    )


@dataclass
class Traffic:
    """Bytes sent by one worker, including small arrays (counts, flags).

    Threads are counted as if they sent messages, and an all-reduce as if it were bandwidth-optimal.
    """

    bytes_sent: int = 0

    def all_reduce(self, nbytes: int, workers: int) -> None:
        """Count an all-reduce of `nbytes`: 2 (W - 1) / W · nbytes."""
        self.bytes_sent += 2 * (workers - 1) * nbytes // workers

    def all_gather(self, nbytes: int, workers: int) -> None:
        """Count `nbytes` sent to every other worker."""
        self.bytes_sent += (workers - 1) * nbytes

    def message(self, nbytes: int) -> None:
        """Count a message to one worker."""
        self.bytes_sent += nbytes

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager that excludes traffic from the count."""
        sent = self.bytes_sent
        yield
        self.bytes_sent = sent


class Communicator:
    """Connects one worker to the others. Subclasses implement `split`, `all_gather`, `send`, `recv` and `_mean`.

    traffic: bytes sent through this communicator and the communicators split from it.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.traffic = rank, size, Traffic()
        self._groups: list[Communicator] = []  # created by `split`
        self.attach(create_backend("numpy", "double"))

    def attach(self, backend: Backend, reduce: str = "auto") -> None:
        """Bind the backend of this worker's arrays. Until then, only host arrays can be exchanged.

        reduce: how arrays on GPUs are averaged, one of `shared_options.REDUCES`.
        """
        self._backend, self._reduce = backend, reduce
        self._on_devices: Any = None  # averages arrays on GPUs (see devices.py); None to average on the host
        self._decided = False  # True if `_on_devices` is final

    def close(self) -> None:
        """Destroy the NCCL communicators. Collective: all workers must call this, each in its own thread."""
        for part in (*self._groups, self._on_devices):
            if part is not None:
                part.close()

    def abandon(self) -> None:
        """Abort NCCL after a failure. Any thread may call this, because the worker may be waiting for its device."""
        for part in (*self._groups, self._on_devices):
            if part is not None:
                part.abandon()

    def split(self, color: int, key: int) -> Communicator:
        """Return a communicator for workers of one color, ordered by key, then by rank. All workers must call this."""
        raise NotImplementedError

    def _adopt(self, group: Communicator) -> Communicator:
        """Give a group created by `split` the traffic counter and backend of this communicator."""
        group.traffic = self.traffic
        group.attach(self._backend, self._reduce)
        self._groups.append(group)
        return group

    def barrier(self) -> None:
        """Wait until every worker has called this."""
        self.gather_numbers()

    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        """Gather numbers, such as counts, flags or losses, from all workers: (size, len(values)), in rank order."""
        return np.stack(self.all_gather(np.array(values, np.float64)))

    def all_gather(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        """Gather host vectors (n_rank,) of one dtype from all workers, in rank order. Lengths may differ."""
        raise NotImplementedError

    def gather_json(self, value: Any) -> list[Any]:
        """Gather values, such as strings, from all workers as JSON, in rank order."""
        texts = self.all_gather(np.frombuffer(json.dumps(value).encode(), np.uint8))
        return [json.loads(text.tobytes()) for text in texts]

    def send(self, array: Array, to: int) -> None:
        """Send `array`, on the host or on this worker's device, to worker `to`.

        This returns immediately. The array may be reused, and two workers may send to each other before they receive.
        """
        raise NotImplementedError

    def recv(self, array: Array, source: int) -> None:
        """Receive the next message from worker `source` into `array`, which must have the message's shape and dtype."""
        raise NotImplementedError

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Overwrite `array`, on the host or on this worker's device, with root's array."""
        if self.rank != root:
            self.recv(array, root)
            return
        for rank in range(self.size):
            if rank != root:
                self.send(array, rank)

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        """Overwrite each array with the weighted mean over the workers.

        mean = sum_r (weight_r / sum of weights) · array_r, on the host in rank order. A worker with weight 0 receives
        the mean but does not contribute, even if its arrays are NaN. If all weights are 0, the arrays do not change.

        Args:
            arrays: contiguous flat vectors, on the host or on this worker's device, with the same shapes on every
                worker.
            weight: weight of this worker, at least 0, such as its number of samples.
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
        """Raise `PeerFailed` if another worker has failed."""

    def _mean(self, hosts: list[NDArray[Any]], weight: float) -> None:
        raise NotImplementedError

    def _means_on_devices(self) -> Any:
        """Return the object that averages arrays on GPUs, or None to average on the host. Collective."""

    def _put(self, array: Array, host: Array) -> None:
        array[...] = host if isinstance(array, np.ndarray) else self._backend.asarray(host)


class SerialCommunicator(Communicator):
    """The communicator of a single worker."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def split(self, color: int, key: int) -> Communicator:
        return self._adopt(SerialCommunicator())

    def all_gather(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        return [vector.copy()]

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        pass


@dataclass(frozen=True)
class Groups:
    """The process groups of a worker.

    Attributes:
        world: all workers of the run. If one fails, all stop.
        replicas: data-parallel group: the workers that train and average the same layers.
        stages: pipeline group: the workers of one replica, in stage order.
    """

    world: Communicator
    replicas: Communicator
    stages: Communicator

    @classmethod
    def of(cls, world: Communicator | None = None) -> Groups:
        """Create groups in which every worker is a replica. `world` is None for a single worker."""
        world = SerialCommunicator() if world is None else world
        return cls(world, replicas=world, stages=SerialCommunicator())

    @classmethod
    def grid(cls, world: Communicator, stages: int) -> Groups:
        """Create groups with `stages` workers per replica. Collective.

        Worker r is stage r % stages of replica r // stages. The number of workers must be a multiple of `stages`.
        """
        if stages == 1:
            return cls.of(world)
        replica, stage = divmod(world.rank, stages)
        return cls(world, replicas=world.split(stage, replica), stages=world.split(replica, stage))
