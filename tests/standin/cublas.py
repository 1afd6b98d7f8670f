"""libcublas as ctypes gives it: products made with NumPy, by address, on the blocks of the made-up devices.

What cuBLAS refuses it refuses with the status that cuBLAS's manual has for it; what cuBLAS cannot see, and what would
then go wrong some day, is a misuse. A function whose parameter types were not declared is one: ctypes would pass an
address in 32 bits. Unlike CuPy's product this one can be recorded by a stream that captures.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import BadLaunch, InCapture, Misuse, Overrun, WrongDevice
from tests.standin.machine import Machine, Operation, Span
from tests.standin.order import Line, label

# cublas_api.h: what each function takes
_P, _I = ctypes.c_void_p, ctypes.c_int
TAKES: dict[str, list[Any]] = {
    "cublasCreate_v2": [ctypes.POINTER(_P)],
    "cublasSetStream_v2": [_P, _P],
    "cublasSetWorkspace_v2": [_P, _P, ctypes.c_size_t],
    "cublasSetMathMode": [_P, _I],
    "cublasGemmEx": [_P, _I, _I, _I, _I, _I, _P, _P, _I, _I, _P, _I, _I, _P, _P, _I, _I, _I, _I],
    "cublasGetStatusName": [_I],
}
GIVES = {"cublasGetStatusName": ctypes.c_char_p}  # the others a status
SUCCESS, NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 7, 15
NAMES = {
    SUCCESS: b"CUBLAS_STATUS_SUCCESS",
    NOT_INITIALIZED: b"CUBLAS_STATUS_NOT_INITIALIZED",
    INVALID_VALUE: b"CUBLAS_STATUS_INVALID_VALUE",
    NOT_SUPPORTED: b"CUBLAS_STATUS_NOT_SUPPORTED",
}
TYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}  # cudaDataType
# cublasComputeType_t -> its scalars, and which types of A and B go with which of C; of those that cupynet may need
FLOAT, DOUBLE, TF32 = 68, 70, 77
COMPUTES: dict[int, tuple[Any, set[tuple[int, int]]]] = {
    FLOAT: (ctypes.c_float, {(2, 2), (2, 0), (14, 14), (14, 0), (0, 0)}),
    TF32: (ctypes.c_float, {(0, 0)}),
    DOUBLE: (ctypes.c_double, {(1, 1)}),
}
MODES = {0, 1, 2, 3, 16, 17, 18, 19}  # cublasMath_t
SUMS_IN_COMPUTE_TYPE = 16
ALIGNED, LEAST = 256, 16 << 10  # bytes: of a workspace's address, and of a workspace


@dataclass(eq=False)
class Handle:
    """The state behind a handle."""

    device: int
    line: Line
    workspace: Span | None = None  # since its stream was last set
    mode: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)


class Function:
    """One function of the library; `argtypes` and `restype` are for the caller to set, as ctypes has it."""

    def __init__(self, machine: Machine, name: str, work: Callable[..., Any]) -> None:
        self.machine, self.name, self._work = machine, name, work
        self.argtypes: Any = None
        self.restype: Any = ctypes.c_int

    def __call__(self, *given: Any) -> Any:
        takes = TAKES[self.name]
        if list(self.argtypes or ()) != takes or self.restype != GIVES.get(self.name, ctypes.c_int):
            self.refuse(Misuse(f"{self.name} is called with parameters of other types than it has: {self.argtypes}"))
        if len(given) != len(takes):
            raise TypeError(f"{self.name}: takes {len(takes)} arguments, was given {len(given)}")
        try:
            return self._work(*(self._passed(kind, each) for kind, each in zip(takes, given, strict=True)))
        except Misuse as misuse:
            self.refuse(misuse)

    def refuse(self, misuse: Misuse) -> None:
        """Keep and raise it."""
        self.machine.keep(misuse)
        raise misuse

    def _passed(self, kind: Any, given: Any) -> Any:
        """An argument as the library sees it: a number, or the object of ctypes that an address leads to."""
        if kind in (_I, ctypes.c_size_t):
            if type(given) is not int:
                raise ctypes.ArgumentError(f"{self.name}: {type(given).__name__} instead of int")
            if kind(given).value != given:
                raise BadLaunch(f"{self.name}: {given} does not fit into {kind.__name__}, and ctypes cuts it off")
            return given
        target = getattr(given, "_obj", None)  # of byref
        if target is not None:
            return target
        if kind is not _P or not (given is None or type(given) is int):
            raise ctypes.ArgumentError(f"{self.name}: {type(given).__name__} instead of an address")
        return given or 0


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
            ("cublasGetStatusName", lambda status: NAMES.get(status, b"unrecognized status")),
        ):
            setattr(self, name, Function(machine, name, work))

    # handles --------------------------------------------------------------------------------------------------------

    def _create(self, made: Any) -> int:
        machine = self.machine
        with machine.lock:
            device = machine.seat.device
            for line in machine.lines:
                if line.device == device and line.capture is not None:
                    raise InCapture(f"{label('cublasCreate')} allocates while {line} captures")
            machine.must_not_wait("cublasCreate, which allocates,")
            number = 0x7000_0000 + 16 * len(self.handles)
            self.handles[number] = Handle(device, machine.nulls[device])
            made.value = number
            return SUCCESS

    @contextmanager
    def _own(self, number: int, name: str) -> Iterator[Handle | None]:
        """The handle of that number, for this thread alone; None where there is none."""
        handle = self.handles.get(number)
        if handle is None:
            yield None
            return
        if not handle.turn.acquire(blocking=False):
            raise Misuse(f"{label(name)}: one handle is used by two threads at once")
        try:
            with self.machine.lock:
                device = self.machine.seat.device
                if device != handle.device:
                    raise WrongDevice(f"{label(name)} on device {device}: the handle is of device {handle.device}")
                yield handle
        finally:
            handle.turn.release()

    def _set_stream(self, number: int, stream: int) -> int:
        with self._own(number, "cublasSetStream") as handle:
            if handle is None:
                return NOT_INITIALIZED
            line = self.machine.line_at(stream, handle.device)
            if line.device != handle.device:
                raise WrongDevice(f"{label('cublasSetStream')}: {line} is of device {line.device}, not {handle.device}")
            handle.line, handle.workspace = line, None
            return SUCCESS

    def _set_workspace(self, number: int, address: int, size: int) -> int:
        with self._own(number, "cublasSetWorkspace") as handle:
            if handle is None:
                return NOT_INITIALIZED
            if address % ALIGNED:
                return INVALID_VALUE
            if size < LEAST:
                raise Misuse(f"{label('cublasSetWorkspace')}: with {size} bytes products fail; {LEAST} are the least")
            chunk, offset = self.machine.block(address, size, handle.device, str(label("cublasSetWorkspace")))
            handle.workspace = Span(chunk, chunk.memory[offset : offset + size])
            return SUCCESS

    def _set_mode(self, number: int, mode: int) -> int:
        with self._own(number, "cublasSetMathMode") as handle:
            if handle is None:
                return NOT_INITIALIZED
            if mode not in MODES:
                return INVALID_VALUE
            handle.mode = mode
            return SUCCESS

    # products -------------------------------------------------------------------------------------------------------

    def _gemm(
        self, number: int, turn_a: int, turn_b: int, m: int, n: int, k: int, alpha: Any, a: int, type_a: int, lda: int,
        b: int, type_b: int, ldb: int, beta: Any, c: int, type_c: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        """C (m, n) = alpha · A B + beta · C, all in columns; A or B may be transposed as they are read.

        Many lines, as it looks at so many arguments.
        """
        name = "cublasGemmEx"
        with self._own(number, name) as handle:
            if handle is None:
                return NOT_INITIALIZED
            if turn_a not in (0, 1) or turn_b not in (0, 1) or min(m, n, k) < 0:
                return INVALID_VALUE
            stored_a, stored_b = ((k, m) if turn_a else (m, k)), ((n, k) if turn_b else (k, n))
            if lda < max(1, stored_a[0]) or ldb < max(1, stored_b[0]) or ldc < max(1, m):
                return INVALID_VALUE
            if type_a != type_b or compute not in COMPUTES or (type_a, type_c) not in COMPUTES[compute][1]:
                return NOT_SUPPORTED
            if algorithm not in range(-1, 24):
                return INVALID_VALUE
            scalar = COMPUTES[compute][0]
            if type(alpha) is not scalar or type(beta) is not scalar:
                raise BadLaunch(f"{label(name)}: alpha and beta must be {scalar.__name__}, on the host")
            if handle.workspace is None:
                raise Misuse(f"{label(name)}: no workspace was set since the stream: cuBLAS's own is shared by streams")
            if not m or not n:
                return SUCCESS
            left, right, into = (
                self._matrix(name, handle, address, kind, shape, ld)
                for address, kind, shape, ld in (
                    (a, type_a, stored_a, lda), (b, type_b, stored_b, ldb), (c, type_c, (m, n), ldc),
                )
            )  # fmt: skip
            target = into[0]
            reads = [*left, *right, *(into if beta.value else [])]
            if any(each.chunk is target.chunk and np.shares_memory(each.view, target.view) for each in left + right):
                raise Overrun(f"{label(name)}: the output overlaps an input")
            of_a = (left[0].view.T if turn_a else left[0].view) if left else np.zeros((m, 0), np.float32)
            of_b = (right[0].view.T if turn_b else right[0].view) if right else np.zeros((0, n), np.float32)
            rounded = type_c in (2, 14) and not handle.mode & SUMS_IN_COMPUTE_TYPE
            factors, scalars = (of_a, of_b), (alpha.value, beta.value)

            def work() -> None:
                _product(target.view, factors, scalars, tf32=compute == TF32, rounded=rounded)

            self.machine.run(Operation(name, reads, [target, handle.workspace], work), handle.line)
            return SUCCESS

    def _matrix(
        self, name: str, handle: Handle, address: int, kind: int, shape: tuple[int, int], ld: int
    ) -> list[Span]:
        """The matrix at an address, stored by columns; no spans if it is empty."""
        (rows, columns), dtype = shape, _dtype(kind)
        if not rows or not columns:
            return []
        where, size = label(name), dtype.itemsize
        chunk, offset = self.machine.block(address, ((columns - 1) * ld + rows) * size, handle.device, str(where))
        if chunk.dtype is not None and chunk.dtype != dtype:
            raise BadLaunch(f"{where} is called for {dtype} with {chunk}, which is {chunk.dtype}")
        if offset % size:
            raise BadLaunch(f"{where}: {address:#x} is no address of {dtype}")
        return [Span(chunk, np.ndarray(shape, dtype, chunk.memory, offset, (size, ld * size)))]


def _dtype(kind: int) -> np.dtype[Any]:
    if TYPES[kind] == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(TYPES[kind])


def _product(
    into: NDArray[Any], factors: tuple[NDArray[Any], ...], scalars: tuple[float, float], *, tf32: bool, rounded: bool
) -> None:
    """rounded: partial sums are added in the precision of the result, as cuBLAS may do unless that is switched off."""
    wide = np.float64 if into.dtype == np.float64 else np.float32
    a, b = (each.astype(wide, copy=False) for each in factors)
    if tf32:
        a, b = _to_tf32(a), _to_tf32(b)
    half = a.shape[1] // 2 if rounded else 0
    total = a[:, half:] @ b[half:]
    if half:
        first = a[:, :half] @ b[:half]
        total = (first.astype(into.dtype) + total.astype(into.dtype)).astype(wide)
    total *= wide(scalars[0])
    if scalars[1]:
        total += wide(scalars[1]) * into.astype(wide, copy=False)
    into[...] = total


def _to_tf32(numbers: NDArray[Any]) -> NDArray[Any]:
    """Floats with 10 bits behind the point, the nearest ones, and of two the even one."""
    bits = numbers.view(np.uint32) if numbers.flags.c_contiguous else numbers.copy().view(np.uint32)
    nearest = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(numbers), nearest.view(np.float32), numbers)
