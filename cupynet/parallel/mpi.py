"""Workers that are processes, on one machine or on several, connected by MPI. The only file that imports mpi4py.

Nobody waits for ever: every call is started without blocking and then asked for, and while one waits one hears of
others that failed. Data move as bytes between one worker and each other; so a worker that does not come can be named,
and means are summed in rank order, chunk by chunk: the same bits as in threads. (MPI's own collectives promise no
order. Where hundreds of workers exchange small numbers, its trees would need fewer messages.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend, create_backend
from cupynet.backend.array import Array
from cupynet.checks import one_line
from cupynet.errors import ConfigError
from cupynet.parallel.communicator import Communicator, SerialCommunicator, Traffic, same_form
from cupynet.parallel.devices import RankMeans, means_of_ranks
from cupynet.parallel.team import RankTeam, Requests

TOGETHER, LETTER = 1, 2  # tags: what all workers of a group do together, and messages from one to another
FORM_BYTES = 64  # of the note before each message that says what it is


@cache
def library() -> Any:
    """The module mpi4py.MPI; this starts MPI, which waits for all ranks.

    ConfigError where it is missing, or is for one thread at a time: a thread of its own sends what others wait for.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"launcher=mpi: MPI cannot be used ({one_line(error)}): install it with pip install 'cupynet[mpi]', "
            "or mpi4py for the MPI of this machine"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            "launcher=mpi: this MPI lets one thread at a time call it, and two do: take one that was built for "
            "several (MPI_THREAD_MULTIPLE), such as that of pip install 'cupynet[mpi]'"
        )
    return MPI


