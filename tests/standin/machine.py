"""The made-up machine: devices, lines of operations, what each thread has current, and the one way operations go.

Everything runs at once and under one lock, so that two threads that use one stream do what a stream does: one after the
other. A misuse is raised where it is found, and kept: what is swallowed, or found where nothing can be raised (in the
end of an array), is raised when the machine is switched off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import CUDARuntimeError, Deadlock, InCapture, Misuse, NoGemmInCapture, Overrun, WrongDevice
from tests.standin.memory import CANARY, Chunk, MemoryPool, collecting_later
from tests.standin.order import Access, Line, label, merge

_active: Machine | None = None


class Span(NamedTuple):
    """Elements of a block: what an operation reads or writes."""

    chunk: Chunk
    view: NDArray[Any]

    @property
    def bytes(self) -> tuple[int, int]:
        """The first byte of the block that is in it, and the one behind the last."""
        view, base = self.view, self.chunk.address
        if view.flags.c_contiguous:
            low: int = view.__array_interface__["data"][0] - base
            return low, low + view.nbytes
        low, high = np.lib.array_utils.byte_bounds(view)
        return low - base, high - base


class Operation(NamedTuple):
    """What is done on a line at once, or recorded by one that captures.

    checked: after it, canaries are looked at; what it writes and leaves as it was is not taken for written.
    between: it is of two devices.
    """

    name: str
    reads: Sequence[Span]
    writes: Sequence[Span]
    work: Callable[[], Any]
    checked: bool = False
    between: bool = False


class Seat:
    """What a thread has current: a device, and on each device a stream."""

    def __init__(self, nulls: list[Any]) -> None:
        self.device = 0
        self.devices: list[int] = []
        self.streams = list(nulls)
        self.entered = [[null] for null in nulls]
        self.entered_on: list[int] = []
        self.products = set[int]()  # devices on which this thread has a cuBLAS handle
        self.allocators: list[Callable[[int], Any]] = []


class Machine:
    """See the head of the file.

    Args:
        devices: how many there are. memory: bytes of each.
        patience_s: how long a collective operation waits for the other ranks.

    Attributes:
        misuses: all that was found.
        launches: name of a kernel -> how often it was launched.
    """

    def __init__(self, devices: int, memory: int, patience_s: float) -> None:
        self.devices, self.memory, self.patience_s = devices, memory, patience_s
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.on = True
        self.done: dict[int, int] = {}
        self.lines: list[Line] = []
        self.nulls = [self.new_line(device, blocking=False, null=True) for device in range(devices)]
        self.misuses: list[Misuse] = []
        self.launches: dict[str, int] = {}
        self.pools: list[MemoryPool] = []
        self.waiting: dict[Any, str] = {}  # collective operations that wait for a rank
        self.stuck: Misuse | None = None  # why those that wait will wait for ever
        self.loaded: set[tuple[int, object]] = set()  # devices, and the modules that are there
        self.rings: dict[bytes, Any] = {}  # communicators by their names
        self.pinned: Any = None
        self.cublas: Any = None
        self.failing: dict[int, tuple[int, str]] = {}  # device -> what it still does, and the error from then on
        self._seats = threading.local()
        self._null_streams: list[Any] = []

    # threads and lines ----------------------------------------------------------------------------------------------

    @property
    def seat(self) -> Seat:
        """What the calling thread has current: at first device 0, and the null streams."""
        found: Seat | None = getattr(self._seats, "seat", None)
        if found is None:
            found = self._seats.seat = Seat(self._null_streams)
        return found

    def begin(self, null_streams: list[Any]) -> None:
        """Set the null stream of each device."""
        self._null_streams = null_streams

    @property
    def line(self) -> Line:
        """The line of the calling thread's current device and stream."""
        seat = self.seat
        line: Line = seat.streams[seat.device].line_on(seat.device)
        return line

    def new_line(self, device: int, *, blocking: bool, null: bool = False) -> Line:
        """A stream of a device."""
        key = len(self.lines)
        line = Line(key, device, 0 if null else 0x5000_0000 + 16 * key, blocking)
        self.lines.append(line)
        return line

    def line_at(self, number: int, device: int) -> Line:
        """The stream with that address, the null stream's of `device`."""
        for line in self.lines:
            if line.number == number and (number or line.device == device):
                return line
        raise Misuse(f"{number!r} is no stream's address")

    def known(self, access: Access, line: Line) -> bool:
        """Whether what comes next on `line` comes after that access."""
        key, count = access.line.key, access.count
        return access.line is line or count <= line.clock.get(key, 0) or count <= self.done.get(key, 0)

    def synchronize(self, clock: dict[int, int]) -> None:
        """The host has waited for all that `clock` knows."""
        with self.lock:
            merge(self.done, clock)
            self.pinned.settle()

    def reach(self, line: Line) -> None:
        """Let `line` wait for what it waits for by itself: a null stream and the blocking streams for each other."""
        if line.null:
            for other in self.lines:
                if other.device == line.device and other.blocking:
                    if other.capture is not None:
                        raise InCapture(f"the null stream of device {line.device} is used while {other} captures")
                    line.join(other.clock)
        elif line.blocking:
            line.join(self.nulls[line.device].clock)

    def settle(self, line: Line) -> None:
        """Wait until the collective calls on `line` have ended, or cannot end any more.

        A real host would not wait. Here every operation runs at once, so the next one needs their results.
        """
        for call in list(line.pending):
            call.settle(self)

    def passed(self, lines: Sequence[Line], what: str) -> None:
        """Make the host wait for these lines. Deadlock if one is stuck and no thread aborts its collective call."""
        where = label(what)
        for line in lines:
            try:
                self.wait(lambda: not line.stuck, lambda: f"{where} waits for {line}, on which {line.stuck}")  # noqa: B023
            except Deadlock as misuse:
                self.keep(misuse)
                raise

    # a device that fails --------------------------------------------------------------------------------------------

    def lose(
        self, device: int, after: int = 0, error: str = "cudaErrorLaunchFailure: unspecified launch failure"
    ) -> None:
        """Let a device fail after this many more operations: all later calls raise `error`."""
        with self.lock:
            self.failing[device] = after, error
            self.changed.notify_all()

    def is_lost(self, device: int) -> bool:
        """Whether it has failed."""
        return self.failing.get(device, (1, ""))[0] <= 0

    def check_device(self, device: int, operations: int = 0) -> None:
        """Count operations of a device; raise CUDARuntimeError if it has failed."""
        with self.lock:
            if device not in self.failing:
                return
            left, error = self.failing[device]
            if left <= 0:
                raise CUDARuntimeError(error)
            self.failing[device] = left - operations, error
            if left == operations:
                self.changed.notify_all()  # others stop waiting for it

    # operations -----------------------------------------------------------------------------------------------------

    def run(self, operation: Operation, line: Line | None = None) -> Any:
        """Do it on a line, by default the calling thread's; or record it there."""
        with self.lock:
            if not self.on:
                raise Misuse(f"{operation.name}: the machine was switched off")
            line = self.line if line is None else line
            self.check_device(line.device, operations=1)
            try:
                for span in (*operation.reads, *operation.writes):
                    self._usable(span, line, operation.name, between=operation.between)
                if line.capture is None:
                    return self.perform(operation, line)
                line.capture.append(operation)
                return None
            except Misuse as misuse:
                self.keep(misuse)
                raise

    def perform(self, operation: Operation, line: Line) -> Any:
        """Do it now."""
        self.settle(line)
        self.reach(line)
        where = label(operation.name)
        access = self.tick(line, where)
        for span in operation.reads:
            span.chunk.usable(where)
            span.chunk.read(span.bytes, access, self)
            span.chunk.all_read(span.view, where)
        for span in operation.writes:
            span.chunk.usable(where)
            span.chunk.write(span.bytes, access, self)
        with np.errstate(all="ignore"):
            result = operation.work()
        for span in operation.writes:
            span.chunk.all_written(span.view, unless_as_it_was=operation.checked)
        if operation.checked:
            self.intact(where)
        return result

    def tick(self, line: Line, where: Any) -> Access:
        """One more operation on a line."""
        line.count += 1
        line.clock[line.key] = line.count
        return Access(line, line.count, where)

    def _usable(self, span: Span, line: Line, name: str, *, between: bool) -> None:
        if span.chunk.pool.machine is not self:
            raise Misuse(f"{name}: an array of a machine that was switched off")
        if span.chunk.pool.device != line.device and not between:
            raise WrongDevice(
                f"{label(name)} on device {line.device} is given an array of {span.chunk}: make that device current"
            )

    def synchronous(self, what: str) -> None:
        """Refuse what cannot be recorded."""
        if self.line.capture is not None:
            misuse = InCapture(f"{label(what)} while {self.line} captures")
            self.keep(misuse)
            raise misuse

    def library(self, what: str) -> None:
        """Refuse cuBLAS while the stream captures; its handle is made by a thread's first product on a device."""
        with self.lock:
            if self.line.capture is not None:
                misuse = NoGemmInCapture(f"{label(what)} while {self.line} captures: cuBLAS refuses its stream")
                self.keep(misuse)
                raise misuse
            if self.seat.device not in self.seat.products:
                self.must_not_wait(f"the first {what} of this thread, which makes a cuBLAS handle,")
                self.seat.products.add(self.seat.device)

    # memory ---------------------------------------------------------------------------------------------------------

    def taken(self, device: int) -> int:
        """Bytes of a device that its pools hold."""
        return sum(each.total for pool in self.pools for each in pool if each.device == device)

    def live(self) -> list[Chunk]:
        """All blocks in use."""
        return [chunk for pool in self.pools for each in pool for chunk in list(each.used.values())]

    def block(self, address: int, nbytes: int, device: int, by: str) -> tuple[Chunk, int]:
        """The block in use that holds these bytes, and where in it they begin."""
        for chunk in self.live():
            offset = address - chunk.address
            if 0 <= offset < max(chunk.nbytes, 1):
                if chunk.pool.device != device:
                    raise WrongDevice(f"{by} on device {device} is given {chunk}")
                if offset + nbytes > chunk.nbytes:
                    raise Overrun(f"{by} reaches {offset + nbytes - chunk.nbytes} bytes behind {chunk}")
                return chunk, offset
        raise Misuse(f"{by}: no memory in use at {address:#x}")

    def intact(self, by: object) -> None:
        """Raise Overrun where any canary was overwritten: of all blocks in one go, as each kernel asks for it."""
        live = self.live()
        found = b"".join([guard for chunk in live for guard in chunk.guards])
        if found != bytes([CANARY]) * len(found):
            for chunk in live:
                chunk.intact(by)

    def free(self, chunk: Chunk) -> None:
        """The end of a block: never raises, but keeps what it found."""
        with self.lock, collecting_later():
            if not self.on:
                return
            try:
                chunk.pool.free(chunk)
            except Misuse as misuse:
                self.keep(misuse)

    # misuses --------------------------------------------------------------------------------------------------------

    def keep(self, misuse: Misuse) -> None:
        """Remember what was found."""
        if misuse not in self.misuses:
            self.misuses.append(misuse)

    def must_not_wait(self, what: str) -> None:
        """Refuse what waits for a device, while a collective operation on one waits for another thread, or for ever."""
        self.passed([line for line in self.lines if line.device == self.seat.device], what)
        for call in self.waiting.values():
            self.stuck = Deadlock(
                f"{label(what)} waits for the device, on which {call} waits for another rank: warm up, and "
                "allocate nothing between the host barrier and the collective operation"
            )
            self.keep(self.stuck)
            self.changed.notify_all()
            raise self.stuck

    def wait(self, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Wait for other threads, holding the lock; Deadlock after `patience_s`."""
        end = time.monotonic() + self.patience_s
        while not ready():
            left = end - time.monotonic()
            if self.stuck is not None:
                raise self.stuck
            if left <= 0:
                raise Deadlock(f"{missing()}: not in {self.patience_s:g} s")
            self.changed.wait(left)


def active() -> Machine:
    """The machine that is switched on."""
    if _active is None:
        raise Misuse("the stand-in of CuPy is not installed: `with installed():`")
    return _active


def switched_on() -> Machine | None:
    """The machine that is switched on, if any is."""
    return _active


def activate(machine: Machine | None) -> Machine | None:
    """Make it the active one; the one before."""
    global _active
    before, _active = _active, machine
    return before
