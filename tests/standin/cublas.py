"""libcublas as ctypes loads it: products by address, computed with NumPy on the blocks of simulated devices.

Mistakes that cuBLAS cannot detect are misuses here. Unlike CuPy's product, this one can be captured.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend.policy import stored_dtype
from tests.standin.errors import BadLaunch, Misuse, WrongDevice
from tests.standin.machine import Machine, Operation, Span
from tests.standin.order import Line, label

SUCCESS, INVALID_VALUE = 0, 7
NAMES = {SUCCESS: b"CUBLAS_STATUS_SUCCESS", INVALID_VALUE: b"CUBLAS_STATUS_INVALID_VALUE"}
TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}  # cudaDataType
# cublasComputeType_t -> the type of its scalars, and the allowed types of A, B and C
FLOAT, DOUBLE, TF32 = 68, 70, 77
COMPUTES: dict[int, tuple[Any, set[tuple[int, int]]]] = {
    FLOAT: (ctypes.c_float, {(2, 2), (2, 0), (14, 14), (14, 0), (0, 0)}),
    TF32: (ctypes.c_float, {(0, 0)}),
    DOUBLE: (ctypes.c_double, {(1, 1)}),
}
MODES = DEFAULT, SUMS_IN_COMPUTE_TYPE = 0, 16  # cublasMath_t: those that cupynet uses


@dataclass(eq=False)
class Handle:
    """The state of a handle. Setting its stream resets its workspace."""

    device: int
    line: Line
    workspace: Span | None = None
    mode: int = DEFAULT


class Function:
    """One function of the library. As in ctypes, the caller sets `argtypes` and `restype`."""

    def __init__(self, machine: Machine, work: Callable[..., Any]) -> None:
        self._machine, self._work = machine, work

    def __call__(self, *given: Any) -> Any:
        try:  # numbers, addresses, and objects passed by `byref`
            return self._work(*(getattr(each, "_obj", each) for each in given))
        except Misuse as misuse:
            self._machine.refuse(misuse)


class Cublas:
    """The library, loaded once for a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.handles: dict[int, Handle] = {}
        for name, work in (
            ("cublasCreate_v2", self._create),
            ("cublasSetStream_v2", self._set_stream),
            ("cublasSetWorkspace_v2", self._set_workspace),
            ("cublasSetMathMode", self._set_mode),
            ("cublasGemmEx", self._gemm),
            ("cublasGetStatusName", lambda status: NAMES[status]),
        ):
            setattr(self, name, Function(machine, work))

    # handles --------------------------------------------------------------------------------------------------------

    def _create(self, made: Any) -> int:
        machine = self.machine
        with machine.lock:
            device = machine.seat.device
            machine.must_not_wait("cublasCreate, which allocates,")
            made.value = 0x7000_0000 + 16 * len(self.handles)
            self.handles[made.value] = Handle(device, machine.nulls[device])
            return SUCCESS

    def _handle(self, number: int, name: str) -> Handle:
        """Return the handle with that number, which must be of the current device."""
        handle, device = self.handles[number], self.machine.seat.device
        if device != handle.device:
            raise WrongDevice(f"{label(name)} on device {device}: the handle is of device {handle.device}")
        return handle

    def _set_stream(self, number: int, stream: int) -> int:
        handle = self._handle(number, "cublasSetStream")
        handle.line, handle.workspace = self.machine.line_at(stream, handle.device), None
        return SUCCESS

    def _set_workspace(self, number: int, address: int, size: int) -> int:
        handle = self._handle(number, "cublasSetWorkspace")
        handle.workspace = self.machine.span(address, size, handle.device, "cublasSetWorkspace", np.uint8)
        return SUCCESS

    def _set_mode(self, number: int, mode: int) -> int:
        if mode not in MODES:
            return INVALID_VALUE
        self._handle(number, "cublasSetMathMode").mode = mode
        return SUCCESS

    # products -------------------------------------------------------------------------------------------------------

    def _gemm(
        self, number: int, turn_a: int, turn_b: int, m: int, n: int, k: int, alpha: Any, a: int, type_a: int, lda: int,
        b: int, type_b: int, ldb: int, beta: Any, c: int, type_c: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        """C (m, n) = alpha · A B + beta · C, all column-major. A and B may be transposed."""
        name = "cublasGemmEx"
        with self.machine.lock:
            handle = self._handle(number, name)
            scalar, pairs = COMPUTES[compute]
            stored_a, stored_b = ((k, m) if turn_a else (m, k)), ((n, k) if turn_b else (k, n))
            if lda < stored_a[0] or ldb < stored_b[0] or ldc < m or type_a != type_b or (type_a, type_c) not in pairs:
                return INVALID_VALUE
            if type(alpha) is not scalar or type(beta) is not scalar:
                raise BadLaunch(f"{label(name)}: alpha and beta must be {scalar.__name__}, on the host")
            if handle.workspace is None:
                raise Misuse(f"{label(name)}: no workspace was set after the stream: streams share the default one")
            left = self._matrix(handle, a, type_a, stored_a, lda)
            right = self._matrix(handle, b, type_b, stored_b, ldb)
            target = self._matrix(handle, c, type_c, (m, n), ldc)
            into, rounds_sums = target.view, TYPES[type_c] in ("float16", "bfloat16") and handle.mode == DEFAULT
            x, y = (left.view.T if turn_a else left.view), (right.view.T if turn_b else right.view)

            def work() -> None:
                total = multiplied(x, y, tf32=compute == TF32, rounds_sums=rounds_sums, result=into.dtype)
                total *= total.dtype.type(alpha.value)
                if beta.value:
                    total += total.dtype.type(beta.value) * into.astype(total.dtype)
                into[...] = total

            reads = [left, right, *([target] if beta.value else [])]
            self.machine.run(Operation(name, reads, [target, handle.workspace], work), handle.line)
            return SUCCESS

    def _matrix(self, handle: Handle, address: int, kind: int, shape: tuple[int, int], ld: int) -> Span:
        (rows, columns), dtype = shape, stored_dtype(TYPES[kind])
        nbytes = ((columns - 1) * ld + rows) * dtype.itemsize
        chunk, _ = self.machine.span(address, nbytes, handle.device, "cublasGemmEx", dtype)
        offset = address - chunk.address
        return Span(chunk, np.ndarray(shape, dtype, chunk.memory, offset, (dtype.itemsize, ld * dtype.itemsize)))


def multiplied(a: NDArray[Any], b: NDArray[Any], *, tf32: bool, rounds_sums: bool, result: Any) -> NDArray[Any]:
    """Return a product in float, or double for doubles. rounds_sums: add two parts in the precision of the result."""
    wide: Any = np.float64 if result == np.float64 else np.float32
    a, b = (to_tf32(each) if tf32 else each.astype(wide) for each in (a, b))
    half = a.shape[1] // 2 if rounds_sums else 0
    total: NDArray[Any] = a[:, half:] @ b[half:]
    if half:
        total = ((a[:, :half] @ b[:half]).astype(result) + total.astype(result)).astype(wide)
    return total


def to_tf32(numbers: NDArray[Any]) -> NDArray[Any]:
    """Round floats to 10 bits of mantissa, to nearest, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(numbers), nearest.view(np.float32), numbers)
