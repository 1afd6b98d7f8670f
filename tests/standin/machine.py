"""The simulated machine: devices, streams, each thread's current device and streams, and how operations run.

Every operation runs immediately and under one lock, so threads that share a stream take turns. A misuse is
raised where it is found, and recorded. If it was swallowed, or could not be raised there, it is raised when the machine
is switched off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import CUDARuntimeError, Deadlock, InCapture, Misuse, Overrun, WrongDevice
from tests.standin.memory import Chunk, MemoryPool, collecting_later
from tests.standin.order import Access, Label, Line, label, merge

PATIENCE_S = 20  # how long a thread waits for others
LAUNCH_FAILURE = "cudaErrorLaunchFailure: unspecified launch failure"
_active: Machine | None = None


class Span(NamedTuple):
    """The elements of a block that an operation reads or writes."""

    chunk: Chunk
    view: NDArray[Any]

    @property
    def bytes(self) -> tuple[int, int]:
        """The offsets in the block where the span starts and ends."""
        base = self.chunk.address
        if self.view.flags.c_contiguous:
            low: int = self.view.__array_interface__["data"][0] - base
            return low, low + self.view.nbytes
        low, high = np.lib.array_utils.byte_bounds(self.view)
        return low - base, high - base

    def read(self, access: Access) -> None:
        self.chunk.read(self.bytes, access)
        self.chunk.must_be_written(self.view, access.label)

    def write(self, access: Access) -> None:
        self.chunk.write(self.bytes, access)


class Operation(NamedTuple):
    """Work that a line runs at once or captures."""

    name: str
    reads: Sequence[Span]
    writes: Sequence[Span]
    work: Callable[[], Any]
    checked: bool = False  # count only changed elements as written
    between: bool = False  # a copy between two devices


class Seat:
    """A thread's current device, and its current stream on each device."""

    def __init__(self, nulls: list[Any]) -> None:
        self.device = 0
        self.devices: list[int] = []
        self.streams = list(nulls)
        self.entered = [[null] for null in nulls]
        self.entered_on: list[int] = []
        self.products = set[int]()  # devices on which this thread has a cuBLAS handle
        self.allocators: list[Callable[[int], Any]] = []