class MpiCommunicator(Communicator):
    """A worker that is a process.

    Averages of arrays on the host are computed there, each worker its own part; those of arrays on GPUs over NCCL where
    each process has one of its own, see devices.py, else on the host too.

    Args:
        comm: the workers of this group, as mpi4py has them.
        team: what they share with all others.
        names: the ranks of the group's workers among all, in order; all of them by default.
    """

    def __init__(
        self,
        comm: Any,
        team: RankTeam,
        names: Sequence[int] | None = None,
        backend: Backend | None = None,
        traffic: Traffic | None = None,
        reduce: str = "auto",
    ) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.traffic = Traffic() if traffic is None else traffic
        self.team = team
        self._comm, self._names = comm, list(range(self.size)) if names is None else list(names)
        self._backend: Backend = create_backend("numpy", "double") if backend is None else backend
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._scratch: dict[tuple[int, int, str], NDArray[Any]] = {}
        self._reduce, self._decided = reduce, False
        self._on_devices: RankMeans | None = None
        self._groups: list[MpiCommunicator] = []

    def attach(self, backend: Backend, reduce: str = "auto") -> None:
        self._backend, self._reduce, self._decided = backend, reduce, False

    def close(self) -> None:
        for each in (*self._groups, self._on_devices):
            if each is not None:
                each.close()

    def split(self, color: int, key: int) -> Communicator:
        asked = self._gather(np.array([color, key], np.int64)).tolist()
        ranks = [rank for _, rank in sorted((k, rank) for rank, (c, k) in enumerate(asked) if c == color)]
        if len(ranks) == 1:
            return SerialCommunicator(self.traffic)
        names = tuple(self._names[rank] for rank in ranks)
        if names not in self.team.groups:  # MPI has some 2,000 of them and no more
            # it blocks; but everybody has just been here
            self.team.groups[names] = self._comm.Create_group(self._comm.Get_group().Incl(ranks))
        made = MpiCommunicator(self.team.groups[names], self.team, names, self._backend, self.traffic, self._reduce)
        self._groups.append(made)
        return made

    def barrier(self) -> None:
        self._gather(np.zeros(1, np.uint8))

    def check(self) -> None:
        self.team.check(self._names[self.rank])

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        self.traffic.all_gather(array.nbytes, self.size)
        return self._gather(array)

    def all_gather_ragged(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        self.traffic.all_gather(vector.nbytes, self.size)
        lengths = self._gather(np.array([len(vector)], np.int64))[:, 0].tolist()
        gathered = [np.empty(length, vector.dtype) for length in lengths]
        gathered[self.rank][...] = vector
        self._wait(self._exchange([vector] * self.size, gathered))
        return gathered

    def send(self, array: Array, to: int) -> None:
        host = self._backend.to_host(array)
        self.traffic.message(host.nbytes)
        letter, comm = self.team.outbox.copy(host), self._comm
        requests = [comm.Isend(_form(host), to, LETTER), comm.Isend(letter, to, LETTER)]
        self.team.outbox.send(requests, letter)

    def recv(self, array: Array, source: int) -> None:
        note = np.empty(FORM_BYTES, np.uint8)
        self._receive(note, source)
        name, *sides = note.tobytes().decode().split()
        form = name, tuple(int(side) for side in sides)
        direct = isinstance(array, np.ndarray) and array.flags.c_contiguous and (array.dtype.name, array.shape) == form
        letter = array if direct else np.empty(form[1], name)
        self._receive(letter, source)
        if not direct:
            self._put(array, same_form(array, letter))

    def broadcast(self, array: Array, root: int = 0) -> None:
        host = self._backend.to_host(array)
        requests = Requests(self.team.mpi)
        if self.rank == root:
            self.traffic.all_gather(host.nbytes, self.size)
            content = _bytes(np.ascontiguousarray(host))
            for rank in self._others:
                requests.add(self._comm.Isend(content, rank, TOGETHER), self._names[rank])
            self._wait(requests)
        else:
            received = np.empty(host.shape, host.dtype)
            requests.add(self._comm.Irecv(_bytes(received), root, TOGETHER), self._names[root], received.nbytes)
            self._wait(requests)
            self._put(array, received)

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        if not all(isinstance(array, np.ndarray) for array in arrays):
            if not self._decided:  # all ranks come by here together
                self._on_devices, self._decided = means_of_ranks(self, self._backend, self._reduce), True
            if self._on_devices is not None:
                self.traffic.all_reduce(sum(array.nbytes for array in arrays), self.size)
                self._on_devices.mean(arrays, weight)
                return
        hosts = [self._backend.to_host(array) for array in arrays]
        self.traffic.all_reduce(sum(host.nbytes for host in hosts), self.size)
        weights = np.zeros((self.size, 1))
        weights[self.rank] = weight
        arriving = self._exchange([weights[self.rank]] * self.size, list(weights))
        cuts = [[len(host) * rank // self.size for rank in range(self.size + 1)] for host in hosts]
        chunks = [
            [host[start:stop] for start, stop in zip(cut, cut[1:], strict=False)]
            for host, cut in zip(hosts, cuts, strict=True)
        ]
        # each worker does it for its own part of everybody's vectors, as threads do: the same bits
        parts = [self._parts(index, mine[self.rank]) for index, mine in enumerate(chunks)]
        moving = Requests(self.team.mpi)
        for mine, theirs in zip(chunks, parts, strict=True):
            self._exchange(mine, theirs, moving)
        self._wait(arriving)
        self._wait(moving, transfer=True)
        total = sum(weights[:, 0].tolist())
        if total > 0:
            shares, back = [w / total for w in weights[:, 0].tolist()], Requests(self.team.mpi)
            for mine, theirs in zip(chunks, parts, strict=True):
                self._backend.mean_in_place(theirs, shares)
                self._exchange([mine[self.rank]] * self.size, mine, back)
            self._wait(back, transfer=True)
        for array, host in zip(arrays, hosts, strict=True):
            if host is not array:
                self._put(array, host)

    def _parts(self, index: int, own: NDArray[Any]) -> list[NDArray[Any]]:
        """All workers' contributions to this one's part of vector `index`: the others' in memory that is kept here."""
        key = index, len(own), own.dtype.str
        if key not in self._scratch:
            self._scratch[key] = np.empty((self.size, len(own)), own.dtype)
        parts = list(self._scratch[key])
        parts[self.rank] = own
        return parts

    # moving bytes ---------------------------------------------------------------------------------------------------

    def _exchange(
        self, sent: list[NDArray[Any]], received: list[NDArray[Any]], requests: Requests | None = None
    ) -> Requests:
        """Start to send each other worker its array of `sent`, and to receive its array of `received`."""
        requests = Requests(self.team.mpi) if requests is None else requests
        for rank in reversed(self._others):
            into = _bytes(received[rank])
            requests.add(self._comm.Irecv(into, rank, TOGETHER), self._names[rank], into.nbytes)
        for rank in self._others:
            requests.add(self._comm.Isend(_bytes(sent[rank]), rank, TOGETHER), self._names[rank])
        return requests

    def _gather(self, array: NDArray[Any]) -> NDArray[Any]:
        gathered = np.empty((self.size, *array.shape), array.dtype)
        gathered[self.rank] = array
        self._wait(self._exchange([gathered[self.rank : self.rank + 1]] * self.size, list(gathered[:, None])))
        return gathered

    def _receive(self, into: NDArray[Any], source: int) -> None:
        requests, content = Requests(self.team.mpi), _bytes(into)
        requests.add(self._comm.Irecv(content, source, LETTER), self._names[source], content.nbytes)
        self._wait(requests)

    def _wait(self, requests: Requests, *, transfer: bool = False) -> None:
        self.team.wait(requests, self._names[self.rank], transfer=transfer)

    def _put(self, array: Array, host: Array) -> None:
        """Write an array of the host into one that is on the host or on this worker's device."""
        array[...] = host if isinstance(array, np.ndarray) else self._backend.asarray(host)


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The memory of a contiguous array."""
    if not array.flags.c_contiguous:
        raise RuntimeError(f"an array of shape {array.shape} and strides {array.strides} does not travel in one piece")
    return array.reshape(-1).view(np.uint8)


def _form(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The note that goes before a message: its dtype and shape as text."""
    text = " ".join([array.dtype.name, *map(str, array.shape)]).encode()
    return np.frombuffer(text.ljust(FORM_BYTES), np.uint8)
