"""2-D products on a GPU: cuBLAS, called through ctypes.

CuPy's own product cannot be recorded in a CUDA graph, rounds what it makes of halves to half, and adds to nothing that
is there. cuBLAS does all three, and CuPy brings it along.

What cuBLAS promises of repetition: with one version of it, on GPUs of one architecture with as many multiprocessors,
the same call makes the same bits, as long as no two streams share a workspace. A handle here has one stream and a
workspace of its own, so a run repeats; a recorded product is the product that was recorded. Results of another GPU or
another version may differ in their last bits. (NVIDIA, cuBLAS manual, "Results Reproducibility".)
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
from cupynet.backend.policy import stored_dtype
from cupynet.core.checks import one_line
from cupynet.core.errors import ConfigError

# Of cublas_api.h: functions that return a status, and what they take.
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int
_OPERAND = (_ADDRESS, _INT, _INT)  # its address, type and leading dimension
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cublasSetStream_v2": (_ADDRESS, _ADDRESS),
    "cublasSetWorkspace_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t),
    "cublasSetMathMode": (_ADDRESS, _INT),
    "cublasGemmEx": (
        _ADDRESS, _INT, _INT, _INT, _INT, _INT, _ADDRESS, *_OPERAND, *_OPERAND, _ADDRESS, *_OPERAND, _INT, _INT,
    ),
}  # fmt: skip
AS_IT_IS, TRANSPOSED = 0, 1  # cublasOperation_t
TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType
IN_FLOAT, IN_DOUBLE, IN_TF32 = 68, 70, 77  # cublasComputeType_t: what sums are made in
BY_ITSELF = -1  # cublasGemmAlgo_t: cuBLAS chooses
SUMS_NEVER_IN_HALF = 16  # cublasMath_t: sums of parts are added up in float, also where the result is half

# What may be multiplied -> what the result may be in. Both factors are of one type.
INTO = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
    "float64": ("float64",),
}
MOST = 1 << 31  # rows or columns: cuBLAS is told of them in 32 bits
MIB = 1 << 20


class CublasError(RuntimeError):
    """What cuBLAS answers where it does not do what it was asked for: its text is the call and the status's name."""


class Library:
    """The functions of libcublas that are used here, and handles that nobody uses any more.

    The end of a handle waits for all work of its device, and the end of a backend comes when garbage is collected: at
    any moment, in any thread, while others wait for each other in a collective operation or a stream captures. So no
    handle is ended: the next backend on its device takes it over, and there are as many as backends at one time.

    Args:
        loaded: the library, as ctypes gives it.
    """

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self._left: dict[int, deque[int]] = {}  # by device
        loaded.cublasGetStatusName.argtypes, loaded.cublasGetStatusName.restype = (_INT,), ctypes.c_char_p
        for name, takes in PROTOTYPES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = takes, _INT

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of `PROTOTYPES`. CublasError: it did not succeed."""
        status = getattr(self._loaded, name)(*arguments)
        if status:
            raise CublasError(f"{name}: {self._loaded.cublasGetStatusName(status).decode()}")

    def handle(self, device: int) -> int:
        """A handle for that device, which must be current: one that was left there, or a new one."""
        try:
            return self._left[device].pop()
        except (KeyError, IndexError):
            made = ctypes.c_void_p()
            self.call("cublasCreate_v2", ctypes.byref(made))
            return int(made.value or 0)

    def leave(self, device: int, handle: int) -> None:
        """Its owner is gone."""
        self._left.setdefault(device, deque()).append(handle)


@cache
def library(cuda: int) -> Library:
    """cuBLAS where CuPy finds it, in NVIDIA's wheels or a toolkit; else where the system looks for libraries.

    Args:
        cuda: the CUDA that CuPy was made for: 12 or 13.

    Raises:
        ConfigError: there is none.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return Library(ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path or f"libcublas.so.{cuda}"))
    except (ImportError, RuntimeError, OSError) as error:
        reason = one_line(error).partition(" listdir(")[0].rstrip(":")
    try:
        return Library(ctypes.CDLL(f"libcublas.so.{cuda}"))
    except OSError as error:
        raise ConfigError(
            f"cuBLAS cannot be loaded ({reason}; {one_line(error)}): pip install 'cupy-cuda{cuda}x[ctk]', or name the "
            "folder of the toolkit's libraries in LD_LIBRARY_PATH"
        ) from error


def workspace_bytes(device: Any) -> int:
    """Bytes to work in that NVIDIA's manual recommends for the architecture of one of CuPy's devices."""
    return (32 if int(device.compute_capability) >= 90 else 4) * MIB


