"""Treats subnormal numbers, such as floats below 1.2e-38, as zero in the calling thread.

x86 CPUs take over a hundred cycles for an operation on them. They appear once a network fits its data: the
probabilities of wrong classes and the gradients become that small. Threads inherit the setting from the thread that
starts them. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, section 11.6.3.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.vectors import I32

FLUSH = 0x8040  # bits FTZ (subnormal results) and DAZ (subnormal operands) of the control register MXCSR
IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "x86")


@contextmanager
def as_zero() -> Iterator[None]:
    """Context manager that treats subnormal numbers as zero in this thread. Does nothing on CPUs other than x86."""
    if not IS_X86:
        yield
        return
    before = replace(FLUSH, FLUSH)
    try:
        yield
    finally:
        replace(FLUSH, before)


@kernel
def replace(mask: int, bits: int) -> int:
    """Set the bits of MXCSR that are in `mask`, and return their former values."""
    register: int = read()
    write((register & ~mask) | bits)
    return register & mask


@intrinsic  # type: ignore[untyped-decorator]
def read(typing: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        place = cgutils.alloca_once(b, I32)
        _emit(b, "stmxcsr", place)
        return b.zext(b.load(place), ir.IntType(64))

    return types.int64(), generate


@intrinsic  # type: ignore[untyped-decorator]
def write(typing: Any, register: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        place = cgutils.alloca_once(b, I32)
        b.store(b.trunc(arguments[0], I32), place)
        _emit(b, "ldmxcsr", place)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _emit(b: Any, name: str, place: Any) -> None:
    place = b.bitcast(place, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.sse.{name}"), [place])
