"""`cupy.cuda.nccl`: ranks in threads of one process that really wait for each other, and really compute.

A call is matched with the calls of the other ranks by its number: the third of one with the third of all. The calling
thread waits until all have come (a device would let the thread go and keep its stream waiting), for at most
`Machine.patience_s`. Every rank then checks that all have made the same call.

Two things that CuPy forgives are misuses here. In the first operation of a communicator NCCL may still connect, and
its kernels are loaded, for which memory is allocated: it must be one of a few numbers, asked for when nobody is in
anything else. And a communicator that is neither destroyed nor aborted is ended by its destructor, in whatever thread
the collector runs, maybe while others are in a collective.

The file is long (over 300 lines) because the calls, what they check and what they compute are read together.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import BadLaunch, CUDARuntimeError, Disagreement, InCapture, Misuse
from tests.standin.machine import Machine, Span, active
from tests.standin.order import Label, Line, label

DTYPES = {
    "INT8": (0, "int8"), "UINT8": (1, "uint8"), "INT32": (2, "int32"), "UINT32": (3, "uint32"), "INT64": (4, "int64"),
    "UINT64": (5, "uint64"), "FLOAT16": (6, "float16"), "FLOAT32": (7, "float32"), "FLOAT64": (8, "float64"),
}  # fmt: skip
OPERATIONS = {"SUM": (0, np.add), "PROD": (1, np.multiply), "MAX": (2, np.maximum), "MIN": (3, np.minimum)}
AVERAGE = 4
CONSTANTS = {f"NCCL_{name}": number for name, (number, _) in (*DTYPES.items(), *OPERATIONS.items())}
CONSTANTS |= {"NCCL_FLOAT": 7, "NCCL_DOUBLE": 8, "NCCL_HALF": 6, "NCCL_INT": 2, "NCCL_AVG": AVERAGE}
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
    open: dict[int, Label] = field(default_factory=dict)  # where the ends were made that nobody has ended yet
    calls: dict[int, list[Call]] = field(default_factory=dict)  # by their number, until all ranks have made it
    letters: dict[tuple[int, int], deque[Call]] = field(default_factory=dict)  # sends and receives without the other
    broken: Exception | None = None

    def lost(self, machine: Machine) -> bool:
        """Whether the device of one of the ranks has failed."""
        return any(map(machine.is_lost, self.devices.values()))


@dataclass(eq=False)
class Call:
    """What a rank has asked for."""

    communicator: NcclCommunicator
    kind: str
    send: Span | None
    receive: Span | None
    form: tuple[Any, ...]  # what all ranks must agree on: count, dtype, operation, root
    line: Line
    where: Label
    peer: int = -1
    over: bool = False
    error: Exception | None = None

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


def groupStart() -> None:
    """What this thread asks for from now on is done together, at `groupEnd`."""
    seat = active().seat
    if seat.group is not None:
        raise Misuse("groupStart in a group")
    seat.group = []


def groupEnd() -> None:
    """Do what was asked for since `groupStart`."""
    seat = active().seat
    if seat.group is None:
        raise NcclError(5, "groupEnd without groupStart")
    calls, seat.group = seat.group, None
    _submit(calls)


class NcclCommunicator:
    """One rank's end, on the device that is current; waits until all ranks have come."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        machine = active()
        if len(commId) != UNIQUE:
            raise ValueError(f"commId length {len(commId)} != {UNIQUE}.")
        if not 0 <= rank < ndev:
            raise NcclError(4, f"rank {rank} of {ndev}")
        self.rank, self._thread, self._count = rank, 0, 0
        self._ring: Ring | None = None
        self._stuck: list[Line] = []  # lines on which a call of this end waits for one that never comes
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

    def size(self) -> int:
        """How many ranks there are."""
        return self._own().size

    def rank_id(self) -> int:
        """This one's number."""
        self._own()
        return self.rank

    def device_id(self) -> int:
        """The device it is on."""
        self._own()
        return self._device

    def destroy(self) -> None:
        """The end; whatever is asked for afterwards is refused."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.open.pop(self.rank, None)

    def abort(self) -> None:
        """The end, of what others wait for in it too, and of what this end's device does."""
        ring, self._ring = self._ring, None
        if ring is not None:
            machine = active()
            with machine.lock:
                ring.open.pop(self.rank, None)
                for line in self._stuck:
                    line.stuck = ""
                ring.broken = NcclError(5, f"rank {self.rank} has aborted the communicator")
                machine.changed.notify_all()

    def check_async_error(self) -> None:
        """Raise what broke the communicator."""
        ring = self._own()
        if ring.broken is not None:
            raise ring.broken

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """recv = the sum, or another operation, of all ranks' send."""
        self._ask("allReduce", sendbuf, recvbuf, (count, count), datatype, stream, (op,))

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """On root: recv = the sum, or another operation, of all ranks' send."""
        self._ask("reduce", sendbuf, recvbuf if self.rank == root else 0, (count, count), datatype, stream, (op, root))

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """recv = root's send."""
        send = sendbuff if self.rank == root else 0
        self._ask("broadcast", send, recvbuff, (count, count), datatype, stream, (root,))

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """As `broadcast`, in place."""
        self.broadcast(buff, buff, count, datatype, root, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        """recv = all ranks' send, in rank order."""
        self._ask("allGather", sendbuf, recvbuf, (count, count * self._own().size), datatype, stream, ())

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        """recv = this rank's part of the sum, or another operation, of all ranks' send."""
        counts = recvcount * self._own().size, recvcount
        self._ask("reduceScatter", sendbuf, recvbuf, counts, datatype, stream, (op,))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """To one other rank, which receives."""
        self._ask("send", sendbuf, 0, (count, count), datatype, stream, (), peer)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """From one other rank, which sends."""
        self._ask("recv", 0, recvbuf, (count, count), datatype, stream, (), peer)

    # --------------------------------------------------------------------------------------------------------------

    def _own(self) -> Ring:
        if self._ring is None:
            raise NcclError(4, "the communicator was destroyed")
        return self._ring

    def _ask(
        self, kind: str, send: int, receive: int, counts: tuple[int, int], datatype: int, stream: int,
        more: tuple[int, ...], peer: int = -1,
    ) -> None:  # fmt: skip
        """Check what this rank asks for; do it, or keep it for the end of the group."""
        machine, ring = active(), self._own()
        where = label(f"nccl.{kind}")
        dtype = next((np.dtype(name) for number, name in DTYPES.values() if number == datatype), None)
        if dtype is None:
            raise NcclError(4, f"datatype {datatype}")
        if kind in ("allReduce", "reduce", "reduceScatter") and more[0] not in range(5):
            raise NcclError(4, f"operation {more[0]}")
        if (kind in ("reduce", "broadcast") and more[-1] not in range(ring.size)) or peer >= ring.size:
            raise NcclError(4, f"root or peer {more[-1:] or peer} of {ring.size}")
        with machine.lock:
            try:
                machine.asked(self._device)
            except CUDARuntimeError as error:
                raise NcclError(1) from error
            line = machine.line_at(stream, self._device)
            if line.device != self._device:
                raise NcclError(4, f"{line} is of device {line.device}, the communicator of {self._device}")
            if line.capture is not None:
                raise InCapture(f"{where} while {line} captures: NCCL's manual advises against it")
            if not self._count and peer < 0 and max(counts) > FEW:
                misuse = Misuse(f"{where} of {max(counts)} numbers is the first of its communicator: warm it up")
                machine.keep(misuse)
                raise misuse
            spans = [
                self._span(machine, address, count, dtype, where)
                for address, count in zip((send, receive), counts, strict=True)
            ]
        form = (kind if peer < 0 else "send and recv", counts[0], dtype.name, *more)
        call = Call(self, kind, spans[0], spans[1], form, line, where, peer)
        if machine.seat.group is not None:
            machine.seat.group.append(call)
        else:
            _submit([call])

    def _span(self, machine: Machine, address: int, count: int, dtype: Any, where: Label) -> Span | None:
        if not isinstance(address, (int, np.integer)):
            raise TypeError(f"{where} takes an address, array.data.ptr, not {address!r:.60}")
        if not address or not count:
            return None
        chunk, offset = machine.block(int(address), count * dtype.itemsize, self._device, str(where))
        if chunk.dtype is not None and chunk.dtype != dtype:
            raise BadLaunch(f"{where} is told {dtype} of {chunk}, which is {chunk.dtype}")
        return Span(chunk, chunk.memory[offset : offset + count * dtype.itemsize].view(dtype))


def all_ended(machine: Machine) -> None:
    """Keep as misuses the communicators that were neither destroyed nor aborted."""
    with machine.lock:
        for ring in machine.rings.values():
            for rank, where in sorted(ring.open.items()):
                machine.keep(Misuse(f"{where} of rank {rank} of {ring.size} was neither destroyed nor aborted"))


def _submit(calls: Sequence[Call]) -> None:
    """Make the calls of one thread known together, and wait until all of them are over."""
    machine = active()
    with machine.lock:
        communicators = {id(call.communicator): call.communicator for call in calls}.values()
        for communicator in communicators:
            if communicator._thread:
                misuse = Misuse("one communicator is used by two threads at once")
                machine.keep(misuse)
                communicator._own().broken = misuse
                machine.changed.notify_all()
                raise misuse
        for communicator in communicators:
            communicator._thread = threading.get_ident()
        try:
            for call in calls:
                _post(machine, call)
            machine.waiting |= {call: str(call) for call in calls if not call.over}
            machine.changed.notify_all()
            for call in calls:
                ring = call.communicator._own()
                machine.wait(
                    lambda call=call, ring=ring: call.over or ring.broken is not None or ring.lost(machine),
                    lambda call=call, ring=ring: f"{call} waits for {_missing(call, ring)}",
                )
                if not call.over and ring.broken is not None:
                    raise ring.broken
                if not call.over:  # the host goes on; the device waits for one that never comes
                    call.line.stuck = f"{call} waits for {_missing(call, ring)}, whose device is lost"
                    call.communicator._stuck.append(call.line)
                if call.error is not None:
                    raise call.error
        except Misuse as misuse:
            machine.keep(misuse)
            raise
        finally:
            for call in calls:
                machine.waiting.pop(call, None)
            for communicator in communicators:
                communicator._thread = 0


def _missing(call: Call, ring: Ring) -> str:
    if call.peer >= 0:
        return f"rank {call.peer}"
    there = [each.rank for calls in ring.calls.values() if call in calls for each in calls]
    return f"ranks {sorted(set(range(ring.size)) - set(there))}"


def _post(machine: Machine, call: Call) -> None:
    """Make a call known; do it, if with it all are there."""
    ring, communicator = call.communicator._own(), call.communicator
    if ring.broken is not None:
        raise ring.broken
    if call.peer >= 0:
        pair = (call.rank, call.peer) if call.kind == "send" else (call.peer, call.rank)
        waiting = ring.letters.setdefault(pair, deque())
        if not waiting or waiting[0].kind == call.kind:
            waiting.append(call)
            return
        calls = sorted((waiting.popleft(), call), key=lambda each: each.kind == "recv")
    else:
        calls = ring.calls.setdefault(communicator._count, [])
        calls.append(call)
        communicator._count += 1
        if len(calls) < ring.size:
            return
        del ring.calls[communicator._count - 1]
        calls = sorted(calls, key=lambda each: each.rank)
    _do(machine, ring, calls)


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
        results = _results(calls)
        for call, access, result in zip(calls, accesses, results, strict=True):
            if call.receive is not None and result is not None:
                call.receive.chunk.usable(call.where)
                call.receive.chunk.write(call.receive.bytes, access, machine)
                call.receive.view[...] = result
                call.receive.chunk.all_written(call.receive.view)
        _join(calls)
    except Exception as error:
        ring.broken = error
        for call in calls:
            call.error = error
    for call in calls:
        call.over = True
        machine.waiting.pop(call, None)
    machine.changed.notify_all()


def _results(calls: list[Call]) -> list[NDArray[Any] | None]:
    """What each rank receives."""
    kind, more = calls[0].kind, calls[0].form[3:]
    sent = [None if call.send is None else call.send.view for call in calls]
    if kind == "send":
        return [None, np.array(sent[0])]
    if kind == "broadcast":
        return [np.array(sent[more[0]])] * len(calls)
    if any(each is None for each in sent):
        return [None] * len(calls)
    if kind == "allGather":
        return [np.concatenate(sent)] * len(calls)  # type: ignore[arg-type]
    total = np.array(sent[0])
    function = next((f for number, f in OPERATIONS.values() if number == more[0]), np.add)
    with np.errstate(all="ignore"):
        for each in sent[1:]:
            total = function(total, each)
        if more[0] == AVERAGE:
            total = (total / total.dtype.type(len(calls))).astype(total.dtype)
    return list(np.split(total, len(calls))) if kind == "reduceScatter" else [total] * len(calls)


def _join(calls: list[Call]) -> None:
    """What comes next on a rank that has received comes after what all that have sent did before (not: after this)."""
    clocks = [{**call.line.clock, call.line.key: call.line.count - 1} for call in calls if call.send is not None]
    for call in calls:
        if call.receive is not None:
            for clock in clocks:
                call.line.join(clock)
