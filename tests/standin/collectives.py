"""`cupy.cuda.nccl`: ranks in threads of one process that really wait for each other, and really compute.

Its names are those of CuPy 14.2 (cupy_backends/cuda/libs/nccl.pyx), which passes addresses and numbers on as they are.
Calls of different ranks are matched by their number: the third call of one rank with the third of all others. A call
returns before the other ranks have made theirs. The next operation on its stream waits for them, for at most
`Machine.patience_s`. If a rank never makes its call, because its device is lost or it has aborted, the host continues
and the stream is stuck: a host that waits for the stream waits until this rank aborts too. Every rank checks that all
have made the same call.

Two things that CuPy forgives are misuses here. In the first operation of a communicator NCCL may still connect, and
its kernels are loaded, for which memory is allocated: it must be one of a few numbers, asked for when nobody is in
anything else. And a communicator that is neither destroyed nor aborted is ended by its destructor, in whatever thread
the collector runs, maybe while others are in a collective.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupynet.backend.policy import stored_dtype
from tests.standin.errors import BadLaunch, CUDARuntimeError, Disagreement, InCapture, Misuse
from tests.standin.machine import Machine, Span, active
from tests.standin.order import Label, Line, label

DTYPES = {6: "float16", 7: "float32", 8: "float64", 9: "bfloat16"}
SUM = 0
CONSTANTS = {f"NCCL_{name.upper()}": number for number, name in DTYPES.items()} | {"NCCL_SUM": SUM}
VERSION, UNIQUE = 23203, 128
FEW = 16  # numbers, at most, of an operation that is there to connect
SEVERAL_ON_ONE = "NCCL_MULTI_RANK_GPU_ENABLE"
STATUS = {
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
}


class NcclError(RuntimeError):
    """What NCCL refuses."""

    def __init__(self, status: int, details: str = "") -> None:
        self.status = status
        super().__init__(STATUS[status] + (f": {details}" if details else ""))


@dataclass(eq=False)
class Ring:
    """What the ranks of one communicator share."""

    size: int
    devices: dict[int, int] = field(default_factory=dict)
    open: dict[int, Label] = field(default_factory=dict)  # where the open ends were made
    calls: dict[int, list[Call]] = field(default_factory=dict)  # by their number, until all ranks have made it
    gone: dict[int, str] = field(default_factory=dict)  # ranks that make no more calls, and why
    broken: Exception | None = None

    def never(self, machine: Machine, call: Call) -> str:
        """Return why a call can never end, or ""."""
        for rank in _missing(call, self):
            if machine.is_lost(self.devices[rank]):
                return f"rank {rank}, whose device is lost"
            if rank in self.gone:
                return f"rank {rank}, {self.gone[rank]}"
        return ""


@dataclass(eq=False)
class Call:
    """The call of a rank."""

    communicator: NcclCommunicator
    send: Span | None
    receive: Span | None
    form: tuple[int, str]  # what all ranks must agree on: count and dtype
    line: Line
    where: Label
    thread: threading.Thread
    over: bool = False
    error: Exception | None = None

    def settle(self, machine: Machine) -> None:
        """Wait until the call ends, and raise its error. If it cannot end, its line is stuck and the host continues."""
        ring = self.communicator._ring
        try:
            if ring is not None:
                machine.wait(
                    lambda: self.over or ring.broken is not None or ring.never(machine, self) != "",
                    lambda: f"{self} waits for ranks {_missing(self, ring)}",
                )
            if self.error is None and not self.over and ring is not None and ring.broken is not None:
                self.error = ring.broken
        except Misuse as misuse:
            self.error = misuse
        if self.error is not None:
            error, self.error = self.error, None
            self.end(machine)
            if isinstance(error, Misuse):
                machine.keep(error)
            raise error
        if not self.over and ring is not None:
            self.line.stuck = f"{self} waits for {ring.never(machine, self)}"
        self._leave(machine)

    def end(self, machine: Machine) -> None:
        """Mark the call as ended, with or without an error."""
        self.over, self.line.stuck = True, ""
        self._leave(machine)

    def _leave(self, machine: Machine) -> None:
        machine.waiting.pop(self, None)
        if self in self.line.pending:
            self.line.pending.remove(self)

    @property
    def rank(self) -> int:
        """Whose call it is."""
        return self.communicator.rank

    def __str__(self) -> str:
        return f"{self.where} of rank {self.rank} with {self.form}"


def get_unique_id() -> bytes:
    """The name of a communicator to be."""
    return os.urandom(UNIQUE)


def get_version() -> int:
    """2.32.3, as NCCL writes it."""
    return VERSION


class NcclCommunicator:
    """One rank's end, on the device that is current; waits until all ranks have come."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        machine = active()
        if len(commId) != UNIQUE:
            raise ValueError(f"commId length {len(commId)} != {UNIQUE}.")
        if not 0 <= rank < ndev:
            raise NcclError(4, f"rank {rank} of {ndev}")
        self.rank, self._count = rank, 0
        self._ring: Ring | None = None
        self._calls: list[Call] = []  # of this rank, not yet ended at the last call
        with machine.lock:
            rings = machine.rings
            ring = rings.setdefault(commId, Ring(ndev))
            if ring.size != ndev or rank in ring.devices:
                ring.broken = Disagreement(f"rank {rank} of {ndev} comes to {sorted(ring.devices)} of {ring.size}")
            elif machine.seat.device in ring.devices.values() and os.environ.get(SEVERAL_ON_ONE) != "1":
                ring.broken = NcclError(5, f"Duplicate GPU detected : rank {rank} on device {machine.seat.device}")
            ring.devices[rank] = self._device = machine.seat.device
            machine.changed.notify_all()
            machine.wait(
                lambda: len(ring.devices) == ring.size or ring.broken is not None,
                lambda: f"rank {rank} waits in NcclCommunicator, and of {ndev} only {sorted(ring.devices)} have come",
            )
            if ring.broken is not None:
                raise ring.broken
            self._ring = ring
            ring.open[rank] = label("NcclCommunicator")

    def destroy(self) -> None:
        """End the communicator; later calls are refused."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.open.pop(self.rank, None)

    def abort(self) -> None:
        """End this rank's part and its calls on the device. The other ranks keep waiting."""
        ring, self._ring = self._ring, None
        if ring is not None:
            machine = active()
            with machine.lock:
                ring.open.pop(self.rank, None)
                ring.gone[self.rank] = "which has aborted"
                for call in self._calls:
                    call.end(machine)
                self._calls.clear()
                machine.changed.notify_all()

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """recv = the sum of all ranks' send."""
        machine, ring = active(), self._own()
        where = label("nccl.allReduce")
        if datatype not in DTYPES or op != SUM:
            raise NcclError(4, f"datatype {datatype}, operation {op}: here floats of 16, 32 and 64 bits are added up")
        dtype = stored_dtype(DTYPES[datatype])
        with machine.lock:
            line = self._line(machine, stream, where)
            if not self._count and count > FEW:
                misuse = Misuse(f"{where} of {count} numbers is the first of its communicator: warm it up")
                machine.keep(misuse)
                raise misuse
            spans = [self._span(machine, address, count, dtype, where) for address in (sendbuf, recvbuf)]
            self._alone(machine, ring)
            self._submit(machine, Call(self, *spans, (count, dtype.name), line, where, threading.current_thread()))

    def _own(self) -> Ring:
        if self._ring is None:
            raise NcclError(4, "the communicator was destroyed")
        return self._ring

    def _line(self, machine: Machine, stream: int, where: Label) -> Line:
        """The stream with that address, which must be of this end's device and capture nothing."""
        try:
            machine.check_device(self._device)
        except CUDARuntimeError as error:
            raise NcclError(1) from error
        line = machine.line_at(stream, self._device)
        if line.device != self._device:
            raise NcclError(4, f"{line} is of device {line.device}, the communicator of {self._device}")
        if line.capture is not None:
            raise InCapture(f"{where} while {line} captures: NCCL's manual advises against it")
        return line

    def _span(self, machine: Machine, address: int, count: int, dtype: Any, where: Label) -> Span | None:
        if not isinstance(address, (int, np.integer)):
            raise TypeError(f"{where} takes an address, array.data.ptr, not {address!r:.60}")
        if not address or not count:
            return None
        chunk, offset = machine.block(int(address), count * dtype.itemsize, self._device, str(where))
        if chunk.dtype is not None and chunk.dtype != dtype:
            raise BadLaunch(f"{where} is called for {dtype} with {chunk}, which is {chunk.dtype}")
        return Span(chunk, chunk.memory[offset : offset + count * dtype.itemsize].view(dtype))

    def _alone(self, machine: Machine, ring: Ring) -> None:
        """Refuse a second thread."""
        if any(not call.over and call.thread is not threading.current_thread() for call in self._calls):
            misuse = Misuse("one communicator is used by two threads at once")
            machine.keep(misuse)
            ring.broken = misuse
            machine.changed.notify_all()
            raise misuse

    def _submit(self, machine: Machine, call: Call) -> None:
        """Register a call, and execute it if all ranks have made it."""
        try:
            self._calls = [each for each in self._calls if not each.over]
            _post(machine, self._own(), call)
            if call.error is not None:
                raise call.error
        except Misuse as misuse:
            machine.keep(misuse)
            raise


