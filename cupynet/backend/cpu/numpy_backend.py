from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.policy import DtypePolicy


class NumpyBackend(Backend):
    name = "numpy"
    xp = np

    def __init__(self, dtype: str = "float", device: int = 0) -> None:
        super().__init__(DtypePolicy.of(dtype), device)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array aligned to 64 bytes, for vector loads."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = np.empty(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + nbytes].view(dtype).reshape(shape)

    def data_ptr(self, array: Array) -> int:
        return int(array.__array_interface__["data"][0])

    def to_host(self, array: Array) -> Any:
        return array
