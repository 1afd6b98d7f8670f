"""Copies by address: from one device to another, and from the host.

CuPy passes both on as they are (cupy_backends/cuda/api/runtime.pyx, 14.2). `cudaMemcpyPeerAsync` takes two addresses,
their devices and a stream, of either of them; it needs no peer access, and is done in the stream's order.
`cudaMemcpyAsync` from memory that is not pinned may wait, which is no mistake; who asks for it by address means pinned
memory, so it is one here.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tests.standin.errors import BadLaunch
from tests.standin.machine import Operation, Span, active
from tests.standin.order import label

HOST_TO_DEVICE = 1


def memcpy_peer_async(dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int) -> None:
    """As CuPy's function of this name, which takes them in this order and by position."""
    machine = active()
    with machine.lock:
        line = machine.line_at(stream, machine.seat.device)
        if line.device not in (dst_device, src_device):
            raise BadLaunch(f"a copy from device {src_device} to {dst_device} on a stream of device {line.device}")
        spans = []
        for address, device in ((src, src_device), (dst, dst_device)):
            chunk, offset = machine.block(int(address), size, device, "memcpyPeerAsync")
            spans.append(Span(chunk, chunk.memory[offset : offset + size].view(chunk.dtype or np.uint8)))
        source, target = spans

        def work() -> None:
            target.view[...] = source.view

        machine.run(Operation("memcpyPeerAsync", [source], [target], work, between=True), line)


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """As CuPy's function of this name, from pinned memory to the device that is current."""
    machine, name = active(), "memcpyAsync"
    with machine.lock:
        line = machine.line_at(stream, machine.seat.device)
        machine.synchronous(name)
        if kind != HOST_TO_DEVICE:
            raise BadLaunch(f"{name}: the stand-in copies from the host alone (kind 1), not kind {kind}")
        host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(src))
        if not machine.pinned.holds(host):
            raise BadLaunch(f"{label(name)} from memory at {src:#x}, which is not pinned: the copy would wait")
        chunk, offset = machine.block(int(dst), size, line.device, name)
        target = Span(chunk, chunk.memory[offset : offset + size].view(chunk.dtype or np.uint8))
        content = host.copy()

        def work() -> None:
            target.view[...] = content.view(target.view.dtype)
            machine.pinned.flies(line, label(name), host, content, arrives=False)

        machine.run(Operation(name, [], [target], work), line)
