"""Communicator for MPI processes. This is the only file that imports mpi4py.

A blocking MPI call delays Python's signal handlers and cannot be interrupted, so operations are non-blocking and
completed by `Ranks.wait`; only the creation of a group blocks, briefly. Means are summed in rank order, chunk by chunk,
so that they are bit-identical to the results in threads.py.

Arrays are exchanged with Isend and Irecv, because non-blocking collectives of MPICH took two to ten times as long.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.core.wording import one_line
from cupynet.parallel.communicators.base import Communicator, PeerFailed, SerialCommunicator, Timeout, timed_out
from cupynet.parallel.communicators.devices import RankMeans, means_of_ranks

GRACE_S = 30.0  # time for the other ranks to notice a failure, save their work and exit
SPIN_S = 0.0001  # a waiting rank yields its core for this long before it sleeps
LONGEST_PAUSE_S = 0.001  # longest sleep between two tests of the requests
TRANSFER_PAUSE_S = 0.00005  # during transfers, shorter because MPI makes progress only inside MPI calls
MESSAGE, EXCHANGE = 1, 2  # message tags
RUNNING, ENDED = -2, -1  # states of a rank that has not failed


@cache
def library() -> Any:
    """Import mpi4py.MPI, which starts MPI and waits for all ranks. Raise ConfigError if mpi4py or MPI is missing."""
    try:
        with warnings.catch_warnings():  # about the launcher of another MPI, for which `job` raises an error
            warnings.filterwarnings("ignore", "suspicious MPI", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"MPI is not available ({one_line(error)}). Install it with pip install 'cupynet[mpi]', or build mpi4py "
            "for the MPI of this machine",
            setting="launcher",
            value="mpi",
        ) from error
    return MPI


class Ranks:
    """Waits for MPI requests, and detects ranks that have failed or ended.

    comm: a communicator for all ranks, used only by this object.

    Attributes:
        codes: for each rank, `RUNNING`, `ENDED` or, after a failure, its exit code.
        groups: communicators by members. Each is created only once, because MPI supports only about 2,000.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi, self.rank, self.size = mpi, comm.Get_rank(), comm.Get_size()
        self.timeout_s = 300.0
        self.codes = np.full(self.size, RUNNING)
        self.groups: dict[tuple[int, ...], Any] = {}
        self._comm = comm
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        self._receiving = [comm.Irecv(self.codes[rank : rank + 1], rank) for rank in self._others]
        self._sending: list[Any] = []
        self._waiting: Sequence[Any] = ()

    def announce(self, code: int) -> None:
        """Notify the other ranks, only once, that this rank failed with exit code `code` or has `ENDED`."""
        if self.codes[self.rank] == RUNNING:
            self.codes[self.rank] = code
            with suppress(self.mpi.Exception):  # there is no connection
                self._sending = [self._comm.Isend(np.array([code]), rank) for rank in self._others]

    def first_failed(self) -> int | None:
        with suppress(self.mpi.Exception):  # there is no connection
            self.mpi.Request.Testsome(self._receiving)
        return next((rank for rank, code in enumerate(self.codes.tolist()) if code >= 0), None)

    def check(self) -> None:
        """Raise PeerFailed if a rank has failed."""
        first = self.first_failed()
        if first is not None:
            error = PeerFailed(f"worker {self.rank} stopped because worker {first} failed")
            error.exit_code = int(self.codes[first])
            raise error

    def wait(self, requests: Sequence[Any], whom: str, pause_s: float = LONGEST_PAUSE_S) -> None:
        """Wait until all requests are complete, or raise PeerFailed or a WorkerTimeout that names `whom`."""
        started, timeout = time.perf_counter(), Timeout(self.timeout_s)
        self._waiting = requests  # also kept after an error, because MPI may still write to their buffers
        while True:
            for _ in range(10):
                if self.mpi.Request.Testall(requests):
                    return
                waited = time.perf_counter() - started
                if waited < SPIN_S:
                    os.sched_yield()
                else:
                    time.sleep(min(waited / 8, pause_s))
            self.check()
            if timeout.expired():
                raise timed_out(self.rank, self.timeout_s, whom)

    def end(self) -> bool:
        """Wait until all ranks have ended or failed. Return False after `timeout_s`, or `GRACE_S` after a failure."""
        timeout, grace = Timeout(self.timeout_s), Timeout(GRACE_S)
        self.announce(ENDED)
        try:
            while not self.mpi.Request.Testall([*self._receiving, *self._sending]):
                failed = self.first_failed() is not None
                if (failed and grace.expired()) or timeout.expired():
                    return False
                time.sleep(LONGEST_PAUSE_S)
        except self.mpi.Exception:  # there is no connection
            return False
        return True


