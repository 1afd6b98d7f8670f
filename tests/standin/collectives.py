"""`cupy.cuda.nccl`: ranks are threads of one process that wait for each other and compute, as GPUs do.

It has the names of CuPy 14.2 (cupy_backends/cuda/libs/nccl.pyx). One rank's third call is matched with the third
call of each other rank. A call returns before the others are made; its stream's next operation waits for them.

Two things that CuPy allows are misuses here. A communicator's first operation connects the ranks and loads kernels,
which allocates memory, so it must be a small one. And a communicator must be destroyed or aborted explicitly: its
destructor would end it in whichever thread runs the garbage collector.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupynet.backend.policy import stored_dtype
from tests.standin.errors import Disagreement, Misuse
from tests.standin.machine import Machine, Span, active
from tests.standin.order import Label, Line, label, merge

DTYPES = {6: "float16", 7: "float32", 8: "float64", 9: "bfloat16"}
SUM = 0
CONSTANTS = {f"NCCL_{name.upper()}": number for number, name in DTYPES.items()} | {"NCCL_SUM": SUM}
VERSION = 23203
FEW = 16  # maximum number of values in the operation that connects the ranks
SEVERAL_ON_ONE = "NCCL_MULTI_RANK_GPU_ENABLE"


class NcclError(RuntimeError):
    """An error of NCCL, with its status at the beginning of the message."""


@dataclass(eq=False)
class Ring:
    """State shared by the ranks of one communicator."""

    size: int
    devices: dict[int, int] = field(default_factory=dict)  # connected rank -> its device
    open: dict[int, Label] = field(default_factory=dict)  # rank -> where its communicator was created, until it ends
    calls: dict[int, list[Call]] = field(default_factory=dict)  # number -> its calls, until all ranks have made theirs
    broken: Exception | None = None


@dataclass(eq=False)
class Call:
    """A rank's call. All ranks must agree on its form."""

    ring: Ring
    rank: int
    send: Span
    receive: Span
    form: tuple[int, str]
    line: Line
    where: Label
    over: bool = False

    def settle(self, machine: Machine) -> None:
        """Wait until all ranks have made the call. Raise the error if one of them was wrong."""
        try:
            machine.wait(lambda: self.over or self.ring.broken is not None, lambda: f"{self} waits for other ranks")
        finally:
            self.end(machine)
        if self.ring.broken is not None:
            raise self.ring.broken

    def end(self, machine: Machine) -> None:
        self.over = True
        for calls in (machine.waiting, self.line.pending):
            if self in calls:
                calls.remove(self)

    def __str__(self) -> str:
        return f"{self.where} of rank {self.rank} with {self.form}"


class NcclCommunicator:
    """One rank's communicator, on the current device. Its constructor waits for all ranks."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        machine = active()
        self.rank, self._device, self._count = rank, machine.seat.device, 0
        self.ring: Ring | None = None
        self._calls: list[Call] = []  # this rank's calls that were pending at its last one
        with machine.lock:
            ring = machine.rings.setdefault(commId, Ring(ndev))
            if self._device in ring.devices.values() and os.environ.get(SEVERAL_ON_ONE) != "1":
                ring.broken = NcclError(f"NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected : rank {rank}")
            ring.devices[rank] = self._device
            machine.changed.notify_all()
            machine.wait(
                lambda: len(ring.devices) == ring.size or ring.broken is not None,
                lambda: f"rank {rank} waits in NcclCommunicator, and of {ndev} only {sorted(ring.devices)} are there",
            )
            if ring.broken is not None:
                raise ring.broken
            self.ring = ring
            ring.open[rank] = label("NcclCommunicator")

    def destroy(self) -> None:
        """End the communicator; later calls are rejected."""
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.open.pop(self.rank, None)

    def abort(self) -> None:
        """End this rank's part and its calls on the device. The other ranks keep waiting."""
        machine = active()
        self.destroy()
        with machine.lock:
            for call in self._calls:
                call.end(machine)
            machine.changed.notify_all()

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        machine, where, ring = active(), label("nccl.allReduce"), self.ring
        if ring is None or datatype not in DTYPES or op != SUM:
            what = f"datatype {datatype}, operation {op}"
            raise NcclError(f"NCCL_ERROR_INVALID_ARGUMENT: {what}: here a live communicator can only sum floats")
        dtype = stored_dtype(DTYPES[datatype])
        with machine.lock:
            machine.check_device(self._device)
            machine.must_not_capture("nccl.allReduce")  # NCCL's manual advises against it
            line = machine.line_at(stream, self._device)
            if line.device != self._device:
                raise NcclError(f"NCCL_ERROR_INVALID_ARGUMENT: {line}, the communicator of device {self._device}")
            try:
                if not self._count and count > FEW:
                    raise Misuse(f"{where} of {count} numbers is the first of its communicator: warm it up")
                nbytes, name = count * dtype.itemsize, "nccl.allReduce"
                send, receive = (machine.span(at, nbytes, self._device, name, dtype) for at in (sendbuf, recvbuf))
                self._submit(machine, ring, Call(ring, self.rank, send, receive, (count, dtype.name), line, where))
            except Misuse as misuse:
                machine.refuse(misuse)

    def _submit(self, machine: Machine, ring: Ring, call: Call) -> None:
        """Register a call, and execute it if all ranks have made it."""
        if ring.broken is not None:
            raise ring.broken
        self._calls = [*(each for each in self._calls if not each.over), call]
        calls = ring.calls.setdefault(self._count, [])
        calls.append(call)
        self._count += 1
        if len(calls) < ring.size:
            call.line.pending.append(call)
            machine.waiting.append(call)
            machine.changed.notify_all()
            return
        del ring.calls[self._count - 1]
        try:
            _execute(machine, sorted(calls, key=lambda each: each.rank))
        except Exception as error:
            ring.broken = error
            raise
        finally:
            for each in calls:
                each.end(machine)
            machine.changed.notify_all()


def check_all_ended(machine: Machine) -> None:
    """Record a misuse for each communicator that was neither destroyed nor aborted."""
    with machine.lock:
        for ring in machine.rings.values():
            for rank, where in sorted(ring.open.items()):
                machine.keep(Misuse(f"{where} of rank {rank} of {ring.size} was neither destroyed nor aborted"))


def _execute(machine: Machine, calls: list[Call]) -> None:
    if len({call.form for call in calls}) > 1:
        raise Disagreement(f"the ranks made different calls: {'; '.join(map(str, calls))}")
    accesses = [machine.tick(call.line, call.where) for call in calls]
    for call, access in zip(calls, accesses, strict=True):
        call.send.read(access)
    with np.errstate(all="ignore"):
        total: Any = sum((call.send.view for call in calls[1:]), np.array(calls[0].send.view))
    for call, access in zip(calls, accesses, strict=True):
        call.receive.write(access)
        call.receive.view[...] = total
        call.receive.chunk.mark_written(call.receive.view)
    # each rank's next operation is ordered after everything before the calls of all ranks, but not after those calls
    clocks = [{**call.line.clock, call.line.key: call.line.count - 1} for call in calls]
    for call in calls:
        for clock in clocks:
            merge(call.line.clock, clock)