def all_ended(machine: Machine) -> None:
    """Keep as misuses the communicators that were neither destroyed nor aborted."""
    with machine.lock:
        for ring in machine.rings.values():
            for rank, where in sorted(ring.open.items()):
                machine.keep(Misuse(f"{where} of rank {rank} of {ring.size} was neither destroyed nor aborted"))


def _missing(call: Call, ring: Ring) -> list[int]:
    """Return the ranks that have not made this call."""
    there = [each.rank for calls in ring.calls.values() if call in calls for each in calls]
    return sorted(set(range(ring.size)) - set(there))


def _post(machine: Machine, ring: Ring, call: Call) -> None:
    """Make a call known; do it, if with it all are there."""
    communicator = call.communicator
    if ring.broken is not None:
        raise ring.broken
    calls = ring.calls.setdefault(communicator._count, [])
    calls.append(call)
    communicator._calls.append(call)
    communicator._count += 1
    if len(calls) == ring.size:
        del ring.calls[communicator._count - 1]
        _do(machine, ring, sorted(calls, key=lambda each: each.rank))
        return
    call.line.pending.append(call)
    machine.waiting[call] = str(call)
    machine.changed.notify_all()


def _do(machine: Machine, ring: Ring, calls: list[Call]) -> None:
    """All ranks' calls are there: compute, in rank order."""
    try:
        if len({call.form for call in calls}) > 1:
            text = "; ".join(map(str, calls))
            raise Disagreement(f"the ranks do not make the same call: {text}")
        accesses = []
        for call in calls:
            machine.reach(call.line)
            accesses.append(machine.tick(call.line, call.where))
        for call, access in zip(calls, accesses, strict=True):
            if call.send is not None:
                call.send.chunk.usable(call.where)
                call.send.chunk.read(call.send.bytes, access, machine)
                call.send.chunk.all_read(call.send.view, call.where)
        total = _total(calls)
        for call, access in zip(calls, accesses, strict=True):
            if call.receive is not None:
                call.receive.chunk.usable(call.where)
                call.receive.chunk.write(call.receive.bytes, access, machine)
                call.receive.view[...] = total
                call.receive.chunk.all_written(call.receive.view)
        _join(calls)
    except Exception as error:
        ring.broken = error
        for call in calls:
            call.error = error
    for call in calls:
        call.over = True
        machine.waiting.pop(call, None)
        if call.error is None:
            call.end(machine)
    machine.changed.notify_all()


def _total(calls: list[Call]) -> Any:
    """The sum of what all have sent."""
    total: Any = 0
    with np.errstate(all="ignore"):
        for i, call in enumerate(calls):
            if call.send is not None:
                total = total + call.send.view if i else np.array(call.send.view)
    return total


def _join(calls: list[Call]) -> None:
    """What comes next on a rank that has received comes after what all that have sent did before (not: after this)."""
    clocks = [{**call.line.clock, call.line.key: call.line.count - 1} for call in calls if call.send is not None]
    for call in calls:
        if call.receive is not None:
            for clock in clocks:
                call.line.join(clock)