class MpiCommunicator(Communicator):
    """Communicator for an MPI process. `members` are ranks in the job, by default all. For GPUs, see devices.py."""

    def __init__(self, comm: Any, ranks: Ranks, members: Sequence[int] | None = None) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm, self._ranks = comm, ranks
        self._members = list(range(self.size)) if members is None else list(members)
        self._sending: deque[Any] = deque()
        self._scratch: dict[tuple[int, int, str], NDArray[Any]] = {}

    def split(self, color: int, key: int) -> Communicator:
        pairs = self._gather(np.array([color, key]), "split").tolist()
        group_ranks = [rank for _, rank in sorted((k, rank) for rank, (c, k) in enumerate(pairs) if c == color)]
        if len(group_ranks) == 1:
            return self._adopt(SerialCommunicator())
        members = tuple(self._members[rank] for rank in group_ranks)
        groups = self._ranks.groups
        if members not in groups:  # blocks only briefly, because all workers have just arrived
            groups[members] = self._comm.Create_group(self._comm.Get_group().Incl(group_ranks))
        return self._adopt(MpiCommunicator(groups[members], self._ranks, members))

    def check(self) -> None:
        self._ranks.check()

    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        numbers = np.array(values, np.float64)
        self.traffic.all_gather(numbers.nbytes, self.size)
        return self._gather(numbers, "gather_numbers")

    def all_gather(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        self.traffic.all_gather(vector.nbytes, self.size)
        lengths = self._gather(np.array([len(vector)]), "all_gather")[:, 0].tolist()
        gathered = [np.empty(length, vector.dtype) for length in lengths]
        gathered[self.rank][...] = vector
        self._wait("all_gather", self._exchange([vector] * self.size, gathered), TRANSFER_PAUSE_S)
        return gathered

    def send(self, array: Array, to: int) -> None:
        content = _bytes(np.array(self._backend.to_host(array), order="C"))  # a copy, because the array may be reused
        self.traffic.message(content.nbytes)
        self._sending.append(self._comm.Isend(content, to, MESSAGE))
        while self._sending and self._sending[0].Test():
            self._sending.popleft()

    def recv(self, array: Array, source: int) -> None:
        direct = isinstance(array, np.ndarray) and array.flags.c_contiguous
        content = array if direct else np.empty(array.shape, array.dtype)
        request = self._comm.Irecv(_bytes(content), source, MESSAGE)
        self._ranks.wait([request], f"worker {self._members[source]} in recv")
        if not direct:
            self._put(array, content)

    def _mean(self, hosts: list[NDArray[Any]], weight: float) -> None:
        weights = np.full((self.size, 1), float(weight))
        weight_requests = self._exchange([weights[self.rank]] * self.size, list(weights))
        # reduce-scatter by chunks, summed in rank order as in threads.py, so that results are bit-identical
        chunks = [self._chunks(host) for host in hosts]
        parts = [self._parts(index, chunk[self.rank]) for index, chunk in enumerate(chunks)]
        chunk_requests = [request for pair in zip(chunks, parts, strict=True) for request in self._exchange(*pair)]
        self._wait("allreduce_mean", weight_requests)
        self._wait("allreduce_mean", chunk_requests, TRANSFER_PAUSE_S)
        total = sum(weights[:, 0].tolist())
        if total > 0:
            shares, chunk_requests = [item / total for item in weights[:, 0].tolist()], []
            for chunk, parts_of_chunk in zip(chunks, parts, strict=True):
                self._backend.mean_in_place(parts_of_chunk, shares)
                chunk_requests += self._exchange([chunk[self.rank]] * self.size, chunk)
            self._wait("allreduce_mean", chunk_requests, TRANSFER_PAUSE_S)

    def _means_on_devices(self) -> RankMeans | None:
        return means_of_ranks(self, self._backend, self._reduce)

    def _chunks(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        return [vector[len(vector) * r // self.size : len(vector) * (r + 1) // self.size] for r in range(self.size)]

    def _parts(self, index: int, own: NDArray[Any]) -> list[NDArray[Any]]:
        """Return buffers for all workers' versions of this worker's chunk of vector `index`. Its own is `own`."""
        key = index, len(own), own.dtype.str
        if key not in self._scratch:
            self._scratch[key] = np.empty((self.size, len(own)), own.dtype)
        parts = list(self._scratch[key])
        parts[self.rank] = own
        return parts

    def _exchange(self, sent: list[NDArray[Any]], received: list[NDArray[Any]]) -> list[Any]:
        """Start sending `sent[rank]` to each other rank, and receiving from it into `received[rank]`."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        receiving = [self._comm.Irecv(_bytes(received[rank]), rank, EXCHANGE) for rank in reversed(others)]
        return [*receiving, *(self._comm.Isend(_bytes(sent[rank]), rank, EXCHANGE) for rank in others)]

    def _gather(self, array: NDArray[Any], operation: str) -> NDArray[Any]:
        """Gather arrays of the same shape and dtype from all workers: (size, ...)."""
        gathered = np.empty((self.size, *array.shape), array.dtype)
        gathered[self.rank] = array
        rows = [gathered[rank : rank + 1] for rank in range(self.size)]
        self._wait(operation, self._exchange([rows[self.rank]] * self.size, rows))
        return gathered

    def _wait(self, operation: str, requests: list[Any], pause_s: float = LONGEST_PAUSE_S) -> None:
        self._ranks.wait(requests, f"the other workers in {operation}", pause_s)


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    if not array.flags.c_contiguous:
        raise RuntimeError(f"array of shape {array.shape} with strides {array.strides} is not contiguous")
    return array.reshape(-1).view(np.uint8)
