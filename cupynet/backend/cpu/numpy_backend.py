from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.workspace import Allocate


class Slabs:
    """Allocates arrays aligned to 64 bytes in slabs, whose memory is freed with their last array.

    For large allocations, NumPy asks Linux for huge pages, which avoid TLB misses. Pages that are never written take no
    memory. The first slab is small, because many threads need little memory.
    """

    FIRST, SIZE = 1 << 20, 64 << 20

    def __init__(self) -> None:
        self._next = self.FIRST  # size of the next slab
        self._rest = _aligned(0)  # the unused part of the newest slab

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        nbytes = _bytes_of(shape, dtype)
        # with a gap, because arrays whose sizes are powers of two would otherwise start in the same cache set
        size = nbytes // 64 * 64 + 128
        if size > self.SIZE:
            memory = _aligned(nbytes)
        else:
            if size > len(self._rest):
                self._rest = _aligned(self._next if size <= self._next else self.SIZE)
                self._next = self.SIZE
            memory, self._rest = self._rest[:nbytes], self._rest[size:]
        return memory.view(dtype).reshape(shape)


class NumpyBackend(Backend):
    name = "numpy"
    xp = np

    def __init__(self, dtype: str = "float", device: int = 0) -> None:
        super().__init__(DtypePolicy.of(dtype), device)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array aligned to 64 bytes, for vector loads."""
        return _aligned(_bytes_of(shape, dtype)).view(dtype).reshape(shape)

    def allocator(self) -> Allocate:
        return Slabs().allocate

    def data_ptr(self, array: Array) -> int:
        return int(array.__array_interface__["data"][0])

    def to_host(self, array: Array) -> Any:
        return array


def _aligned(nbytes: int) -> Array:
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def _bytes_of(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(np.dtype(dtype).itemsize)
