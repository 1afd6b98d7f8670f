"""Copies by address: from one device to another, and from the host (cupy_backends/cuda/api/runtime.pyx, 14.2).

`cudaMemcpyPeerAsync` takes a stream of either device, and needs no peer access. `cudaMemcpyAsync` would wait if the
host memory were not pinned. Callers that copy by address expect pinned memory, so anything else is a misuse here.
"""

import ctypes

import numpy as np

from tests.standin.errors import BadLaunch
from tests.standin.machine import Operation, active
from tests.standin.order import Access, label

HOST_TO_DEVICE = 1


def memcpy_peer_async(dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int) -> None:
    """Copy as CuPy's function of this name does, which takes its arguments by position."""
    machine, name = active(), "memcpyPeerAsync"
    with machine.lock:
        line = machine.line_at(stream, machine.seat.device)
        if line.device not in (dst_device, src_device):
            raise BadLaunch(f"a copy from device {src_device} to {dst_device} on {line}")
        source = machine.span(src, size, src_device, name)
        target = machine.span(dst, size, dst_device, name)
        into, content = target.view, source.view
        machine.run(Operation(name, [source], [target], lambda: np.copyto(into, content), between=True), line)


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """Copy as CuPy's function of this name does, from pinned memory to the current device."""
    machine, name = active(), "memcpyAsync"
    with machine.lock:
        line = machine.line_at(stream, machine.seat.device)
        machine.must_not_capture(name)
        host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(src))
        if kind != HOST_TO_DEVICE or not machine.pinned.holds(host):
            machine.refuse(BadLaunch(f"{label(name)} of kind {kind}, not from pinned memory: the copy would wait"))
        target, content, where = machine.span(dst, size, line.device, name), host.tobytes(), label(name)

        def work() -> None:
            target.view[...] = np.frombuffer(content, target.view.dtype)
            machine.pinned.sends(src, content, Access(line, line.count, where))

        machine.run(Operation(name, [], [target], work), line)
