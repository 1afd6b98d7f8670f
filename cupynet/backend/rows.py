"""The backward pass of a convolution under a max-pool, through the pool's winners only.

Of each pooling window one value got through, so only one in pool² of the convolution's output gradients is not zero.
Instead of two dense products, each winner adds g · (the patch it saw) to the gradient of its filter, and g · (its
filter) to the patch's gradient: sums of rows with weights, a quarter of the arithmetic under a 2x2 pool.

All of it rests on one primitive, `weighted_rows`: out += sum_t factor[t] · rows[offset[t]], for rows of a length known
to the compiler. It is written in LLVM's vectors, because the sums must stay in registers while the rows stream by,
which no loop over an array achieves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cupynet.backend.kernels import kernel

Array: TypeAlias = Any

CACHE_LINE = 64  # bytes, and the widest vector register
I32, I64 = ir.IntType(32), ir.IntType(64)


def registers() -> int:
    """How many 64-byte sums the processor's vector registers hold beside what a loop needs."""
    features = llvmlite.binding.get_host_cpu_features()
    return 7 if features.get("avx512f") else 6


def widths(length: int, widest: int) -> list[int]:
    """`length` as a sum of vector widths, powers of two from `widest` down."""
    found = []
    while length:
        width = min(widest, 1 << (length.bit_length() - 1))
        found.append(width)
        length -= width
    return found


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weighted_rows(
    typing: Any,
    length: Any,
    out: Any,
    out_at: Any,
    rows: Any,
    rows_at: Any,
    offsets: Any,
    factors: Any,
    start: Any,
    count: Any,
) -> Any:
    """out[out_at + j] += sum over t < count of factors[start + t] · rows[rows_at + offsets[start + t] + j], for j <
    length.

    `length` is a constant; all arrays are flat and contiguous; offsets are int32. Nothing is checked.
    """
    if not isinstance(length, types.IntegerLiteral):
        return None
    signature = types.void(length, out, out_at, rows, rows_at, offsets, factors, start, count)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        def pointer(array: int, at: int) -> Any:
            """To element given[at] of given[array], positions in the signature."""
            data = context.make_array(signature.args[array])(context, builder, given[array]).data
            return builder.gep(data, [given[at]])

        _emit(builder, int(length.literal_value), pointer(1, 2), pointer(3, 4), pointer(5, 7), pointer(6, 7), given[8])
        return context.get_dummy_value()

    return signature, generate


def _emit(b: Any, length: int, out: Any, rows: Any, offsets: Any, factors: Any, count: Any) -> None:
    """The loop over t with all sums in registers. (Over 40 lines: three blocks of machine code, read in one piece.)"""
    real = out.type.pointee
    itemsize = 4 if isinstance(real, ir.FloatType) else 8
    parts, at = [], 0
    for width in widths(length, CACHE_LINE // itemsize):
        parts.append((at, ir.VectorType(real, width) if width > 1 else real))
        at += width

    def place(base: Any, part: tuple[int, Any]) -> Any:
        return b.bitcast(b.gep(base, [ir.Constant(I64, part[0])]), part[1].as_pointer())

    before = [b.load(place(out, part), align=itemsize) for part in parts]
    entry, loop, done = b.block, b.append_basic_block("rows"), b.append_basic_block("rows.done")
    b.cbranch(b.icmp_signed(">", count, ir.Constant(I64, 0)), loop, done)

    b.position_at_end(loop)
    t = b.phi(I64)
    sums = [b.phi(kind) for _, kind in parts]
    row = b.gep(rows, [b.sext(b.load(b.gep(offsets, [t])), I64)])
    factor = b.load(b.gep(factors, [t]))
    after = [
        _multiply_add(b, b.load(place(row, part), align=itemsize), factor, s)
        for part, s in zip(parts, sums, strict=True)
    ]
    following = b.add(t, ir.Constant(I64, 1))
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    t.add_incoming(ir.Constant(I64, 0), entry)
    t.add_incoming(following, loop)
    for phi, first, later in zip(sums, before, after, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(later, loop)

    b.position_at_end(done)
    results = [b.phi(kind) for _, kind in parts]
    for phi, first, later in zip(results, before, after, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(later, loop)
    for part, result in zip(parts, results, strict=True):
        b.store(result, place(out, part), align=itemsize)


def _multiply_add(b: Any, x: Any, factor: Any, total: Any) -> Any:
    """x · factor + total, rounded once; `factor` is a scalar."""
    kind, scalar = x.type, factor.type
    bits = 32 if isinstance(scalar, ir.FloatType) else 64
    name = f"llvm.fma.f{bits}"
    if isinstance(kind, ir.VectorType):
        nothing = ir.Constant(kind, ir.Undefined)
        one = b.insert_element(nothing, factor, ir.Constant(I32, 0))
        factor = b.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))
        name = f"llvm.fma.v{kind.count}f{bits}"
    fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), name)
    return b.call(fma, [x, factor, total])


