"""Matrix products with cuBLAS, called through ctypes.

CuPy's matrix product cannot be captured in a CUDA graph, rounds products of float16 numbers to float16, and cannot
accumulate into its output.

Results are reproducible with the same version of cuBLAS, on GPUs with the same architecture and number of
multiprocessors, if streams do not share a workspace (NVIDIA, cuBLAS manual, "Results Reproducibility"). Here, each
handle has one stream and one workspace.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.core.wording import one_line

# from cublas_api.h: functions that return a status, and their parameter types
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int
_OPERAND = (_ADDRESS, _INT, _INT)  # address, type and leading dimension
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cublasSetStream_v2": (_ADDRESS, _ADDRESS),
    "cublasSetWorkspace_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t),
    "cublasSetMathMode": (_ADDRESS, _INT),
    "cublasGemmEx": (
        _ADDRESS, _INT, _INT, _INT, _INT, _INT, _ADDRESS, *_OPERAND, *_OPERAND, _ADDRESS, *_OPERAND, _INT, _INT,
    ),
}  # fmt: skip
NOT_TRANSPOSED, TRANSPOSED = 0, 1  # cublasOperation_t
TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType
IN_FLOAT, IN_DOUBLE, IN_TF32 = 68, 70, 77  # cublasComputeType_t: accumulation precision
DEFAULT_ALGORITHM = -1  # cublasGemmAlgo_t: cuBLAS chooses the algorithm
SUMS_NEVER_IN_HALF = 16  # cublasMath_t: partial sums are added in float, even if the result is half

# supported dtypes of the factors and of the result
PRODUCTS = {
    *(("float16", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")),
    *(("float32", "float32"), ("float64", "float64")),
}
MIB = 1 << 20


class CublasError(RuntimeError):
    """A failed cuBLAS call. The message names the call and the status."""


class Library:
    """The functions of libcublas, and a pool of unused handles.

    Handles are never destroyed. Destroying one waits for all work on the device, and would deadlock if the garbage
    collector triggered it during a collective or a graph capture.
    """

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._unused: dict[int, deque[int]] = {}  # unused handles by device
        loaded.cublasGetStatusName.argtypes, loaded.cublasGetStatusName.restype = (_INT,), ctypes.c_char_p
        for name, parameters in PROTOTYPES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = parameters, _INT

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function in `PROTOTYPES`. Raise CublasError if it fails."""
        status = getattr(self._loaded, name)(*arguments)
        if status:
            raise CublasError(f"{name}: {self._loaded.cublasGetStatusName(status).decode()}")

    def handle(self, device: int) -> int:
        try:
            return self._unused[device].pop()
        except (KeyError, IndexError):
            created = ctypes.c_void_p()
            self.call("cublasCreate_v2", ctypes.byref(created))
            return int(created.value or 0)

    def leave(self, device: int, handle: int) -> None:
        self._unused.setdefault(device, deque()).append(handle)


@cache
def library(cuda: int) -> Library:
    """Load cuBLAS for CUDA 12 or 13 from NVIDIA's wheels or a toolkit, as CuPy does, or from the library path."""
    path = f"libcublas.so.{cuda}"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cublas").abs_path or path
    except (ImportError, RuntimeError):
        pass
    try:
        return Library(ctypes.CDLL(path))
    except OSError as error:
        raise ConfigError(
            f"cuBLAS cannot be loaded ({one_line(error)}). Run pip install 'cupy-cuda{cuda}x[ctk]', or add the folder "
            "of the toolkit's libraries to LD_LIBRARY_PATH"
        ) from error


def workspace_bytes(device: Any) -> int:
    """Return the workspace size that NVIDIA recommends for a device's architecture."""
    return (32 if int(device.compute_capability) >= 90 else 4) * MIB


class Cublas:
    """Matrix products on the current device and stream. Not thread-safe.

    The constructor allocates device memory, which must not happen during a collective or a capture in another thread.
    Captured graphs use the workspace, so they must not outlive this object.
    """

    def __init__(self, xp: ModuleType, *, tf32: bool = False) -> None:
        device = xp.cuda.Device()
        self._device, self.stream = int(device.id), int(xp.cuda.get_current_stream().ptr)
        self._library = library(int(xp.cuda.runtime.runtimeGetVersion()) // 1000)
        self._workspace = xp.empty(workspace_bytes(device), np.uint8)
        self._handle = self._library.handle(self._device)
        weakref.finalize(self, self._library.leave, self._device, self._handle)
        self._library.call("cublasSetStream_v2", self._handle, self.stream)  # first, because it resets the workspace
        size = int(self._workspace.nbytes)
        self._library.call("cublasSetWorkspace_v2", self._handle, self._workspace.data.ptr, size)
        self._library.call("cublasSetMathMode", self._handle, SUMS_NEVER_IN_HALF)
        self._tf32 = tf32

    def gemm(self, left: Array, right: Array, out: Array, *, beta: float = 0.0) -> None:
        """Compute out = left @ right + beta · out. If beta is 0, the previous content of `out` is ignored.

        left (M, K) and right (K, N) have the same dtype; `out` (M, N) has that dtype too, or float for 16-bit factors.
        Arrays are contiguous and do not overlap. Sums are accumulated in float, or in double for double inputs.
        """
        factor, result, double = left.dtype.name, out.dtype.name, left.dtype == np.float64
        self._check(left, right, out, known=left.dtype == right.dtype and (factor, result) in PRODUCTS)
        compute = IN_DOUBLE if double else IN_TF32 if self._tf32 and factor == "float32" else IN_FLOAT
        scalar = ctypes.c_double if double else ctypes.c_float
        (rows, inner), columns = left.shape, right.shape[1]
        # cuBLAS is column-major, so compute out.T = right.T @ left.T
        first, second = _layout(right), _layout(left)
        self._library.call(
            "cublasGemmEx", self._handle, first[0], second[0], columns, rows, inner,
            ctypes.byref(scalar(1)), right.data.ptr, TYPES[factor], first[1], left.data.ptr, TYPES[factor], second[1],
            ctypes.byref(scalar(beta)), out.data.ptr, TYPES[result], columns, compute, DEFAULT_ALGORITHM,
        )  # fmt: skip

    def _check(self, left: Array, right: Array, out: Array, *, known: bool) -> None:
        """Raise ConfigError for arrays that cuBLAS would misread. known: True if their dtypes are in `PRODUCTS`."""
        shapes_match = left.shape[1] == right.shape[0] and out.shape == (left.shape[0], right.shape[1])
        contiguous = out.flags.c_contiguous and all(a.flags.c_contiguous or a.flags.f_contiguous for a in (left, right))
        if not (known and shapes_match and contiguous):
            shapes = ", ".join(f"{array.shape} {array.dtype}" for array in (left, right, out))
            raise ConfigError(f"cannot multiply {shapes}: expected contiguous (M, K), (K, N), (M, N) of one dtype")


def _layout(array: Array) -> tuple[int, int]:
    """Return the cuBLAS operation and the leading dimension for a row-major matrix."""
    rows, columns = array.shape
    return (NOT_TRANSPOSED, columns) if array.flags.c_contiguous else (TRANSPOSED, rows)
