"""Pinned memory of the host, as CuPy's pool has it: sizes are powers of two, and all that is freed is kept."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.standin.machine import Machine

UNIT = 512  # bytes


class PinnedPool:
    """The one pool: free blocks are counts by size, as a host's memory needs no arena."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.free: dict[int, int] = {}

    def malloc(self, nbytes: int) -> Any:
        """Memory that NumPy can look at: `numpy.frombuffer(pointer, dtype, count)`."""
        size = rounded(nbytes)
        self._take(size)
        kind = type("PinnedMemoryPointer", (_Pinned, ctypes.c_char * size), {"pool": self, "length": size})
        return kind()

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
        """Bytes of the block, which may be more than were asked for."""
        return self.length

    def __del__(self) -> None:
        self.pool.give(self.length)


def rounded(nbytes: int) -> int:
    """The size of the block for so many bytes."""
    return 1 << (max(-(-nbytes // UNIT), 1) * UNIT - 1).bit_length()
