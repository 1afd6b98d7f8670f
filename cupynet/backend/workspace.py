"""Pool of buffers that are returned automatically, so that a steady-state training step allocates no memory.

A borrowed array and all its views reference a `Loan`. When the last reference is dropped, the buffer returns to its
pool. Borrowed arrays must therefore not be part of reference cycles, such as a closure that references itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeAlias

from cupynet.backend.array import Array

Key: TypeAlias = "tuple[tuple[int, ...], Any]"
Allocate: TypeAlias = "Callable[[tuple[int, ...], Any], Array]"
Lend: TypeAlias = "Callable[[Buffer, tuple[int, ...], Loan], Array]"


class ThreadWorkspaces(threading.local):
    """One `Workspace` per thread, without a lock, freed when the thread ends."""

    def __init__(self, allocator: Callable[[], Allocate], lend: Lend) -> None:
        self.current = Workspace(allocator(), lend)  # `threading.local` calls this once per thread


class Buffer:
    """One buffer of a pool: an array that nothing else references. interface: the array's NumPy array interface."""

    __slots__ = ("interface", "key", "memory", "rows")

    def __init__(self, memory: Array, key: Key) -> None:
        self.memory, self.key, self.rows = memory, key, memory.shape[0]
        interface = getattr(memory, "__array_interface__", None)
        self.interface = interface and {name: interface[name] for name in ("data", "typestr", "shape", "version")}


class Loan:
    """Owner of a borrowed array's memory, for NumPy or CuPy. Deleting it returns the buffer."""

    __slots__ = ("__array_interface__", "_buffer", "_workspace")

    def __init__(self, buffer: Buffer, workspace: Workspace) -> None:
        self.__array_interface__ = buffer.interface
        self._buffer, self._workspace = buffer, workspace

    def __del__(self) -> None:
        self._workspace.take(self._buffer)


class Workspace:
    """Pool of buffers for one thread. A smaller last batch reuses the buffers of full batches."""

    def __init__(self, allocate: Allocate, lend: Lend) -> None:
        self._allocate, self._lend = allocate, lend
        self._thread = get_ident()
        self._free: dict[Key, list[Buffer]] = {}
        self._returned_elsewhere: deque[Buffer] = deque()  # returned by other threads
        self._captures = False
        self._count = 0
        self.allocated_bytes = 0

    @property
    def on_loan(self) -> int:
        """Number of buffers on loan; 0 between training steps."""
        free = sum(map(len, self._free.values()))
        return self._count - free - len(self._returned_elsewhere)

    def borrow(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialized array in the smallest buffer that fits; of equal buffers, the one returned last."""
        while self._returned_elsewhere and not self._captures:
            buffer = self._returned_elsewhere.popleft()
            self._free[buffer.key].append(buffer)
        key = (shape[1:], dtype)
        free = self._free.setdefault(key, [])
        best, rows, length = -1, shape[0], -1
        for i in range(len(free) - 1, -1, -1):
            buffer_rows = free[i].rows
            if buffer_rows >= rows and (best < 0 or buffer_rows < length):
                best, length = i, buffer_rows
        if best >= 0:
            buffer = free.pop(best)
        else:
            outgrown = {buffer.rows for buffer in free}
            # batches keep growing: allocate extra rows, so that few outgrown buffers pile up
            if len(outgrown) > 1 and len(shape) > 1:
                rows = max(rows, 3 * max(outgrown) // 2)
            buffer = Buffer(self._allocate((rows, *shape[1:]), dtype), key)
            self.allocated_bytes += buffer.memory.nbytes
            self._count += 1
        return self._lend(buffer, shape, Loan(buffer, self))

    def take(self, buffer: Buffer) -> None:
        """Take a buffer back. Any thread may call this at any time, so it takes no locks and makes no device calls."""
        if get_ident() == self._thread:
            self._free[buffer.key].append(buffer)
        else:
            self._returned_elsewhere.append(buffer)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context manager in which buffers returned by other threads (which another stream may use) stay unused."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False