class Cublas:
    """Products on the device and the stream that are current when this is made: not for two threads at once.

    Making it allocates memory of the device, which nobody may do while others stand in a collective operation or while
    a stream captures. A graph that has recorded products uses the workspace: it may not outlive this.

    Args:
        xp: CuPy.
        tf32: whether factors in float are rounded to 10 bits behind the point (TF32), for the tensor cores.

    Attributes:
        stream: the address of the stream.

    Raises:
        ConfigError: there is no cuBLAS.
        CublasError: it refuses to work.
    """

    def __init__(self, xp: ModuleType, *, tf32: bool = False) -> None:
        device = xp.cuda.Device()
        self._device, self.stream = int(device.id), int(xp.cuda.get_current_stream().ptr)
        self._library = library(int(xp.cuda.runtime.runtimeGetVersion()) // 1000)
        self._workspace = xp.empty(workspace_bytes(device), np.uint8)
        self._handle = self._library.handle(self._device)
        weakref.finalize(self, self._library.leave, self._device, self._handle)
        self._library.call("cublasSetStream_v2", self._handle, self.stream)  # first: it takes the workspace away
        size = int(self._workspace.nbytes)
        self._library.call("cublasSetWorkspace_v2", self._handle, self._workspace.data.ptr, size)
        self._library.call("cublasSetMathMode", self._handle, SUMS_NEVER_IN_HALF)
        self._kinds = _kinds(tf32)

    def gemm(self, left: Array, right: Array, out: Array, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """out = alpha · left right + beta · out, in the stream's order; without beta `out` may hold anything.

        Sums are made in float, or in double for double. Without inner values the product is zeros, as NumPy's is.

        Args:
            left, right: (M, K), (K, N) of one precision, contiguous as they stand or transposed.
            out: (M, N), contiguous, no part of the factors; in their precision, or in float where that is 16 bits.

        Raises:
            ConfigError: arrays that cannot be multiplied.
            CublasError: cuBLAS refuses.
        """
        factor, result, compute, scalar = self._checked(left, right, out)
        (rows, inner), columns = left.shape, right.shape[1]
        if not rows or not columns:
            return
        if not inner:
            if beta == 0:
                out.fill(0)
            elif beta != 1:
                out *= beta
            return
        # cuBLAS reads and writes columns: what it takes for right' left' = out' is left right = out in rows
        first, second = _layout(right), _layout(left)
        self._library.call(
            "cublasGemmEx", self._handle, first[0], second[0], columns, rows, inner,
            ctypes.byref(scalar(alpha)), right.data.ptr, factor, first[1], left.data.ptr, factor, second[1],
            ctypes.byref(scalar(beta)), out.data.ptr, result, columns, compute, BY_ITSELF,
        )  # fmt: skip

    def _checked(self, left: Array, right: Array, out: Array) -> tuple[int, int, int, Any]:
        """Refuse arrays that cuBLAS would misread. Return the entry of `_kinds`."""
        arrays = left, right, out
        shapes = [tuple(array.shape) for array in arrays]
        kind = self._kinds.get((left.dtype, out.dtype)) if left.dtype == right.dtype else None
        fit = (
            all(len(shape) == 2 and max(shape) < MOST for shape in shapes)
            and shapes[0][1] == shapes[1][0]
            and shapes[2] == (shapes[0][0], shapes[1][1])
        )
        whole = out.flags.c_contiguous and all(a.flags.c_contiguous or a.flags.f_contiguous for a in (left, right))
        here = all(getattr(getattr(array, "device", None), "id", None) == self._device for array in arrays)
        if kind is None or not (fit and whole and here):
            given = " and ".join(f"{shape} {array.dtype}" for shape, array in zip(shapes, arrays, strict=True))
            raise ConfigError(
                f"a product of {given}: must be contiguous (M, K), (K, N) and (M, N) on device {self._device}, of one "
                "precision (a result of 16-bit factors may be float32), each size below 2**31"
            )
        return kind


def _layout(array: Array) -> tuple[int, int]:
    """How cuBLAS reads a matrix of rows: as it is or transposed, and how far apart its rows (or columns) begin."""
    rows, columns = array.shape
    return (AS_IT_IS, columns) if array.flags.c_contiguous else (TRANSPOSED, rows)


@cache
def _kinds(tf32: bool) -> dict[tuple[Any, Any], tuple[int, int, int, Any]]:
    """(precision of the factors, of the result) -> the types of both, what sums are made in, the type of scalars."""
    found = {}
    for factor, results in INTO.items():
        double = factor == "float64"
        compute = IN_DOUBLE if double else IN_TF32 if tf32 and factor == "float32" else IN_FLOAT
        for result in results:
            try:
                key = stored_dtype(factor), stored_dtype(result)
            except ConfigError:  # bfloat16 is not installed: there are no such arrays
                continue
            found[key] = TYPES[factor], TYPES[result], compute, ctypes.c_double if double else ctypes.c_float
    return found
