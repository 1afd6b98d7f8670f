"""Devices, streams, events and graphs, with the current ones per thread as in CuPy (cupy/cuda/stream.pyx, 14.2).

The end of a `with` block restores the stream *entered* before it, not the stream that was current.
"""

from __future__ import annotations

from tests.standin.errors import CUDARuntimeError, InCapture, Misuse
from tests.standin.machine import Machine, Operation, active
from tests.standin.order import Line, label, merge


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = active().seat.device if device is None else int(device)

    def use(self) -> Device:
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
        machine = active()
        with machine.lock:
            for line in machine.lines:
                if line.device == self.id:
                    _wait(machine, line, "Device.synchronize")

    @property
    def mem_info(self) -> tuple[int, int]:
        machine = active()
        machine.check_device(self.id)
        return machine.memory - machine.taken(self.id), machine.memory

    @property
    def compute_capability(self) -> str:
        return "90"


class Stream:
    """A stream of the current device. `Stream.null` is the null stream of whichever device is current."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._machine: Machine | None = None if null else active()
        self.device_id = -1
        if self._machine is not None:
            if not non_blocking:
                raise Misuse("a stream that would wait for the null stream: use non_blocking=True")
            with self._machine.lock:
                self.device_id = self._machine.seat.device
                self._machine.check_device(self.device_id)
                self._line = self._machine.new_line(self.device_id)

    def line_on(self, device: int) -> Line:
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
        return self._here.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __enter__(self) -> Stream:
        seat = active().seat
        if self.device_id not in (-1, seat.device):
            raise RuntimeError(f"a stream of device {self.device_id} is entered on device {seat.device}")
        seat.entered[seat.device].append(self)
        seat.entered_on.append(seat.device)
        seat.streams[seat.device] = self
        return self

    def __exit__(self, *_: object) -> None:
        seat = active().seat
        device = seat.entered_on.pop()
        seat.entered[device].pop()
        seat.streams[device] = seat.entered[device][-1]

    def synchronize(self) -> None:
        _wait(active(), self._here, "Stream.synchronize")

    def record(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        machine, line = active(), self._here
        with machine.lock:
            if event.captured is not line.capture:
                machine.refuse(InCapture(f"{label('Stream.wait_event')} for an event outside of this capture"))
            if line.capture is None:
                machine.settle(line)
                merge(line.clock, event.clock)

    def begin_capture(self) -> None:
        machine, line = active(), self._here
        with machine.lock:
            if not line.number or line.capture is not None:
                machine.refuse(InCapture(f"{label('Stream.begin_capture')} on {line}"))
            line.capture = []

    def end_capture(self) -> Graph:
        line = self._here
        if line.capture is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream does not capture")
        graph, line.capture = Graph(line.device, line.capture), None
        return graph


class Event:
    """A point on a stream. Before `record`, no operation precedes it."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.clock: dict[int, int] = {}
        self.captured: list[Operation] | None = None  # the capture in which it was recorded, if any

    def record(self, stream: Stream | None = None) -> None:
        machine = active()
        line = machine.line_of(stream)
        with machine.lock:
            self.captured = line.capture
            if line.capture is not None:
                return
            machine.check_device(line.device)
            machine.settle(line)
            self.clock = dict(line.clock)

    def synchronize(self) -> None:
        machine = active()
        with machine.lock:
            if self.captured is not None:
                machine.refuse(InCapture(f"{label('Event.synchronize')}: it was recorded in a capture"))
            machine.synchronize(self.clock)


class Graph:
    """The operations of a capture. It holds no arrays, so their memory must live as long as the graph is launched."""

    def __init__(self, device: int, operations: list[Operation]) -> None:
        self.device, self.operations = device, operations

    def launch(self, stream: Stream | None = None) -> None:
        machine = active()
        line = machine.line_of(stream)
        with machine.lock:
            if line.device != self.device:
                raise CUDARuntimeError("cudaErrorInvalidValue: a graph of another device")
            machine.must_not_capture("Graph.launch", line)
            for operation in self.operations:
                machine.run(operation, line)


def get_current_stream(device_id: int = -1) -> Stream:
    seat = active().seat
    stream: Stream = seat.streams[seat.device if device_id < 0 else device_id]
    return stream


def _wait(machine: Machine, line: Line, what: str) -> None:
    with machine.lock:
        machine.check_device(line.device)
        machine.settle(line)
        machine.must_not_capture(what, line)
        machine.synchronize(line.clock)


Stream.null = Stream(null=True)
