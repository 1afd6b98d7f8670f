"""Direct convolution without im2col.

`add_products` multiplies two matrices. The first is not stored: its rows may start anywhere in an image, and a table
contains the offsets of their values (see `Sums`). The loop is generated as LLVM vector code, as in `rows.py`.

Sums are computed `CHUNK` products at a time, so that factors shared by all tiles stay in the L1 cache (Goto & van de
Geijn 2008).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals, room, scratch, widened, write_back
from cupynet.backend.cpu.kernels.prefetching import prefetch_share
from cupynet.backend.cpu.kernels.vectors import (
    I64,
    constants,
    element,
    load,
    pointers,
    registers,
    store,
    sums_of_products,
    widths,
)

CHUNK = 256  # products added to a sum at a time
MAX_ROWS = 10  # maximum number of rows in a tile, each of which needs a pointer


class Frame(NamedTuple):
    """Padding of an image.

    Attributes:
        size: number of values including padding; 0 without padding, when images are read in place.
        first: offset of the first value of the image.
        height, row: number of rows in the image, and of values in each row.
        step: values between the starts of consecutive rows.
    """

    size: int
    first: int
    height: int
    row: int
    step: int


class Sums(NamedTuple):
    """Sums over one image: sum_t image[starts[r] + table[t]] · factors[t] is added to the output at outs[r].

    Attributes:
        parts: (parts, 3) int64, sets of sums with separate factors: first r, last r + 1, and offset of the factors.
        starts, outs: int32, padded to full tiles.
        table: int32.
        columns: number of outputs of each sum, next to each other.
        by_column: True if each column has its own values, next to each other: image[starts[r] + table[t] + j].
    """

    parts: Array
    starts: Array
    outs: Array
    table: Array
    columns: int
    by_column: bool


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def add_products(
    typing: Any, height: Any, width: Any, by_column: Any, rows: Any, x: Any, x_at: Any, starts: Any, outs: Any,
    first: Any, table: Any, t_at: Any, count: Any, w: Any, w_at: Any, pitch: Any, out: Any, out_at: Any,
) -> Any:  # fmt: skip
    """Add a tile of sums of products to `out`, for i < min(height, rows) and j < width.

    out[out_at + outs[first + i] + j] += sum over t < count of
    x[x_at + starts[first + i] + table[t_at + t]] · w[w_at + t · pitch + j].

    If `by_column` is 1, column j has its own values x[x_at + starts[first + i] + table[t_at + t] + j]. `height`,
    `width` and `by_column` are constants. Arrays are flat; starts, outs and table are int32. Arguments are not checked.
    """
    literals = constants(height, width, by_column)
    if literals is None:
        return None
    signature = types.void(
        height, width, by_column, rows, x, x_at, starts, outs, first, table, t_at, count, w, w_at, pitch, out, out_at
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, builder, signature, arguments)
        inputs = pointer(4, 5), pointer(6, 8), pointer(9, 10), arguments[11], pointer(12, 13), arguments[14]
        _emit(builder, literals, inputs, pointer(15, 16), pointer(7, 8), arguments[3])
        return context.get_dummy_value()

    return signature, generate


def _emit(b: Any, literals: list[int], inputs: Any, out: Any, outs: Any, rows: Any) -> None:
    height, width, by_column = literals
    x, starts, table, count, w, pitch = inputs
    sums, parts = sums_of_products(b, x, starts, height, table, w, pitch, count, width, by_column)
    end = b.append_basic_block("tile.end")
    for i, row_sums in enumerate(sums):
        if i:  # rows that only pad the tile are not stored
            stored = b.append_basic_block("tile.row")
            b.cbranch(b.icmp_signed("<", ir.Constant(I64, i), rows), stored, end)
            b.position_at_end(stored)
        target = b.gep(out, [element(b, outs, ir.Constant(I64, i))])
        for (at, kind), total in zip(parts, row_sums, strict=True):
            store(b, b.fadd(load(b, target, at, kind), total), target, at)
    b.branch(end)
    b.position_at_end(end)


def tile(columns: int, itemsize: int) -> tuple[int, int, int]:
    """Return the numbers of rows and columns of a tile for sums with `columns` columns, and of columns left over."""
    width, sums = registers()
    lanes = width // itemsize
    across = min(columns, 2 * lanes)
    return min(sums // len(widths(across, lanes)), MAX_ROWS), across, columns % across


@functools.cache
def products(height: int, width: int, rest: int, by_column: int = 0) -> Callable[..., None]:
    """Return the kernel for tiles of `height` rows and `width` columns. rest: columns left over (see `tile`)."""

    @kernel
    def convolve(x: Array, zeros: Array, frame: Frame, sums: Sums, factors: Array, start: Array, y: Array) -> None:
        """Compute the sums of all images x (N, F).

        With packed factors (1, 1, ...) (see `pack`), each image has its own sums y (N, P, O), which are initialized
        with `start` (O,). With gradients as factors (N, P, O), all images add to the same sums y (1, K, O), and `start`
        is empty. `zeros` has the size of the frame.
        """
        own, count, pitch_of_factors = start.size > 0, sums.table.size, factors.shape[2]
        full = sums.columns // width
        x, factors, y = reals(x), reals(factors), reals(y)
        wide, wide_factors, wide_sums = room(x[0]), room(factors[0]), room(y[0])
        all_x, all_y, all_w, rows = x.reshape(-1), y.reshape(-1), factors.reshape(-1), sums.starts.size
        x_size, y_size, w_size = x.shape[1], y.shape[1] * y.shape[2], factors.shape[1] * factors.shape[2]
        for n in range(x.shape[0]):
            image = zeros if frame.size else widened(x[n], wide)
            w = widened(factors[0 if own else n], wide_factors).reshape(-1)
            sums_of_image = scratch(y[n if own else 0], wide_sums)
            out = sums_of_image.reshape(-1)
            for r in range(frame.height if frame.size else 0):
                source = x[n, r * frame.row : (r + 1) * frame.row]
                target = zeros[frame.first + r * frame.step :]
                for i in range(source.size):
                    target[i] = source[i]
            for r in range(y.shape[1] if own else 0):
                target = sums_of_image[r]
                for i in range(start.size):
                    target[i] = start[i]
            for p in range(sums.parts.shape[0]):
                first, stop, w_of_part = sums.parts[p]
                for t in range(0, count, CHUNK):
                    length = min(count - t, CHUNK)
                    for block in range(full):
                        pitch, w_at = width, w_of_part + (block * count + t) * width
                        if not own:
                            pitch, w_at = pitch_of_factors, w_of_part + t * pitch_of_factors + block * width
                        for r in range(first, stop, height):
                            if t == 0 and block == 0:
                                prefetch_share(0, all_x, x_size, n + 1, r, height, rows)
                                if own:
                                    prefetch_share(1, all_y, y_size, n + 1, r, height, rows)
                                else:
                                    prefetch_share(0, all_w, w_size, n + 1, r, height, rows)
                            add_products(
                                height, width, by_column, stop - r, image, by_column * block * width, sums.starts,
                                sums.outs, r, sums.table, t, length, w, w_at, pitch, out, block * width,
                            )  # fmt: skip
                    if rest:
                        pitch, w_at = rest, w_of_part + full * count * width + t * rest
                        if not own:
                            pitch, w_at = pitch_of_factors, w_of_part + t * pitch_of_factors + full * width
                        for r in range(first, stop, height):
                            add_products(
                                height, rest, by_column, stop - r, image, by_column * full * width, sums.starts,
                                sums.outs, r, sums.table, t, length, w, w_at, pitch, out, full * width,
                            )  # fmt: skip
            write_back(y[n if own else 0], wide_sums)

    return convolve


@kernel
def pack(factors: Array, parts: int, width: int, packed: Array) -> None:
    """Reorder the rows of each part of `factors` (rows, columns) into blocks of at most `width` columns."""
    factors, count, columns = reals(factors), factors.shape[0] // parts, factors.shape[1]
    for p in range(parts):
        at = p * count * columns
        for begin in range(0, columns, width):
            across = min(width, columns - begin)
            for t in range(count):
                for i in range(across):
                    packed[at + t * across + i] = factors[p * count + t, begin + i]
            at += count * across
