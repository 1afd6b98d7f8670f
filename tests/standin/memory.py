"""Memory of simulated devices: pools, blocks, and which operations wrote and read which bytes.

As in CuPy's pool (cupy/cuda/memory.pyx, 14.2) sizes are rounded to 512 bytes, and a freed block is kept for the stream
that was current when it was allocated. Here an allocation reuses only blocks of equal size; none is split. Each block
in use has its own memory, filled with bytes that are NaN in every precision. The sanitizers find accesses beyond it
(tests/backend/cuda/test_sanitized.py).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import Freed, Unordered, Unwritten
from tests.standin.host import SANITIZED
from tests.standin.order import Access, Label, Line, label

if TYPE_CHECKING:
    from tests.standin.machine import Machine

UNIT = 512  # bytes
UNWRITTEN = 0xFF


class OutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class Chunk:
    """A block of device memory in use.

    It was allocated for `nbytes` bytes of an array of this dtype, on the stream `line`.
    """

    def __init__(self, pool: DevicePool, nbytes: int, line: Line, dtype: Any) -> None:
        self.pool, self.nbytes, self.line, self.dtype = pool, nbytes, line, dtype
        self.size = rounded(nbytes)  # a multiple of UNIT
        self.where = label("an allocation")
        self.freed: Label | None = None
        raw = np.full(nbytes if SANITIZED else self.size + UNIT, UNWRITTEN, np.uint8)
        start = 0 if SANITIZED else -raw.__array_interface__["data"][0] % UNIT  # or else it ends where its memory ends
        self.memory = raw[start : start + nbytes]
        self.address: int = self.memory.__array_interface__["data"][0]
        # byte -> whether an element that starts there was written; None if all were
        self.written: NDArray[Any] | None = np.zeros(nbytes, bool)
        self.writes: dict[tuple[int, int], Access] = {}  # (first byte, end) -> the last such access
        self.reads: dict[tuple[int, int, int], Access] = {}  # the same by line

    def end(self, where: Label) -> None:
        self.freed, self.memory = where, np.empty(0, np.uint8)

    def read(self, span: tuple[int, int], access: Access) -> None:
        """Record a read of these bytes; raise Freed, or Unordered if an earlier write may still be running."""
        self._after(self.writes, span, access)
        self.reads[span[0], span[1], access.line.key] = access

    def write(self, span: tuple[int, int], access: Access) -> None:
        """Record a write of these bytes; raise Freed, or Unordered if an earlier access may still be running."""
        self._after(self.writes, span, access)
        self._after(self.reads, span, access)
        low, high = span
        self.writes = {key: old for key, old in self.writes.items() if key[0] < low or key[1] > high}
        self.reads = {key: old for key, old in self.reads.items() if key[0] < low or key[1] > high}
        self.writes[span] = access

    def _after(self, earlier: dict[Any, Access], span: tuple[int, int], access: Access) -> None:
        if self.freed is not None:
            raise Freed(f"{access.label} uses {self}, which was freed by {self.freed}")
        low, high = span
        for (start, stop, *_), old in earlier.items():
            if start < high and low < stop and not self.pool.machine.known(old, access.line):
                raise Unordered(
                    f"{access.label} on {access.line} and {old.label} on {old.line} are not ordered, and use {self}: "
                    "record an event on one stream and make the other wait for it, or synchronize"
                )

    def must_be_written(self, view: NDArray[Any], by: Label) -> None:
        """Raise Unwritten if an element of `view` was never written."""
        if self.written is None:
            return
        if not self._marks(view).all():
            raise Unwritten(f"{by} reads {self}, of which some or all was never written")
        if view.nbytes == self.nbytes and 0 not in view.strides:
            self.written = None

    def mark_written(self, view: NDArray[Any], *, only_changed: bool = False) -> None:
        """Mark every element of `view` as written, or only those that no longer hold the initial pattern."""
        if self.written is None:
            return
        if only_changed and view.dtype.kind == "f":
            bits = view.view(f"u{view.itemsize}")
            self._marks(view)[bits != np.iinfo(bits.dtype).max] = True
        elif view.nbytes == self.nbytes and view.flags.c_contiguous:
            self.written = None
        else:
            self._marks(view)[...] = True

    def _marks(self, view: NDArray[Any]) -> NDArray[Any]:
        offset = view.__array_interface__["data"][0] - self.address
        assert self.written is not None
        marks: NDArray[Any] = np.ndarray(view.shape, bool, self.written, offset, view.strides)
        return marks

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of device {self.pool.device}, allocated at {self.where.place}"


@contextmanager
def collecting_later() -> Iterator[None]:
    """Prevent Python's garbage collector from freeing arrays while a pool changes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DevicePool:
    """The pool of one device."""

    def __init__(self, machine: Machine, device: int) -> None:
        self.machine, self.device, self.limit = machine, device, 0
        self.kept: Counter[tuple[int, int]] = Counter()  # (line key, size) -> number of free blocks
        self.used: dict[int, Chunk] = {}  # blocks in use by address
        self.total = self.in_use = 0

    def malloc(self, nbytes: int, line: Line, dtype: Any) -> Chunk:
        """Return a block for the line: a free one or a new one."""
        key = line.key, rounded(nbytes)
        if self.kept[key]:
            self.kept[key] -= 1
        else:
            self._grow(rounded(nbytes))
        chunk = Chunk(self, nbytes, line, dtype)
        self.in_use += chunk.size
        self.used[chunk.address] = chunk
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Keep a block for its line. Raise Unordered if another line may still use it."""
        where = label("the end of its last array")
        try:
            accesses = [] if self.machine.is_lost(self.device) else [*chunk.writes.values(), *chunk.reads.values()]
            for access in accesses:
                if not self.machine.known(access, chunk.line):
                    raise Unordered(
                        f"{chunk} is freed by {where} for {chunk.line} while {access.label} on {access.line} may still "
                        "use it: make one stream wait for the other, or synchronize, before the array is dropped"
                    )
        finally:
            del self.used[chunk.address]
            chunk.end(where)
            self.in_use -= chunk.size
            self.kept[chunk.line.key, chunk.size] += 1

    def free_all_blocks(self) -> None:
        if self.kept.total():
            self.machine.check_device(self.device)
            self.machine.must_not_wait("freeing device memory (cudaFree)")
        self.total = self.in_use
        self.kept.clear()

    def _grow(self, size: int) -> None:
        self.machine.check_device(self.device)
        for make_room in (self.free_all_blocks, gc.collect, self.free_all_blocks):
            if not self._has_room(size):
                make_room()
        if not self._has_room(size):
            raise OutOfMemoryError(size, self.total)
        self.machine.must_not_wait("an allocation of device memory (cudaMalloc)")
        self.total += size

    def _has_room(self, size: int) -> bool:
        limited = self.limit and self.total + size > self.limit
        return not limited and self.machine.taken(self.device) + size <= self.machine.memory


class Memory:
    """Keeps a block in use as long as arrays refer to it."""

    chunk: Chunk | None = None

    def __init__(self, chunk: Chunk | None) -> None:
        self.chunk = chunk

    def __del__(self) -> None:
        if self.chunk is not None:
            self.chunk.pool.machine.free(self.chunk)


class UnownedMemory(Memory):
    """A whole block that another array keeps in use. Arrays over it also keep `owner` alive."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int) -> None:
        from tests.standin.machine import active

        chunk = None
        if size:
            with active().lock:
                span = active().span(ptr, size, device_id, "UnownedMemory")
            chunk = span.chunk
            assert span.bytes == (0, chunk.nbytes), "the stand-in knows only whole blocks"
        super().__init__(chunk)
        self._owner = owner

    def __del__(self) -> None:
        pass


class MemoryPointer:
    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.offset = mem, offset

    @property
    def ptr(self) -> int:
        return self.mem.chunk.address + self.offset if self.mem.chunk is not None else 0


class MemoryPool:
    """The default pool. Each method acts on the current device."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.devices = [DevicePool(machine, device) for device in range(machine.devices)]

    @property
    def _here(self) -> DevicePool:
        return self.devices[self._machine.seat.device]

    def malloc(self, size: int, dtype: Any = None) -> MemoryPointer:
        if size == 0:
            return MemoryPointer(Memory(None), 0)
        with self._machine.lock, collecting_later():
            return MemoryPointer(Memory(self._here.malloc(size, self._machine.line, dtype)), 0)

    def free_all_blocks(self) -> None:
        with self._machine.lock, collecting_later():
            self._here.free_all_blocks()

    def used_bytes(self) -> int:
        return self._here.in_use

    def free_bytes(self) -> int:
        return self._here.total - self._here.in_use

    def total_bytes(self) -> int:
        return self._here.total

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        self._here.limit = int(fraction * self._machine.memory) if fraction is not None else int(size or 0)

    def get_limit(self) -> int:
        return self._here.limit


def rounded(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT
