"""Convolutions with 3x3 filters and stride 1, using Winograd's algorithm F(4x4, 3x3).

Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308. A tile of 6x6 input
pixels and a filter are transformed to 36 values each, so that a tile of 4x4 output pixels takes 36 multiplications per
channel and filter instead of 144. For each of the 36 values, the sum over channels is a matrix product for a block of
tiles, which stays in the L2 cache. The weight gradient uses the transposed algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import inlined, kernel
from cupynet.backend.cpu.kernels.narrow import reals, room, scratch, widened, write_back
from cupynet.backend.cpu.kernels.prefetching import prefetch_rows
from cupynet.backend.cpu.kernels.vectors import (
    I64,
    constants,
    load,
    multiply_add,
    pointers,
    registers,
    size_of,
    store,
)

VALUES = 36  # values of a transformed tile
TILES = 32  # tiles per block
PITCH = TILES + 1  # vectors between values; values a power of two apart would compete for the same cache lines
STEPS = 4  # maximum number of products per iteration of the innermost loop
_FILTER = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24
FILTER = np.kron(_FILTER, _FILTER)  # (36, 9), the transform of a filter's pixels


# transforms of a line of pixels ---------------------------------------------------------------------------------------


def _scaled(b: Any, x: Any, factor: float, total: Any) -> Any:
    real = x.type.element if isinstance(x.type, ir.VectorType) else x.type
    return multiply_add(b, x, ir.Constant(real, factor), total)


def _of_input(b: Any, d: list[Any]) -> list[Any]:
    even, odd = _scaled(b, d[2], -4, d[4]), _scaled(b, d[1], -4, d[3])
    near, apart = b.fsub(d[4], d[2]), b.fsub(d[3], d[1])
    inner = [b.fadd(even, odd), b.fsub(even, odd), _scaled(b, apart, 2, near), _scaled(b, apart, -2, near)]
    first, last = (_scaled(b, d[i], 4, _scaled(b, d[i + 2], -5, d[i + 4])) for i in (0, 1))
    return [first, *inner, last]


def _of_gradient(b: Any, d: list[Any]) -> list[Any]:
    even, odd = b.fadd(d[0], d[2]), b.fadd(d[1], d[3])
    near, apart = _scaled(b, d[2], 4, d[0]), _scaled(b, d[3], 4, d[1])
    inner = [b.fadd(even, odd), b.fsub(even, odd), _scaled(b, apart, 2, near), _scaled(b, apart, -2, near)]
    return [d[0], *inner, d[3]]


def _to_output(b: Any, m: list[Any]) -> list[Any]:
    near, apart = b.fadd(m[1], m[2]), b.fsub(m[1], m[2])
    far, wide = b.fadd(m[3], m[4]), b.fsub(m[3], m[4])
    first, last = b.fadd(b.fadd(m[0], near), far), b.fadd(_scaled(b, wide, 8, apart), m[5])
    return [first, _scaled(b, wide, 2, apart), _scaled(b, far, 4, near), last]


INPUT, GRADIENT, OUTPUT = range(3)
LINES = ((_of_input, 6), (_of_gradient, 4), (_to_output, 6))  # transforms, and the number of values that they read


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def transform(
    typing: Any, line: Any, x: Any, x_at: Any, x_step: Any, first: Any, stop: Any, y: Any, y_at: Any, y_step: Any,
    limit: Any,
) -> Any:  # fmt: skip
    """Transform a line of values, each a vector of channels: from x[x_at + i · x_step] to y[y_at + i · y_step].

    `line` is a constant, an index into `LINES`. Values outside `first` to `stop` are not read but treated as zero.
    Results from `limit` on are not written.
    """
    literals = constants(line)
    if literals is None:
        return None
    signature = types.void(line, x, x_at, x_step, first, stop, y, y_at, y_step, limit)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, b, signature, arguments)
        apply, size = LINES[literals[0]]
        source, target, begin = pointer(1, 2), pointer(6, 7), pointer(1)
        values = []
        for i in range(size):
            inside = b.and_(b.icmp_signed("<=", arguments[4], _whole(i)), b.icmp_signed(">", arguments[5], _whole(i)))
            value = load(b, b.select(inside, _moved(b, source, i, arguments[3]), begin), 0, _vector(begin))
            values.append(b.select(inside, value, ir.Constant(value.type, None)))
        for i, value in enumerate(apply(b, values)):
            with b.if_then(b.icmp_signed("<", _whole(i), arguments[9])):
                store(b, value, _moved(b, target, i, arguments[8]), 0)
        return context.get_dummy_value()

    return signature, generate


# products -------------------------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply(
    typing: Any, rows: Any, across: Any, adds: Any, a_row: Any, a_step: Any, a: Any, a_at: Any, a_jump: Any,
    w: Any, w_at: Any, w_step: Any, w_apart: Any, count: Any, out: Any, out_at: Any, out_row: Any, out_apart: Any,
) -> Any:  # fmt: skip
    """Compute a tile of a matrix product.

    For i < rows and j < across, with vectors of L values, the sum over t < count of
    a[a_at + i · a_row + t // L · a_jump + t % L · a_step] · w[w_at + t · w_step + j · w_apart] is written to
    out[out_at + i · out_row + j · out_apart], or added to it if `adds`. The first five arguments are constants; `count`
    is a multiple of L.
    """
    literals = constants(rows, across, adds, a_row, a_step)
    if literals is None:
        return None
    signature = types.void(
        rows, across, adds, a_row, a_step, a, a_at, a_jump, w, w_at, w_step, w_apart, count, out, out_at, out_row,
        out_apart,
    )  # fmt: skip

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, b, signature, arguments)
        sums = _sums(
            b, literals, (pointer(5, 6), arguments[7]), (pointer(8, 9), arguments[10], arguments[11]), arguments[12]
        )
        for i, row in enumerate(sums):
            for j, total in enumerate(row):
                place = _moved(b, _moved(b, pointer(13, 14), i, arguments[15]), j, arguments[16])
                store(b, b.fadd(load(b, place, 0, total.type), total) if literals[2] else total, place, 0)
        return context.get_dummy_value()

    return signature, generate


def _sums(b: Any, literals: list[int], left: Any, right: Any, count: Any) -> list[list[Any]]:
    (rows, across, _, row, step), (a, jump), (w, pitch, apart) = literals, left, right
    kind = _vector(a)
    lanes, steps = kind.count, min(kind.count, STEPS)
    entry, loop, done = b.block, b.append_basic_block("products"), b.append_basic_block("products.done")
    b.branch(loop)

    b.position_at_end(loop)
    t = b.phi(I64)
    sums = [[b.phi(kind) for _ in range(across)] for _ in range(rows)]
    inside = b.mul(b.and_(t, _whole(lanes - 1)), _whole(step))
    values = b.gep(a, [b.add(b.mul(b.udiv(t, _whole(lanes)), jump), inside)])
    updated: list[list[Any]] = [list(row_sums) for row_sums in sums]
    for k in range(steps):
        line = b.gep(w, [b.mul(b.add(t, _whole(k)), pitch)])
        vectors = [load(b, _moved(b, line, j, apart), 0, kind) for j in range(across)]
        for i in range(rows):
            value = b.load(b.gep(values, [_whole(i * row + k * step)]))
            for j in range(across):
                updated[i][j] = multiply_add(b, vectors[j], value, updated[i][j])
    next_t = b.add(t, _whole(steps))
    t.add_incoming(_whole(0), entry)
    t.add_incoming(next_t, loop)
    for row_sums, later in zip(sums, updated, strict=True):
        for phi, total in zip(row_sums, later, strict=True):
            phi.add_incoming(ir.Constant(kind, None), entry)
            phi.add_incoming(total, loop)
    b.cbranch(b.icmp_signed("<", next_t, count), loop, done)
    b.position_at_end(done)
    return updated


def _vector(base: Any) -> Any:
    return ir.VectorType(base.type.pointee, registers()[0] // size_of(base.type.pointee))


def _whole(value: int) -> Any:
    return ir.Constant(I64, value)


def _moved(b: Any, base: Any, number: int, apart: Any) -> Any:
    return b.gep(base, [b.mul(_whole(number), apart)])


# passes ---------------------------------------------------------------------------------------------------------------


@inlined
def next_tile(n: int, row: int, column: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the image, row and column of the next tile, without divisions, which would take 10 % of the time."""
    column += 4
    if column == columns:
        row, column = row + 4, 0
    if row == rows:
        n, row = n + 1, 0
    return n, row, column


@functools.cache
def convolution(lanes: int) -> Callable[..., None]:
    half, apart, group = lanes // 2, PITCH * lanes, VALUES * PITCH * lanes

    @kernel
    def convolve(
        x: Array, u: Array, bias: Array, top: int, left: int, strip: Array, out: Array, v: Array, m: Array, y: Array
    ) -> None:
        """Compute y (N, H', W' · O) from x (N, H, W · C), transformed filters u (36, C · O), and bias (O,) or (0,).

        `top` and `left` are the padding. Buffers: strip (6, columns of all tiles, C) and out (6, columns, O), both
        initially zero; v (C · 36 · PITCH,) and m (O · 36 · PITCH,), which contain all tiles of a block for each vector
        of channels and each of the 36 values.
        """
        x, y, u = reals(x), reals(y), u.reshape(-1)
        (_, columns, channels), filters, height, width = strip.shape, out.shape[2], x.shape[1], x.shape[2]
        wide, tall, out_width = columns // 4, (y.shape[1] + 3) // 4, y.shape[2]
        step, out_step, total = strip[0].size, out[0].size, len(x) * tall * wide
        paired = filters // (2 * lanes) * 2 * lanes  # filters in pairs of vectors; a single vector may remain
        lines = len(out)  # 6; not a constant, so that the compiler does not unroll loops
        strip, out, room_x, room_y = strip.reshape(-1), out.reshape(-1), room(x[0]), room(y[0])
        image, result = room_x.reshape(-1), room_y.reshape(-1)
        all_x, all_y, out_height = x.reshape(-1), y.reshape(-1), y.shape[1]
        n = row = column = out_n = out_row = out_column = 0
        for start in range(0, total, TILES):
            stop = min(start + TILES, total)
            for t in range(start, stop):
                if row == 0 and column == 0:
                    image = widened(x[n], room_x).reshape(-1)
                if column == 0:
                    for i in range(0, width, lanes):
                        at, to, above = (row - top) * width + i, left * channels + i, top - row
                        transform(INPUT, image, at, width, above, height + above, strip, to, step, 6)
                for c in range(channels // lanes):
                    at, to = column * channels + c * lanes, c * group + (t - start) * lanes
                    for i in range(lines):
                        transform(INPUT, strip, at + i * step, channels, 0, 6, v, to + 6 * i * apart, apart, 6)
                prefetch_rows(0, all_x, (n * height + row + 6) * width + column * channels, width, 4 * channels)
                prefetch_rows(1, all_y, (n * out_height + row) * out_width + column * filters, out_width, 4 * filters)
                n, row, column = next_tile(n, row, column, 4 * tall, 4 * wide)
            for p in range(VALUES):
                factors, first = p * channels * filters, p * apart
                for o in range(0, paired, 2 * lanes):
                    for at in range(first, first + (stop - start) * lanes, half * lanes):
                        multiply(
                            half, 2, 0, lanes, 1, v, at, group, u, factors + o, filters, lanes, channels,
                            m, at + o // lanes * group, lanes, group,
                        )  # fmt: skip
                if paired < filters:
                    for at in range(first, first + (stop - start) * lanes, lanes * lanes):
                        multiply(
                            lanes, 1, 0, lanes, 1, v, at, group, u, factors + paired, filters, lanes, channels,
                            m, at + paired // lanes * group, lanes, group,
                        )  # fmt: skip
            for o in range(bias.size):  # value (1, 1) contributes to all output pixels
                for t in range(TILES):
                    m[o // lanes * group + 7 * apart + t * lanes + o % lanes] += bias[o]
            for t in range(start, stop):
                if out_row == 0 and out_column == 0:
                    result = scratch(y[out_n], room_y).reshape(-1)
                for o in range(filters // lanes):
                    at, to = o * group + (t - start) * lanes, out_column * filters + o * lanes
                    for i in range(lines):
                        transform(OUTPUT, m, at + 6 * i * apart, apart, 0, 6, out, to + i * out_step, filters, 4)
                if out_column == 4 * wide - 4:
                    for i in range(0, out_width, lanes):
                        at, below = out_row * out_width + i, y.shape[1] - out_row
                        transform(OUTPUT, out, i, out_step, 0, 6, result, at, out_width, below)
                    if out_row == 4 * tall - 4:
                        write_back(y[out_n], room_y)
                out_n, out_row, out_column = next_tile(out_n, out_row, out_column, 4 * tall, 4 * wide)

    return convolve


@functools.cache
def weight_gradient(lanes: int) -> Callable[..., None]:
    apart, group = PITCH * lanes, VALUES * PITCH * lanes

    @kernel
    def gradient(
        x: Array, dy: Array, top: int, left: int, strip: Array, out: Array, v: Array, m: Array, du: Array
    ) -> None:
        """Add the gradient of transformed filters to du (36, C · O). Other arguments as in `convolution`."""
        x, dy, du = reals(x), reals(dy), du.reshape(-1)
        (_, columns, channels), filters, height, width = strip.shape, out.shape[2], x.shape[1], x.shape[2]
        wide, tall, out_width = columns // 4, (dy.shape[1] + 3) // 4, dy.shape[2]
        step, out_step, total, lines = strip[0].size, out[0].size, len(x) * tall * wide, len(out)
        strip, out, room_x, room_dy = strip.reshape(-1), out.reshape(-1), room(x[0]), room(dy[0])
        image, gradients = room_x.reshape(-1), room_dy.reshape(-1)
        all_x, all_dy, out_height = x.reshape(-1), dy.reshape(-1), dy.shape[1]
        n = row = column = 0
        for start in range(0, total, TILES):
            stop = min(start + TILES, total)
            if stop < start + TILES:
                v[:] = 0
                m[:] = 0
            for t in range(start, stop):
                if row == 0 and column == 0:
                    image, gradients = widened(x[n], room_x).reshape(-1), widened(dy[n], room_dy).reshape(-1)
                if column == 0:
                    for i in range(0, width, lanes):
                        at, to, above = (row - top) * width + i, left * channels + i, top - row
                        transform(INPUT, image, at, width, above, height + above, strip, to, step, 6)
                    for i in range(0, out_width, lanes):
                        at, below = row * out_width + i, dy.shape[1] - row
                        transform(GRADIENT, gradients, at, out_width, 0, below, out, i, out_step, 6)
                for c in range(channels // lanes):
                    at, to = column * channels + c * lanes, c * group + (t - start) * lanes
                    for i in range(lines):
                        transform(INPUT, strip, at + i * step, channels, 0, 6, v, to + 6 * i * apart, apart, 6)
                for o in range(filters // lanes):
                    at, to = column * filters + o * lanes, o * group + (t - start) * lanes
                    for i in range(lines):
                        transform(GRADIENT, out, at + i * out_step, filters, 0, 4, m, to + 6 * i * apart, apart, 6)
                prefetch_rows(0, all_x, (n * height + row + 6) * width + column * channels, width, 4 * channels)
                prefetch_rows(
                    0, all_dy, (n * out_height + row + 4) * out_width + column * filters, out_width, 4 * filters
                )
                n, row, column = next_tile(n, row, column, 4 * tall, 4 * wide)
            for p in range(VALUES):
                for c in range(0, channels, lanes):
                    for o in range(0, filters, lanes):
                        multiply(
                            lanes, 1, 1, 1, lanes, v, c // lanes * group + p * apart, lanes * lanes,
                            m, o // lanes * group + p * apart, lanes, group, TILES,
                            du, (p * channels + c) * filters + o, filters, lanes,
                        )  # fmt: skip

    return gradient
