"""Buffers that are borrowed and returned, so that a steady-state training step allocates nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeAlias

from cupynet.backend.array import Array

Key: TypeAlias = tuple[tuple[int, ...], Any]


class ThreadWorkspaces(threading.local):
    """A `Workspace` for each thread, so that no lock is needed; the buffers of a thread are freed when it ends.

    Prediction may run in other threads while a model is trained.
    """

    def __init__(self, allocate: Callable[[tuple[int, ...], Any], Array], address: Callable[[Array], int]) -> None:
        self.current = Workspace(allocate, address)  # `threading.local` calls this once in each thread


class Workspace:
    """A pool of buffers for one thread.

    A buffer is identified by its address, so a reshaped view of it may be returned instead. A buffer may be longer than
    the borrowed array along the first axis: the short last batch of an epoch reuses the buffers of full batches.

    Args:
        allocate: makes a buffer, `allocate(shape, dtype)`.
        address: returns the address of an array's first element.

    Attributes:
        allocated_bytes: of all buffers, lent or not.
        lent: the number of loans so far, and of the next one.
    """

    def __init__(self, allocate: Callable[[tuple[int, ...], Any], Array], address: Callable[[Array], int]) -> None:
        self._allocate = allocate
        self._address = address
        self._free: dict[Key, list[tuple[Array, int]]] = {}  # with their addresses, which are slow to get
        self._lent: dict[int, tuple[Key, Array, int]] = {}  # by address
        self._whole: dict[int, int] = {}  # id of a lent buffer -> its address; a view of it has another id
        self.allocated_bytes = 0
        self.lent = 0

    @property
    def on_loan(self) -> int:
        """The number of buffers on loan; 0 between training steps."""
        return len(self._lent)

    def borrow(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array of `shape` with arbitrary content.

        Takes the shortest free buffer that fits, since a later loan may need a longer one; of equally long ones the
        last returned, which is still in the cache.
        """
        key = (shape[1:], dtype)
        free = self._free.get(key, [])
        best, rows, length = -1, shape[0], -1
        for i in range(len(free) - 1, -1, -1):
            there = free[i][0].shape[0]
            if there >= rows and (best < 0 or there < length):
                best, length = i, there
        if best >= 0:
            buffer, address = free.pop(best)
        else:
            buffer = self._allocate(shape, dtype)
            address, length = self._address(buffer), rows
            self.allocated_bytes += buffer.nbytes
        self._lent[address] = (key, buffer, self.lent)
        self._whole[id(buffer)] = address
        self.lent += 1
        return buffer if length == rows else buffer[:rows]

    def give_back(self, *arrays: Array | None) -> None:
        """Return arrays; None and arrays that were not borrowed, such as a user's input, are ignored."""
        for array in arrays:
            if array is None:
                continue
            address = self._whole.pop(id(array), None)
            address = self._address(array) if address is None else address
            entry = self._lent.pop(address, None)
            if entry is not None:
                key, buffer, _ = entry
                self._whole.pop(id(buffer), None)
                self._free.setdefault(key, []).append((buffer, address))

    def reclaim(self, loans: list[range]) -> None:
        """Return those of the loans with these numbers that are still outstanding."""
        for _, buffer, number in list(self._lent.values()):
            if any(number in some for some in loans):
                self.give_back(buffer)


class Loans:
    """A context that returns its outstanding loans if it ends with an exception.

    It may be entered more than once: a backward pass enters the context of its forward pass, so that the loans of both
    are returned. Loans made in between are not affected.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._ranges: list[range] = []
        self._first = 0

    def end(self) -> None:
        """Return its outstanding loans, for a pass that is abandoned."""
        self._workspace.reclaim([*self._ranges, range(self._first, self._workspace.lent)])

    def __enter__(self) -> Loans:
        self._first = self._workspace.lent
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ranges.append(range(self._first, self._workspace.lent))
        if error is not None:
            self._workspace.reclaim(self._ranges)
