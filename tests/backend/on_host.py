"""What CupyBackend needs of CuPy, on the CPU: NumPy's arrays with the words of CuPy's, and the kernels of the .cu files
compiled by g++.

Everything happens at once and on one device. So it tests what is computed, and not where or when.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from cupynet.backend.cuda.launch import FOLDER, source
from tests.standin.host import HostKernel, host_library


class HostArray(np.ndarray):
    """An array of NumPy that answers as one of CuPy where the backend asks. `number`: of its device."""

    number = 0

    def __array_finalize__(self, made_of: Any) -> None:
        self.number = getattr(made_of, "number", 0)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=self.number)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])


def empty(shape: Any, dtype: Any = float) -> Any:
    """Aligned as CuPy's are; full of something that is no result."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.full(count + 512, 0x7B, np.uint8)
    start = -raw.ctypes.data % 512
    return raw[start : start + count].view(dtype).reshape(shape).view(HostArray)


def asarray(array: Any, dtype: Any = None) -> Any:
    if isinstance(array, HostArray) and dtype in (None, array.dtype):
        return array
    plain = np.asarray(array, dtype)
    made = empty(plain.shape, plain.dtype)
    made[...] = plain
    return made


def asnumpy(array: Any) -> Any:
    return np.array(array, subok=False)


class RawModule:
    """The kernels of a .cu file, known by its text."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        (path,) = [path for path in FOLDER.glob("*.cu") if source(path.stem) == code]
        self._kernels = host_library(path)

    def get_function(self, name: str) -> HostKernel:
        return self._kernels[name]


class OnHost(ModuleType):
    """In place of the module `cupy`."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.empty, self.asarray, self.asnumpy, self.RawModule = empty, asarray, asnumpy, RawModule
        self.ndarray = HostArray
        self.cuda = SimpleNamespace(Device=lambda number: nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