class Machine:
    """A simulated machine. See `installed` for the arguments."""

    def __init__(self, devices: int, memory: int) -> None:
        self.devices, self.memory = devices, memory
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.on = True
        self.done: dict[int, int] = {}  # line key -> count of the operations that the host has waited for
        self.lines: list[Line] = []
        self.nulls = [self.new_line(device, null=True) for device in range(devices)]
        self.null_streams: list[Any] = []
        self.misuses: list[Misuse] = []
        self.pool: MemoryPool = MemoryPool(self)
        self.waiting: list[Any] = []  # collective calls that wait for a rank
        self.loaded: set[tuple[int, object]] = set()  # pairs of a device and a module that is loaded there
        self.rings: dict[bytes, Any] = {}  # communicators by their unique ids
        self.pinned: Any = None
        self.cublas: Any = None
        self._failing: dict[int, tuple[int, str]] = {}  # device -> operations left, and the error from then on
        self._seats = threading.local()

    # threads and lines ----------------------------------------------------------------------------------------------

    @property
    def seat(self) -> Seat:
        """The calling thread's current device and streams: at first device 0 and the null streams."""
        found: Seat | None = getattr(self._seats, "seat", None)
        if found is None:
            found = self._seats.seat = Seat(self.null_streams)
        return found

    @property
    def line(self) -> Line:
        return self.line_of(None)

    def line_of(self, stream: Any) -> Line:
        """Return the line of a stream on the current device; by default of the current stream."""
        seat = self.seat
        line: Line = (seat.streams[seat.device] if stream is None else stream).line_on(seat.device)
        return line

    def new_line(self, device: int, *, null: bool = False) -> Line:
        key = len(self.lines)
        self.lines.append(Line(key, device, 0 if null else 0x5000_0000 + 16 * key))
        return self.lines[-1]

    def line_at(self, number: int, device: int) -> Line:
        """Return the line of the stream with that address; 0 is the null stream of `device`."""
        for line in self.lines:
            if line.number == number and (number or line.device == device):
                return line
        raise Misuse(f"no stream has the address {number!r}")

    def known(self, access: Access, line: Line) -> bool:
        """Return True if the next operation on `line` is ordered after that access."""
        key = access.line.key
        return access.line is line or access.number <= max(line.clock.get(key, 0), self.done.get(key, 0))

    def synchronize(self, clock: dict[int, int]) -> None:
        """Record that the host has waited for all operations in `clock`."""
        merge(self.done, clock)
        self.pinned.settle()

    def settle(self, line: Line) -> None:
        """Wait until the collective calls on `line` have ended.

        A real host would not wait. Here every operation runs at once, so the next one needs their results.
        """
        for call in list(line.pending):
            call.settle(self)

    # a device that fails --------------------------------------------------------------------------------------------

    def lose(self, device: int, after: int = 0, error: str = LAUNCH_FAILURE) -> None:
        """Make a device fail after `after` more operations. All later calls raise `error`."""
        with self.lock:
            self._failing[device] = after, error

    def is_lost(self, device: int) -> bool:
        return device in self._failing and self._failing[device][0] <= 0

    def check_device(self, device: int, operations: int = 0) -> None:
        """Count operations of a device. Raise CUDARuntimeError if it has failed."""
        with self.lock:
            if device not in self._failing:
                return
            left, error = self._failing[device]
            if left <= 0:
                raise CUDARuntimeError(error)
            self._failing[device] = left - operations, error

    # operations -----------------------------------------------------------------------------------------------------

    def run(self, operation: Operation, line: Line | None = None) -> None:
        """Run or capture an operation on a line, by default the current one."""
        with self.lock:
            if not self.on:
                raise Misuse(f"{operation.name}: the machine was switched off")
            line = self.line if line is None else line
            self.check_device(line.device, operations=1)
            try:
                for span in (*operation.reads, *operation.writes):
                    device = span.chunk.pool.device
                    if device != line.device and not operation.between:
                        raise WrongDevice(f"{label(operation.name)} on device {line.device} uses {span.chunk}")
                if line.capture is None:
                    self._perform(operation, line)
                else:
                    line.capture.append(operation)
            except Misuse as misuse:
                self.refuse(misuse)

    def _perform(self, operation: Operation, line: Line) -> None:
        self.settle(line)
        access = self.tick(line, label(operation.name))
        for span in operation.reads:
            span.read(access)
        for span in operation.writes:
            span.write(access)
        with np.errstate(all="ignore"):
            operation.work()
        for span in operation.writes:
            span.chunk.mark_written(span.view, only_changed=operation.checked)

    def tick(self, line: Line, where: Label) -> Access:
        line.count += 1
        line.clock[line.key] = line.count
        return Access(line, line.count, where)

    def must_not_capture(self, what: str, line: Line | None = None) -> None:
        line = self.line if line is None else line
        if line.capture is not None:
            self.refuse(InCapture(f"{label(what)} while {line} captures"))

    def uses_cublas(self, what: str) -> None:
        """Reject CuPy's own cuBLAS in a capture. A thread's first product on a device creates a handle, which waits."""
        with self.lock:
            self.must_not_capture(what)
            if self.seat.device not in self.seat.products:
                self.must_not_wait(f"the first {what} of this thread, which makes a cuBLAS handle,")
                self.seat.products.add(self.seat.device)

    # memory ---------------------------------------------------------------------------------------------------------

    def taken(self, device: int) -> int:
        return self.pool.devices[device].total

    def live(self) -> list[Chunk]:
        return [chunk for pool in self.pool.devices for chunk in list(pool.used.values())]

    def span(self, address: int, nbytes: int, device: int, by: str, dtype: Any = None) -> Span:
        """Return the span of these bytes in a block in use. dtype: of its elements, by default the block's."""
        where = label(by)
        for chunk in self.live():
            offset = int(address) - chunk.address
            if not 0 <= offset < max(chunk.nbytes, 1):
                continue
            if chunk.pool.device != device:
                raise WrongDevice(f"{where} on device {device} is given {chunk}")
            if offset + nbytes > chunk.nbytes:
                raise Overrun(f"{where} reaches {offset + nbytes - chunk.nbytes} bytes beyond {chunk}")
            return Span(chunk, chunk.memory[offset : offset + nbytes].view(dtype or chunk.dtype or np.uint8))
        raise Misuse(f"{where}: no memory in use at {address:#x}")

    def free(self, chunk: Chunk) -> None:
        """Free a block. Misuses are recorded, not raised."""
        with self.lock, collecting_later():
            if not self.on:
                return
            try:
                chunk.pool.free(chunk)
            except Misuse as misuse:
                self.keep(misuse)

    # misuses --------------------------------------------------------------------------------------------------------

    def keep(self, misuse: Misuse) -> None:
        if misuse not in self.misuses:
            self.misuses.append(misuse)

    def refuse(self, misuse: Misuse) -> NoReturn:
        self.keep(misuse)
        raise misuse

    def must_not_wait(self, what: str) -> None:
        """Reject a call that waits for the device while a collective operation waits for another thread."""
        if self.waiting:
            remedy = "warm up, and allocate nothing between the host barrier and the collective operation"
            waiting = f"on which {self.waiting[0]} waits for another rank"
            self.refuse(Deadlock(f"{label(what)} waits for the device, {waiting}: {remedy}"))

    def wait(self, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Wait for other threads to make `ready` true. Raise Deadlock after `PATIENCE_S`."""
        end = time.monotonic() + PATIENCE_S
        while not ready():
            left = end - time.monotonic()
            if left <= 0:
                self.refuse(Deadlock(f"{missing()}, for more than {PATIENCE_S} s"))
            self.changed.wait(left)


def active() -> Machine:
    if _active is None:
        raise Misuse("the stand-in for CuPy is not installed: `with installed():`")
    return _active


def switched_on() -> Machine | None:
    return _active


def activate(machine: Machine | None) -> Machine | None:
    """Make this machine the active one, and return the previous one."""
    global _active
    before, _active = _active, machine
    return before
