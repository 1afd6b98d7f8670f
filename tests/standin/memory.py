"""Memory of the made-up devices: pools with arenas, blocks with canaries, and what was written, read and by whom.

As CuPy's pool (cupy/cuda/memory.pyx, 14.2): sizes are rounded to 512 bytes; a freed block goes to the arena of the
stream that was current when it was allocated, and only allocations on that stream get it again; the smallest block that
fits is taken, and split; blocks that were split from one piece are merged again; `free_all_blocks` gives back pieces
that are whole. Each block in use is memory of its own here, between canaries, filled with bytes that are NaN in every
precision.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import Freed, Overrun, Unordered, Unwritten
from tests.standin.order import Access, Label, Line, label

if TYPE_CHECKING:
    from tests.standin.machine import Machine

UNIT = 512  # bytes
UNWRITTEN, CANARY = 0xFF, 0xC5
GUARD = 256  # bytes of canaries before a block, and at least as many behind it
LARGE = 1 << 20  # bytes
CANARIES = bytes([CANARY]) * (GUARD + UNIT)  # the most on one side


class OutOfMemoryError(MemoryError):
    """As CuPy's, with its text."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        limited = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{limited}).")


def _unwritten(size: int) -> NDArray[Any]:
    """Bytes that hold the pattern. Large ones are pages of a file, which are copied when they are written to."""
    if size < LARGE:
        return np.full(size, UNWRITTEN, np.uint8)
    mmap_, munmap = _mapping()
    file = _pages(-(-size // LARGE) * LARGE).fileno()
    address = mmap_(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise MemoryError(f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    pages = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(pages, munmap, address, size).atexit = False
    return np.frombuffer(pages, np.uint8)


@functools.cache
def _mapping() -> tuple[Any, Any]:
    """mmap and munmap of the C library: Python's own keeps a file open for each mapping."""
    library, size = ctypes.CDLL(None, use_errno=True), ctypes.c_size_t
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t]
    library.munmap.argtypes = [ctypes.c_void_p, size]
    return library.mmap, library.munmap


@functools.cache
def _pages(size: int) -> IO[bytes]:
    """A file of that many bytes of the pattern."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
    atexit.register(file.close)
    file.write(bytes([UNWRITTEN]) * size)
    file.flush()
    return file


class Chunk:
    """A stretch of a piece of device memory, in use or free.

    Attributes:
        size: bytes, a multiple of `UNIT`. nbytes: of them, requested.
        address, memory, guards: where it is, its bytes, and the canaries before and behind them; while it is in use.
        dtype: of the array that it was allocated for.
        written: byte -> whether an element that begins there was written; None where all are.
        writes, reads: (first byte, behind the last[, line]) -> the last such access.
    """

    def __init__(self, pool: DevicePool, whole: int, size: int, arena: list[Chunk]) -> None:
        self.pool, self.whole, self.size, self.arena = pool, whole, size, arena
        self.previous: Chunk | None = None
        self.next: Chunk | None = None
        self.live = False
        self.guards: tuple[memoryview, ...] = ()
        self.where: Label | None = None
        self.freed: Label | None = None

    def begin(self, nbytes: int, line: Line, dtype: Any, where: Label) -> None:
        """Take it into use, with nothing written."""
        self.nbytes, self.line, self.dtype, self.where, self.live = nbytes, line, dtype, where, True
        raw = _unwritten(self.size + 2 * GUARD + UNIT)
        start = GUARD + -(raw.__array_interface__["data"][0] + GUARD) % UNIT
        self.memory = raw[start : start + nbytes]
        self.guards = raw[:start].data, raw[start + nbytes : start + self.size + GUARD].data
        for guard in self.guards:
            guard[:] = CANARIES[: len(guard)]
        self.address: int = self.memory.__array_interface__["data"][0]
        self.written: NDArray[Any] | None = np.zeros(nbytes, bool)
        self.writes: dict[tuple[int, int], Access] = {}
        self.reads: dict[tuple[int, int, int], Access] = {}

    def intact(self, by: object) -> None:
        """Raise Overrun where canaries were overwritten; by: whose doing it must be."""
        for guard in self.guards:
            if not CANARIES.startswith(guard.tobytes()):
                guard[:] = CANARIES[: len(guard)]
                side = "before" if guard is self.guards[0] else "behind"
                raise Overrun(f"{by} has written {side} the memory of {self}")

    def usable(self, by: object) -> None:
        """Raise Freed where it was given back."""
        if not self.live:
            raise Freed(f"{by} uses {self}, which was freed by {self.freed}")

    def read(self, span: tuple[int, int], access: Access, machine: Machine) -> None:
        """Remember a read of these bytes; raise Unordered where a write is not known to be over."""
        self._after(self.writes, span, access, machine)
        self.reads[(*span, access.line.key)] = access

    def write(self, span: tuple[int, int], access: Access, machine: Machine) -> None:
        """Remember a write of these bytes; raise Unordered where a read or a write is not known to be over."""
        self._after(self.writes, span, access, machine)
        self._after(self.reads, span, access, machine)
        low, high = span
        self.writes = {key: old for key, old in self.writes.items() if key[0] < low or key[1] > high}
        self.reads = {key: old for key, old in self.reads.items() if key[0] < low or key[1] > high}
        self.writes[span] = access

    def _after(self, earlier: dict[Any, Access], span: tuple[int, int], access: Access, machine: Machine) -> None:
        low, high = span
        for key, old in earlier.items():
            if key[0] < high and low < key[1] and not machine.known(old, access.line):
                how = "writes" if earlier is self.writes else "reads"
                raise Unordered(
                    f"{access.label} on {access.line} and {old.label}, which {how} {self} on {old.line}, are not "
                    "ordered: record an event on one stream and let the other wait for it, or synchronize"
                )

    def all_read(self, view: NDArray[Any], by: Any) -> None:
        """Raise Unwritten if an element of `view` was never written."""
        if self.written is None:
            return
        if not self._marks(view).all():
            raise Unwritten(f"{by} reads {self}, of which nothing or not all was written")
        if view.size * view.itemsize == self.nbytes and 0 not in view.strides:
            self.written = None

    def all_written(self, view: NDArray[Any], *, unless_as_it_was: bool = False) -> None:
        """Every element of `view` is written now. unless_as_it_was: but for those that still hold the first pattern."""
        if self.written is None:
            return
        if unless_as_it_was and view.dtype.kind == "f":
            bits = view.view(f"u{view.itemsize}")
            self._marks(view)[bits != np.iinfo(bits.dtype).max] = True
        elif view.nbytes == self.nbytes and view.flags.c_contiguous:
            self.written = None
        else:
            self._marks(view)[...] = True

    def _marks(self, view: NDArray[Any]) -> NDArray[Any]:
        offset = view.__array_interface__["data"][0] - self.address
        assert self.written is not None
        return np.ndarray(view.shape, bool, self.written, offset, view.strides)

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of device {self.pool.device}, allocated at {self.where and self.where.place}"


@contextmanager
def collecting_later() -> Iterator[None]:
    """Keep Python's garbage collector from freeing arrays while the lists of blocks are being changed."""
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
        self.arenas: dict[int, list[Chunk]] = {}
        self.used: dict[int, Chunk] = {}  # by address
        self.total = self.in_use = 0

    def malloc(self, nbytes: int, line: Line, dtype: Any) -> Chunk:
        """A block for an array, from the line's arena or new."""
        size, arena = -(-nbytes // UNIT) * UNIT, self.arenas.setdefault(line.key, [])
        fitting = [chunk for chunk in arena if chunk.size >= size]
        if fitting:
            chunk = min(fitting, key=lambda each: each.size)
            arena.remove(chunk)
            self._split(chunk, size)
        else:
            self._grow(size)
            chunk = Chunk(self, size, size, arena)
        chunk.begin(nbytes, line, dtype, label("an allocation"))
        self.in_use += chunk.size
        self.used[chunk.address] = chunk
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Back to its arena; raises where another stream than that arena's may still use it."""
        where = label("the end of its last array")
        try:
            chunk.intact("something before the end of its last array")
            for earlier in () if self.machine.is_lost(self.device) else (chunk.writes, chunk.reads):
                for access in earlier.values():
                    if not self.machine.known(access, chunk.line):
                        raise Unordered(
                            f"{chunk} is freed by {where} for {chunk.line} while {access.label} on {access.line} may "
                            "still use it: let the one wait for the other, or synchronize, before the array is dropped"
                        )
        finally:
            chunk.live, chunk.freed = False, where
            del self.used[chunk.address]
            chunk.memory, chunk.guards = np.empty(0, np.uint8), ()
            self.in_use -= chunk.size
            chunk.arena.append(self._merged(chunk))

    def free_all_blocks(self) -> None:
        """Give back every piece that is whole and free."""
        for arena in self.arenas.values():
            whole = [chunk for chunk in arena if chunk.size == chunk.whole]
            if whole:
                self.machine.check_device(self.device)
                self.machine.must_not_wait("the end of device memory (cudaFree)")
            self.total -= sum(chunk.size for chunk in whole)
            arena[:] = [chunk for chunk in arena if chunk.size != chunk.whole]

    def n_free_blocks(self) -> int:
        """Free blocks of all arenas."""
        return sum(map(len, self.arenas.values()))

    def _grow(self, size: int) -> None:
        if self.limit and size > self.limit:
            raise OutOfMemoryError(size, self.total, self.limit)
        self.machine.check_device(self.device)
        for make_room in (self.free_all_blocks, self._collect, None):
            if self._fits(size):
                self.machine.must_not_wait("an allocation of device memory (cudaMalloc)")
                self.total += size
                return
            if make_room is not None:
                make_room()
        raise OutOfMemoryError(size, self.total, self.limit)

    def _collect(self) -> None:
        gc.collect()
        self.free_all_blocks()

    def _fits(self, size: int) -> bool:
        limited = self.limit and self.total + size > self.limit
        return not limited and self.machine.taken(self.device) + size <= self.machine.memory

    def _split(self, chunk: Chunk, size: int) -> None:
        if chunk.size == size:
            return
        rest = Chunk(self, chunk.whole, chunk.size - size, chunk.arena)
        rest.previous, rest.next, chunk.size = chunk, chunk.next, size
        if rest.next is not None:
            rest.next.previous = rest
        chunk.next = rest
        chunk.arena.append(rest)

    def _merged(self, chunk: Chunk) -> Chunk:
        """`chunk` with the free neighbours that it was once split from."""
        for one, other in ((chunk, chunk.next), (chunk.previous, chunk)):
            if one is None or other is None or one.live or other.live:
                continue
            for each in (one, other):
                if each in each.arena:
                    each.arena.remove(each)
            one.size, one.next = one.size + other.size, other.next
            if one.next is not None:
                one.next.previous = one
            chunk = one
        return chunk


class Memory:
    """What keeps a block in use: arrays hold it, and with the last of them it goes."""

    chunk: Chunk | None = None

    def __init__(self, chunk: Chunk | None) -> None:
        self.chunk = chunk

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return self.chunk.size if self.chunk is not None else 0

    def __del__(self) -> None:
        if self.chunk is not None:
            self.chunk.pool.machine.free(self.chunk)


class UnownedMemory(Memory):
    """A block that another array keeps in use, and an owner that lives as long as arrays over it do."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int) -> None:
        from tests.standin.machine import active

        machine, chunk = active(), None
        if size:
            with machine.lock:
                chunk, offset = machine.block(ptr, size, device_id, "UnownedMemory")
            if offset:
                raise Overrun(f"UnownedMemory begins {offset} bytes into {chunk}: the stand-in knows only whole blocks")
        super().__init__(chunk)
        self._owner = owner

    def __del__(self) -> None:
        pass


class MemoryPointer:
    """A place in a block."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.offset = mem, offset

    @property
    def ptr(self) -> int:
        """The address; 0 where there is no memory."""
        return self.mem.chunk.address + self.offset if self.mem.chunk is not None else 0

    @property
    def device_id(self) -> int:
        """The number of the device it is on."""
        return self.mem.chunk.pool.device if self.mem.chunk is not None else -1


class MemoryPool:
    """A pool for all devices: each method is for the device that is current."""

    def __init__(self) -> None:
        from tests.standin.machine import active

        self._machine = active()
        self._pools = [DevicePool(self._machine, device) for device in range(self._machine.devices)]
        self._machine.pools.append(self)

    def __iter__(self) -> Iterator[DevicePool]:
        return iter(self._pools)

    @property
    def here(self) -> DevicePool:
        """That of the device that is current."""
        return self._pools[self._machine.seat.device]

    def malloc(self, size: int, dtype: Any = None) -> MemoryPointer:
        """`size` bytes for the stream that is current."""
        if size == 0:
            return MemoryPointer(Memory(None), 0)
        with self._machine.lock, collecting_later():
            return MemoryPointer(Memory(self.here.malloc(size, self._machine.line, dtype)), 0)

    def free_all_blocks(self) -> None:
        """Give back what is not used."""
        with self._machine.lock:
            self.here.free_all_blocks()

    def n_free_blocks(self) -> int:
        """Blocks that are kept and not used."""
        return self.here.n_free_blocks()

    def used_bytes(self) -> int:
        """Of blocks in use."""
        return self.here.in_use

    def free_bytes(self) -> int:
        """Of blocks that are kept and not used."""
        return self.here.total - self.here.in_use

    def total_bytes(self) -> int:
        """Of both."""
        return self.here.total

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """The most bytes of both; 0 for no limit."""
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"memory limit fraction out of range: {fraction}")
        if size is not None and size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self.here.limit = int(fraction * self._machine.memory) if fraction is not None else int(size or 0)

    def get_limit(self) -> int:
        """The most bytes of both; 0 for no limit."""
        return self.here.limit