def blocks(length: int, itemsize: int) -> tuple[int, int, int]:
    """A row as (number of full blocks, their length, the rest): what the registers hold at a time."""
    most = registers() * CACHE_LINE // itemsize
    if length <= most:
        return 0, 0, length
    return length // most, most, length % most


@functools.cache
def weight_gradient(full: int, block: int, rest: int) -> Callable[..., None]:
    """The kernel for rows of `full` blocks and a rest, see `blocks`."""

    @kernel
    def gradient(
        dy: Array, winners: Array, corners: Array, places: Array, x: Array, height: int, row_step: int, grad: Array
    ) -> None:
        """grad[o, ky] += sum over images and windows of dy · (row ky of the winner's patch).

        dy, winners: (N, P, O), P windows of an image; corners: (P,) where the first patch of each window starts in an
            image; places:
        where the others start from there; x: (N, F) images; height: rows of a patch, `row_step` apart; grad: (O ·
        height, row) .
        """
        windows, filters = dy.shape[1], dy.shape[2]
        offsets = np.empty(filters * windows, np.int32)
        factors = np.empty(filters * windows, dy.dtype)
        counts = np.empty(filters, np.int64)
        flat, out, size, length = x.reshape(-1), grad.reshape(-1), x.shape[1], grad.shape[1]
        for n in range(dy.shape[0]):
            counts[:] = 0
            for k in range(windows):
                won, gradients, corner = winners[n, k], dy[n, k], corners[k]
                for o in range(filters):
                    at = o * windows + counts[o]
                    offsets[at] = corner + places[won[o]]
                    factors[at] = gradients[o]
                    counts[o] += gradients[o] != 0
            for ky in range(height):
                for o in range(filters):
                    base, target = n * size + ky * row_step, (o * height + ky) * length
                    for _ in range(full):
                        weighted_rows(block, out, target, flat, base, offsets, factors, o * windows, counts[o])
                        base, target = base + block, target + block
                    if rest:
                        weighted_rows(rest, out, target, flat, base, offsets, factors, o * windows, counts[o])

    return gradient


@functools.cache
def input_gradient(full: int, block: int, rest: int) -> Callable[..., None]:
    """The kernel for rows of `full` blocks and a rest, see `blocks`."""

    @kernel
    def gradient(
        dy: Array, winners: Array, corners: Array, places: Array, weight: Array, height: int, row_step: int, dx: Array
    ) -> None:
        """dx = 0, then the winner's patch gets dy · filter.

        As in `weight_gradient`; weight: (height, O, row padded to a cache line); dx: (N, F).
        """
        windows, filters, choices = dy.shape[1], dy.shape[2], places.size
        offsets = np.empty(windows * choices * filters, np.int32)
        factors = np.empty(windows * choices * filters, dy.dtype)
        counts = np.empty(windows * choices, np.int64)
        flat, out, size, length = weight.reshape(-1), dx.reshape(-1), dx.shape[1], weight.shape[2]
        for n in range(dy.shape[0]):
            dx[n] = 0
            counts[:] = 0
            for k in range(windows):
                won, gradients = winners[n, k], dy[n, k]
                for o in range(filters):
                    q = k * choices + won[o]
                    at = q * filters + counts[q]
                    offsets[at] = o * length
                    factors[at] = gradients[o]
                    counts[q] += gradients[o] != 0
            for ky in range(height):
                for q in range(windows * choices):
                    if counts[q]:
                        base = ky * filters * length
                        target = n * size + corners[q // choices] + places[q % choices] + ky * row_step
                        for _ in range(full):
                            weighted_rows(block, out, target, flat, base, offsets, factors, q * filters, counts[q])
                            base, target = base + block, target + block
                        if rest:
                            weighted_rows(rest, out, target, flat, base, offsets, factors, q * filters, counts[q])

    return gradient
