"""Copies from one device to another.

`cudaMemcpyPeerAsync` takes two addresses, their devices and a stream, of either of them; it needs no peer access, and
is done in the stream's order.
"""

from __future__ import annotations

import numpy as np

from tests.standin.errors import BadLaunch
from tests.standin.machine import Operation, Span, active


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
