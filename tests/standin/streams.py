"""Devices, streams, events and graphs, with what a thread has current as CuPy has it (cupy/cuda/stream.pyx, 14.2).

A stream that is entered with `with` is left for the one that was *entered* before it, not for one that was made current
by `use`: after `stream.use()`, the end of a `with` block brings the null stream back.
"""

from __future__ import annotations

from tests.standin.errors import CUDARuntimeError, InCapture, Misuse
from tests.standin.machine import Machine, Operation, active
from tests.standin.order import Line, label


class Device:
    """A device, by default the one that is current."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = active().seat.device if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def use(self) -> Device:
        """Make it current."""
        machine = active()
        if not 0 <= self.id < machine.devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        machine.seat.device = self.id
        return self

    def __enter__(self) -> Device:
        seat = active().seat
        before = seat.device
        self.use()
        seat.devices.append(before)
        return self

    def __exit__(self, *_: object) -> None:
        seat = active().seat
        seat.device = seat.devices.pop()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        machine = active()
        with machine.lock:
            machine.check_device(self.id)
            for line in machine.lines:
                if line.device == self.id:
                    _wait(machine, line, "Device.synchronize")

    @property
    def mem_info(self) -> tuple[int, int]:
        """Bytes that are free, and all there are."""
        machine = active()
        machine.check_device(self.id)
        return machine.memory - machine.taken(self.id), machine.memory

    @property
    def compute_capability(self) -> str:
        """Major and minor."""
        return "90"


class Stream:
    """A stream of the device that is current; `Stream.null` is that of whichever device is."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._machine: Machine | None = None if null else active()
        self.device_id = -1
        if self._machine is not None:
            with self._machine.lock:
                self.device_id = self._machine.seat.device
                self._machine.check_device(self.device_id)
                self._line = self._machine.new_line(self.device_id, blocking=not non_blocking)

    def line_on(self, device: int) -> Line:
        """The line it is, used while `device` is current."""
        if self._machine is None:
            return active().nulls[device]
        if self._machine is not active():
            raise Misuse("a stream of a machine that was switched off")
        return self._line

    @property
    def _here(self) -> Line:
        return self.line_on(active().seat.device)

    @property
    def ptr(self) -> int:
        """Its address."""
        return self._here.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<Stream {self.ptr:#x} (device {self.device_id})>"

    def _fitting(self) -> int:
        device = active().seat.device
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({device})"
            )
        return device

    def use(self) -> Stream:
        """Make it current."""
        active().seat.streams[self._fitting()] = self
        return self

    def __enter__(self) -> Stream:
        seat, device = active().seat, self._fitting()
        seat.entered[device].append(self)
        seat.entered_on.append(device)
        seat.streams[device] = self
        return self

    def __exit__(self, *_: object) -> None:
        seat = active().seat
        device = seat.entered_on.pop()
        seat.entered[device].pop()
        seat.streams[device] = seat.entered[device][-1]

    @property
    def done(self) -> bool:
        """Whether all work is over: here it is, but the host learns it, as by `synchronize`."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for all work."""
        _wait(active(), self._here, "Stream.synchronize")

    def record(self, event: Event | None = None) -> Event:
        """An event after all operations on the stream so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Order later operations after the event."""
        machine, line = active(), self._here
        with machine.lock:
            if line.capture is not None and event.captured is line.capture:
                return  # recorded on this stream, in the same capture
            if line.capture is not None or event.captured is not None:
                _refuse(machine, line, "Stream.wait_event for an event that is not of this capture,")
            machine.settle(line)
            line.join(event.clock)
            line.behind = [*line.holding, *event.behind]

    # capture --------------------------------------------------------------------------------------------------------

    def begin_capture(self, mode: int | None = None) -> None:
        """Record from now on, and run nothing."""
        machine, line = active(), self._here
        if line.null:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        with machine.lock:
            if line.capture is not None:
                _refuse(machine, line, "Stream.begin_capture")
            line.capture = []

    def end_capture(self) -> Graph:
        """What was recorded."""
        line = self._here
        if line.capture is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream does not capture")
        graph, line.capture = Graph(line.device, line.capture), None
        return graph


class Event:
    """A point on a stream; before `record` it comes after nothing."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.clock: dict[int, int] = {}
        self.behind: list[Line] = []  # stuck lines that it waits for
        self.captured: list[Operation] | None = None  # the capture in which it was recorded, if any

    def record(self, stream: Stream | None = None) -> None:
        """Record it after all operations so far on the stream, by default the current one."""
        machine = active()
        seat = machine.seat
        line = (seat.streams[seat.device] if stream is None else stream).line_on(seat.device)
        with machine.lock:
            self.captured = line.capture
            if line.capture is not None:
                return
            machine.check_device(line.device)
            machine.settle(line)
            machine.reach(line)
            self.clock, self.behind = dict(line.clock), line.holding

    def synchronize(self) -> None:
        """Wait for it."""
        machine = active()
        with machine.lock:
            if self.captured is not None:
                misuse = InCapture(f"{label('Event.synchronize')}: it was recorded in a capture")
                machine.keep(misuse)
                raise misuse
            machine.passed(self.behind, "Event.synchronize")
            machine.synchronize(self.clock)

    @property
    def done(self) -> bool:
        """Whether it is over: here it is, but the host learns it, as by `synchronize`."""
        self.synchronize()
        return True


class Graph:
    """What a stream has recorded. It holds no arrays: their memory must live as long as it is launched."""

    def __init__(self, device: int, operations: list[Operation]) -> None:
        self.device, self.operations = device, operations

    def launch(self, stream: Stream | None = None) -> None:
        """Do all of it, in its order, on a stream, by default the current one."""
        machine = active()
        seat = machine.seat
        line = (seat.streams[seat.device] if stream is None else stream).line_on(seat.device)
        with machine.lock:
            if line.device != self.device:
                raise CUDARuntimeError("cudaErrorInvalidValue: a graph of another device")
            if line.capture is not None:
                _refuse(machine, line, "Graph.launch")
            for operation in self.operations:
                machine.run(operation, line)


def get_current_stream(device_id: int = -1) -> Stream:
    """What the calling thread has current on a device, by default on the current one."""
    seat = active().seat
    stream: Stream = seat.streams[seat.device if device_id < 0 else device_id]
    return stream


def _wait(machine: Machine, line: Line, what: str) -> None:
    with machine.lock:
        machine.check_device(line.device)
        machine.settle(line)
        machine.passed(line.holding, what)
        if line.capture is not None:
            _refuse(machine, line, what)
        machine.synchronize(line.clock)


def _refuse(machine: Machine, line: Line, what: str) -> None:
    misuse = InCapture(f"{label(what)} while {line} captures")
    machine.keep(misuse)
    raise misuse


Stream.null = Stream(null=True)
