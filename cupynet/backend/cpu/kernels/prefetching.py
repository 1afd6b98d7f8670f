"""Software prefetching for images that do not fit in the L2 cache. Hardware prefetching rarely covers stores.

`write` is 1 to prefetch values that will be written, else 0. Positions may be out of bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import inlined
from cupynet.backend.cpu.kernels.vectors import I32, constants, pointers

LINE = 16  # values in a cache line of floats


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def prefetch(typing: Any, write: Any, x: Any, at: Any) -> Any:
    """Prefetch the cache line of x[at] of a flat array."""
    literals = constants(write)
    if literals is None:
        return None

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        place = b.bitcast(pointers(context, b, signature, arguments)(1, 2), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
        level, data = I32(3), I32(1)
        b.call(
            cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0"), [place, I32(literals[0]), level, data]
        )
        return context.get_dummy_value()

    return types.void(write, x, at), generate


@inlined
def prefetch_rows(write: int, x: Array, at: int, rows: int, step: int, length: int) -> None:
    """Prefetch `length` values in each of `rows` rows, `step` values apart."""
    for start in range(at, at + rows * step, step):
        for i in range(start, start + length, LINE):
            prefetch(write, x, i)


@inlined
def prefetch_share(write: int, images: Array, size: int, n: int, row: int, height: int, rows: int) -> None:
    """Divide image n, which has `size` values, into `rows` shares. Prefetch `height` shares, beginning with `row`."""
    share = (size + rows - 1) // rows
    start = n * size + row * share
    for at in range(start, start + height * share, LINE):
        prefetch(write, images, at)
