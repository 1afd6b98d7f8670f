"""Workers that are processes, on one machine or on several, connected by MPI. The only file that imports mpi4py.

Nobody waits for ever: every call is started without blocking and then asked for, and while one waits one hears of others
that failed. Data move as bytes between one worker and each other; so a worker that does not come can be named, and means
are summed in rank order, chunk by chunk: the same bits as in threads. (MPI's own collectives promise no order. Where
hundreds of workers exchange small numbers, its trees would need fewer messages.)
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend, create_backend
from cupynet.backend.array import Array
from cupynet.checks import one_line
from cupynet.errors import ConfigError
from cupynet.parallel.communicator import (
    Communicator,
    PeerFailed,
    SerialCommunicator,
    Traffic,
    WorkerTimeout,
    same_form,
)

TOGETHER, LETTER = 1, 2  # tags: what all workers of a group do together, and messages from one to another
FORM_BYTES = 64  # of the note before each message that says what it is
START_S = 120.0  # how long MPI may take to bring all processes together
POLL_S = 0.0002  # between two looks at messages that are still on their way while this worker does other things


@cache
def library(several: bool) -> Any:
    """The module mpi4py.MPI; MPI itself is started by this. ConfigError where it is missing.

    several: others are started beside this process, and must come: should one of them have ended before it reached this
    point, MPI waits for it for ever. Then the process is ended after two minutes, with a traceback.
    """
    if several:
        faulthandler.dump_traceback_later(START_S, exit=True)  # works where Python itself stands still
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"launcher=mpi: MPI cannot be used ({one_line(error)}): install it with pip install 'cupynet[mpi]', "
            "or mpi4py for the MPI of this machine"
        ) from error
    finally:
        if several:
            faulthandler.cancel_dump_traceback_later()
    return MPI


# what all ranks have in common ----------------------------------------------------------------------------------------


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
    """

    def __init__(self, mpi: Any, world: Any) -> None:
        self.mpi, self.rank, self.size = mpi, world.Get_rank(), world.Get_size()
        self.timeout_s = 300.0
        self.ended: dict[int, tuple[Word, int]] = {}
        self.leaving: set[int] = set()
        self.outbox = Outbox(mpi)
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
        began = time.perf_counter()
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
            if waited > self.timeout_s:
                late = ", ".join(str(rank) for rank in requests.missing())
                raise WorkerTimeout(
                    f"worker {late} has not arrived where worker {name} waited for it for {self.timeout_s:g} s "
                    "and is taken for dead: raise timeout_s if it is only slow"
                )


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
        """Whether all are; RuntimeError where less was received than expected."""
        if not self._mpi.Request.Testall(self._requests, self._statuses):
            return False
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
                if not self._underway:
                    self._work.clear()
            if self._work.is_set():
                time.sleep(POLL_S)
            else:
                self._work.wait()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()


# one worker's end -----------------------------------------------------------------------------------------------------


class MpiCommunicator(Communicator):
    """A worker that is a process. Averages are computed in host memory, each worker its own part.

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
    ) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.traffic = Traffic() if traffic is None else traffic
        self.team = team
        self._comm, self._names = comm, list(range(self.size)) if names is None else list(names)
        self._backend: Backend = create_backend("numpy", "double") if backend is None else backend
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._scratch: dict[tuple[int, int, str], NDArray[Any]] = {}

    def attach(self, backend: Backend) -> None:
        self._backend = backend

    def split(self, color: int, key: int) -> Communicator:
        asked = self._gather(np.array([color, key], np.int64)).tolist()
        ranks = [rank for _, rank in sorted((k, rank) for rank, (c, k) in enumerate(asked) if c == color)]
        # it blocks; but everybody has just been here
        comm = self._comm.Split(ranks[0], ranks.index(self.rank))
        if len(ranks) == 1:
            comm.Free()
            return SerialCommunicator(self.traffic)
        names = [self._names[rank] for rank in ranks]
        return MpiCommunicator(comm, self.team, names, self._backend, self.traffic)

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
        """Where all workers' contributions to this one's part of vector `index` are: the others' in memory kept here."""
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
