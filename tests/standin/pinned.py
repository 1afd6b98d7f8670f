"""Pinned host memory, modeled on CuPy's pool (cupy/cuda/pinned_memory.pyx, 14.2), and copies by address.

Sizes are powers of two, at least 512 bytes. Freed blocks are kept until `free_all_blocks`. A copy to a device is
asynchronous: the memory must not change before the host has waited for the stream.

Copies (cupy_backends/cuda/api/runtime.pyx, 14.2): `cudaMemcpyPeerAsync` takes a stream of either device, and needs no
peer access. `cudaMemcpyAsync` would wait if the host memory were not pinned. Callers that copy by address expect pinned
memory, so anything else is a misuse here.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import BadLaunch, Unordered
from tests.standin.machine import Machine, Operation, active
from tests.standin.order import Access, label

UNIT = 512  # bytes
HOST_TO_DEVICE = 1  # cudaMemcpyKind


class Flight(NamedTuple):
    """A pending copy to a device: its operation, its host memory, and that memory's content at the start."""

    since: Access
    host: NDArray[Any]
    content: bytes

    def too_soon(self, how: str) -> Unordered:
        reader = f"{self.since.label}, which reads it"
        return Unordered(f"pinned memory was {how} during {reader}: synchronize, or wait for an event, before that")


class PinnedPool:
    """The pool of all pinned memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.free: Counter[int] = Counter()  # size -> number of free blocks
        self.used: dict[int, int] = {}  # address -> size of blocks in use
        self.flights: list[Flight] = []

    def malloc(self, nbytes: int) -> Any:
        """Return memory for `numpy.frombuffer(pointer, dtype, count)`."""
        size = rounded(nbytes)
        self._take(size)
        pointer = type("PinnedMemoryPointer", (_Pinned, ctypes.c_char * size), {"pool": self, "length": size})()
        self.used[pointer.ptr] = size
        return pointer

    def holds(self, host: NDArray[Any]) -> bool:
        address = host.__array_interface__["data"][0]
        used = self.used.copy()  # in one step; a garbage collection during a loop could free a block
        return any(start <= address < start + size for start, size in used.items())

    def sends(self, address: int, content: bytes, since: Access) -> None:
        """Record a copy to a device by its address, without keeping the memory: freeing it too soon is a misuse."""
        host = np.ctypeslib.as_array((ctypes.c_uint8 * len(content)).from_address(address))
        self.flights.append(Flight(since, host, content))

    def settle(self) -> None:
        """Check the copies that the host has waited for."""
        for flight in self._ended(lambda each: each.since.number <= self.machine.done.get(each.since.line.key, 0)):
            if flight.host.tobytes() != flight.content:
                self.machine.refuse(flight.too_soon("changed"))

    def ends(self, address: int, size: int) -> None:
        """Take memory back. Destructors cannot raise, so pending copies are recorded as misuses."""
        with self.machine.lock:
            self.used.pop(address, None)
            ended = self._ended(lambda each: address <= each.host.ctypes.data < address + size)
            self.give(size)
        for flight in ended:
            self.machine.keep(flight.too_soon("freed"))

    def _ended(self, ends: Callable[[Flight], bool]) -> list[Flight]:
        """Remove and return the pending copies for which `ends` is true."""
        ended = [each for each in self.flights if ends(each)]
        self.flights = [each for each in self.flights if not ends(each)]
        return ended

    def stage(self, nbytes: int) -> None:
        """Allocate and free the staging buffer with which CuPy copies to a device without making the host wait."""
        self._take(rounded(nbytes))
        self.give(rounded(nbytes))

    def give(self, size: int) -> None:
        with self.machine.lock:
            self.free[size] += 1

    def _take(self, size: int) -> None:
        with self.machine.lock:
            if self.free[size]:
                self.free[size] -= 1
            else:
                self.machine.must_not_wait("an allocation of pinned memory (cudaHostAlloc)")

    def n_free_blocks(self) -> int:
        return self.free.total()

    def free_all_blocks(self) -> None:
        with self.machine.lock:
            if self.n_free_blocks():
                self.machine.must_not_wait("freeing pinned memory (cudaFreeHost)")
            self.free.clear()


class _Pinned:
    pool: PinnedPool
    length: int

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self)  # type: ignore[arg-type]

    def __del__(self) -> None:
        self.pool.ends(self.ptr, self.length)


def rounded(nbytes: int) -> int:
    return 1 << (max(-(-nbytes // UNIT), 1) * UNIT - 1).bit_length()


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
