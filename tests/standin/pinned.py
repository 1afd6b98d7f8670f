"""Pinned memory of the host, as CuPy's pool has it (cupy/cuda/pinned_memory.pyx, 14.2).

Sizes are powers of two, of 512 bytes at least, and all that is freed is kept until `free_all_blocks`.

A copy between it and a device is made later than it is asked for. What is sent must not change before the stream has
been waited for, which is looked at then; what is fetched is NaN before, and comes then.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import Unordered
from tests.standin.order import Label, Line

if TYPE_CHECKING:
    from tests.standin.machine import Machine

UNIT = 512  # bytes


class Flight(NamedTuple):
    """A copy that is on its way since operation `count` of a line; `host` is where it comes from, or goes to."""

    line: Line
    count: int
    where: Label
    host: NDArray[Any]
    content: NDArray[Any]
    arrives: bool


class PinnedPool:
    """The one pool: free blocks are counts by size, as a host's memory needs no arena."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.free: dict[int, int] = {}
        self.used: dict[int, int] = {}  # address -> size
        self.flights: list[Flight] = []

    def malloc(self, nbytes: int) -> Any:
        """Memory that NumPy can look at: `numpy.frombuffer(pointer, dtype, count)`."""
        size = rounded(nbytes)
        self._take(size)
        kind = type("PinnedMemoryPointer", (_Pinned, ctypes.c_char * size), {"pool": self, "length": size})
        pointer = kind()
        self.used[pointer.ptr] = size
        return pointer

    def holds(self, host: NDArray[Any]) -> bool:
        """Return True if an array is in it."""
        address = host.__array_interface__["data"][0]
        return any(start <= address < start + size for start, size in list(self.used.items()))

    def flies(self, line: Line, where: Label, host: NDArray[Any], content: NDArray[Any], *, arrives: bool) -> None:
        """Note a copy to the device, or one that arrives on the host.

        Only the address of the host's memory is kept, as by the device: freeing it too soon is a misuse.
        """
        address = host.__array_interface__["data"][0]
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * host.nbytes).from_address(address))
        if arrives:
            raw[...] = 0xFF
        content = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self.flights.append(Flight(line, line.count, where, raw, content, arrives))

    def settle(self) -> None:
        """Look at the copies that are known to be over."""
        done = self.machine.done
        over = [each for each in self.flights if each.count <= done.get(each.line.key, 0)]
        self.flights = [each for each in self.flights if not any(each is one for one in over)]
        for flight in over:
            if flight.arrives:
                flight.host[...] = flight.content
            elif flight.host.tobytes() != flight.content.tobytes():
                misuse = Unordered(
                    f"pinned memory has changed while {flight.where} was on its way from there: synchronize, or wait "
                    "for an event, before it is written again"
                )
                self.machine.keep(misuse)
                raise misuse

    def ends(self, address: int, size: int) -> None:
        """Memory is given back: never raises, but keeps what it found."""
        with self.machine.lock:
            self.used.pop(address, None)
            over = [each for each in self.flights if address <= each.host.ctypes.data < address + size]
            self.flights = [each for each in self.flights if not any(each is one for one in over)]
        for flight in over:
            self.machine.keep(
                Unordered(
                    f"pinned memory is given back while {flight.where} was on its way: synchronize, or wait for an "
                    "event, before its last array is dropped"
                )
            )

    def staged(self, nbytes: int) -> None:
        """What a copy to the device takes for a while, so that it need not wait."""
        size = rounded(nbytes)
        self._take(size)
        self.give(size)

    def give(self, size: int) -> None:
        """A block is free."""
        with self.machine.lock:
            self.free[size] = self.free.get(size, 0) + 1

    def _take(self, size: int) -> None:
        with self.machine.lock:
            if self.free.get(size):
                self.free[size] -= 1
            else:
                self.machine.must_not_wait("an allocation of pinned memory (cudaHostAlloc)")

    def n_free_blocks(self) -> int:
        """Blocks that are kept and not used."""
        return sum(self.free.values())

    def free_all_blocks(self) -> None:
        """Give them back."""
        with self.machine.lock:
            if self.n_free_blocks():
                self.machine.must_not_wait("the end of pinned memory (cudaFreeHost)")
            self.free.clear()


class _Pinned:
    """A block in use."""

    pool: PinnedPool
    length: int

    @property
    def ptr(self) -> int:
        """Its address."""
        return ctypes.addressof(self)  # type: ignore[arg-type]

    def size(self) -> int:
        """Bytes of the block, which may be more than were requested."""
        return self.length

    def __del__(self) -> None:
        self.pool.ends(self.ptr, self.length)
        self.pool.give(self.length)


def rounded(nbytes: int) -> int:
    """The size of the block for so many bytes."""
    return 1 << (max(-(-nbytes // UNIT), 1) * UNIT - 1).bit_length()
