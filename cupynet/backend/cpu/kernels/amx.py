"""Products of bfloat16 matrices on Intel's AMX units, which multiply a tile of 16 x 32 values by one of 32 x 16 values.

Sums are float; subnormal numbers are treated as zero. Source: Intel 64 and IA-32 Architectures Software Developer's
Manual, volume 1, chapter "Programming with Intel AMX".
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.vectors import I64, pointers, target_features

SIDE, DEPTH = 16, 32  # a left tile has SIDE rows of DEPTH values
TILES = 4  # tiles of sums that are computed at a time, one below the other
ROWS = TILES * SIDE
ROW = 64  # bytes in a row of a tile
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: arch_prctl(2)

I8 = ir.IntType(8)


@functools.cache
def available() -> bool:
    """Return True if kernels are compiled for AMX and this process may use it. Asks Linux for permission once."""
    if sys.platform != "linux" or not {"+amx-tile", "+amx-bf16"} <= target_features():
        return False
    return int(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)) == 0


def _emit(b: Any, name: str, *arguments: Any) -> None:
    """Emit an instruction. Integer arguments are tile numbers, which become 8-bit constants."""
    values = [ir.Constant(I8, each) if isinstance(each, int) else each for each in arguments]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), values)


@intrinsic  # type: ignore[untyped-decorator]
def configure(typing: Any) -> Any:
    """Configure eight tiles of 16 rows of 64 bytes for this thread."""
    palette, start = 1, 0
    configuration = struct.pack("<BB14x16H16B", palette, start, *[ROW] * 8, *[0] * 8, *[SIDE] * 8, *[0] * 8)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        constant = ir.Constant(ir.ArrayType(I8, len(configuration)), bytearray(configuration))
        _emit(b, "ldtilecfg", b.bitcast(cgutils.global_constant(b, "amx_tiles", constant), I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def release(typing: Any) -> Any:
    """Release the tiles, so that the operating system need not save them."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _emit(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def add_products(
    typing: Any, adds: Any, left: Any, starts: Any, row: Any, steps: Any, right: Any, first: Any, pitch: Any, sums: Any,
    at: Any, wide: Any,
) -> Any:  # fmt: skip
    """Compute four tiles of sums, one below the other. Write them to `sums` at index `at`, or add them if `adds`.

    Left tile i of step t starts at left[starts[i] + steps[t]], with rows `row` values apart. The right tile of step t
    starts at right[first + 16 t pitch], with pairs of rows (`pair_rows`) `pitch` pairs apart. Rows of sums are `wide`
    values apart.
    """

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, b, signature, arguments)
        count = context.make_array(signature.args[4])(context, b, arguments[4]).nitems
        # in bytes
        row, pitch, wide = (b.mul(arguments[i], ir.Constant(I64, size)) for i, size in ((3, 2), (7, 4), (10, 4)))

        def moved(address: Any, values: Any) -> Any:
            return b.bitcast(b.gep(address, [values]), I8.as_pointer())

        def number(array: int, index: Any) -> Any:
            return b.load(b.gep(pointer(array), [index]))

        def rows_of_tiles(step: Any, count: int) -> Any:
            return b.mul(step, ir.Constant(I64, SIDE * count))

        totals = [moved(pointer(8, 9), rows_of_tiles(arguments[10], i)) for i in range(TILES)]
        lefts = [b.gep(pointer(1), [number(2, ir.Constant(I64, i))]) for i in range(TILES)]
        with b.if_else(b.trunc(arguments[0], ir.IntType(1))) as (adds, writes):
            with adds:
                for i in range(TILES):
                    _emit(b, "tileloadd64", i, totals[i], wide)
            with writes:
                for i in range(TILES):
                    _emit(b, "tilezero", i)
        with cgutils.for_range(b, count) as loop:
            place = moved(pointer(5, 6), b.mul(loop.index, rows_of_tiles(arguments[7], 1)))
            step = number(4, loop.index)
            _emit(b, "tileloadd64", 7, place, pitch)
            for i in range(TILES):
                _emit(b, "tileloadd64", 4 + i % 3, moved(lefts[i], step), row)
                _emit(b, "tdpbf16ps", i, 4 + i % 3, 7)
        for i in range(TILES):
            _emit(b, "tilestored64", i, totals[i], wide)
        return context.get_dummy_value()

    return types.void(adds, left, starts, row, steps, right, first, pitch, sums, at, wide), generate


@kernel
def pair_rows(rows: Array, pairs: Array) -> None:
    """Interleave rows 2 i and 2 i + 1 of `rows` (R, J) in row i of `pairs` (R / 2, J), two 16-bit values per int32."""
    for i in range(pairs.shape[0]):
        low, high, target = rows[2 * i], rows[2 * i + 1], pairs[i]
        for j in range(target.size):
            target[j] = np.int32(low[j]) & np.int32(0xFFFF) | np.int32(high[j]) << np.int32(16)


@kernel
def pad_rows(matrix: Array, rows: Array) -> None:
    """Copy `matrix` (I, J), which may be transposed, to `rows` (R, K), padded with zeros."""
    height, width = matrix.shape
    for r in range(rows.shape[0]):
        target, used = rows[r], width if r < height else 0
        for k in range(used):
            target[k] = matrix[r, k]
        target[used:] = 0


@kernel
def product(left: Array, right: Array, sums: Array, out: Array) -> None:
    """out (I, J) = left @ right, in float.

    left: (I', K), padded to multiples of 64 and 32; right: (K / 2, J'), pairs of rows; sums: (64, J'), a buffer.
    """
    configure()
    values, flat, depth, pitch = left.reshape(-1), sums.reshape(-1), left.shape[1], right.shape[1]
    steps, starts = np.arange(0, depth, DEPTH), np.arange(TILES) * SIDE * depth
    for i in range(0, out.shape[0], ROWS):
        for j in range(0, out.shape[1], SIDE):
            add_products(False, values, starts + i * depth, depth, steps, right, j, pitch, flat, j, pitch)
        for r in range(i, min(i + ROWS, out.shape[0])):
            target, row = out[r], sums[r - i]
            for j in range(target.size):
                target[j] = row[j]
    release()
