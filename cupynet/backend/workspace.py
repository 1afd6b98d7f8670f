"""Buffers that are lent and taken back, so that training in its steady state allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from cupynet.backend.array import Array

Key: TypeAlias = tuple[tuple[int, ...], Any]


class Workspace:
    """A pool of buffers of one replica; not for sharing between threads.

    A buffer is known by its address, so a reshaped view of it may be given back in its place. The leading axis of a
    buffer may be longer than what was asked for: the short last batch of an epoch reuses the buffers of the full ones.

    Args:
        allocate: makes a buffer, `allocate(shape, dtype)`.
        address: the address of an array's first element.
    """

    def __init__(self, allocate: Callable[[tuple[int, ...], Any], Array], address: Callable[[Array], int]) -> None:
        self._allocate = allocate
        self._address = address
        self._free: dict[Key, list[Array]] = {}
        self._lent: dict[int, tuple[Key, Array]] = {}
        self.allocated_bytes = 0

    @property
    def on_loan(self) -> int:
        """How many buffers are lent at the moment; 0 between training steps."""
        return len(self._lent)

    def borrow(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of `shape` with arbitrary content; the shortest buffer that fits, of several the most recently
        returned, still warm in the cache. (A longer one may be needed by the next who asks.)
        """
        key = (shape[1:], dtype)
        free = self._free.get(key, [])
        best = -1
        for i in range(len(free) - 1, -1, -1):
            if free[i].shape[0] >= shape[0] and (best < 0 or free[i].shape[0] < free[best].shape[0]):
                best = i
        if best >= 0:
            buffer = free.pop(best)
        else:
            buffer = self._allocate(shape, dtype)
            self.allocated_bytes += buffer.nbytes
        self._lent[self._address(buffer)] = (key, buffer)
        return buffer if buffer.shape[0] == shape[0] else buffer[: shape[0]]

    def give_back(self, *arrays: Array | None) -> None:
        """Take arrays back; None and arrays that were never borrowed (a user's own input) are left alone."""
        for array in arrays:
            if array is None:
                continue
            entry = self._lent.pop(self._address(array), None)
            if entry is not None:
                self._free.setdefault(entry[0], []).append(entry[1])
