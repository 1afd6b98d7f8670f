"""Gradients of a convolution followed by max pooling. Only the maxima of the pool have nonzero gradients.

Each maximum with gradient g adds g · patch to the gradient of its filter, and g · filter to the gradient of its patch.
`weighted_rows` is generated as LLVM vector code, because Numba does not keep the sums of an array loop in registers.
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
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals, room, scratch, widened, write_back
from cupynet.backend.cpu.kernels.patches import Passed, Patches
from cupynet.backend.cpu.kernels.vectors import (
    I64,
    constants,
    element,
    load,
    multiply_add,
    pointers,
    registers,
    split,
    store,
)

L1_BYTES = 24 * 1024  # part of the L1 cache used for images; L1 caches have at least 32 KB


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def weighted_rows(
    typing: Any, length: Any, out: Any, out_at: Any, rows: Any, rows_at: Any, offsets: Any, factors: Any, at: Any,
    count: Any,
) -> Any:  # fmt: skip
    """out[out_at + j] += sum over t < count of factors[at + t] · rows[rows_at + offsets[at + t] + j], for j < length.

    `length` is a constant. Arrays are flat; offsets are int32. Arguments are not checked.
    """
    literals = constants(length)
    if literals is None:
        return None
    signature = types.void(length, out, out_at, rows, rows_at, offsets, factors, at, count)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, builder, signature, arguments)
        _emit(builder, literals[0], pointer(1, 2), pointer(3, 4), pointer(5, 7), pointer(6, 7), arguments[8])
        return context.get_dummy_value()

    return signature, generate


def _emit(b: Any, length: int, out: Any, rows: Any, offsets: Any, factors: Any, count: Any) -> None:
    parts = split(length, out.type.pointee)
    initial = [load(b, out, *part) for part in parts]
    entry, loop, done = b.block, b.append_basic_block("rows"), b.append_basic_block("rows.done")
    b.cbranch(b.icmp_signed(">", count, ir.Constant(I64, 0)), loop, done)

    b.position_at_end(loop)
    t = b.phi(I64)
    sums = [b.phi(kind) for _, kind in parts]
    row, factor = b.gep(rows, [element(b, offsets, t)]), b.load(b.gep(factors, [t]))
    updated = [multiply_add(b, load(b, row, *part), factor, total) for part, total in zip(parts, sums, strict=True)]
    next_t = b.add(t, ir.Constant(I64, 1))
    b.cbranch(b.icmp_signed("<", next_t, count), loop, done)
    t.add_incoming(ir.Constant(I64, 0), entry)
    t.add_incoming(next_t, loop)

    b.position_at_end(done)
    results = [b.phi(kind) for _, kind in parts]
    for phis in (sums, results):
        for phi, first, later in zip(phis, initial, updated, strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(later, loop)
    for (at, _), result in zip(parts, results, strict=True):
        store(b, result, out, at)


def blocks(length: int, itemsize: int) -> tuple[int, int, int]:
    """Split a row into blocks that fit in the registers: (number of full blocks, block length, remaining values)."""
    width, sums = registers()
    max_length = min(sums, 8) * width // itemsize  # eight sums are enough to hide the latency of additions
    return (0, 0, length) if length <= max_length else (length // max_length, max_length, length % max_length)


@functools.cache
def weight_gradient(full: int, block: int, rest: int) -> Callable[..., None]:
    """Return the kernel for rows split by `blocks`."""

    @kernel
    def gradient(x: Array, patches: Patches, passed: Passed, grad: Array) -> None:
        """grad (O · height, row) += dy · (row of the maximum's patch), for all windows of x (N, values of an image)."""
        dy, indices, corners, places = passed.dy, passed.indices, patches.corners, patches.places
        height, length, row_step = patches.height, patches.row, patches.step
        windows, filters, size = dy.shape[1], dy.shape[2], x.shape[1]
        x, dy = reals(x), reals(dy)
        group = max(1, L1_BYTES // (size * grad.itemsize))  # images for which sums are loaded and stored only once
        capacity = windows * group
        offsets = np.empty(filters * capacity, np.int32)
        factors = np.empty(filters * capacity, grad.dtype)
        counts = np.empty(filters, np.int64)
        wide, out = room(x[:group]), grad.reshape(-1)
        for start in range(0, dy.shape[0], group):
            counts[:] = 0
            images = widened(x[start : start + group], wide).reshape(-1)
            for n in range(start, min(start + group, dy.shape[0])):
                for k in range(windows):
                    won, gradients, corner = indices[n, k], dy[n, k], (n - start) * size + corners[k]
                    for o in range(filters):
                        at = o * capacity + counts[o]
                        offsets[at] = corner + places[won[o]]
                        factors[at] = gradients[o]
                        counts[o] += gradients[o] != 0
            for ky in range(height):
                for o in range(filters):
                    base, target, first = ky * row_step, (o * height + ky) * length, o * capacity
                    for _ in range(full):
                        weighted_rows(block, out, target, images, base, offsets, factors, first, counts[o])
                        base, target = base + block, target + block
                    if rest:
                        weighted_rows(rest, out, target, images, base, offsets, factors, first, counts[o])

    return gradient


@functools.cache
def input_gradient(full: int, block: int, rest: int) -> Callable[..., None]:
    """Return the kernel for rows split by `blocks`."""

    @kernel
    def gradient(weight: Array, patches: Patches, passed: Passed, dx: Array) -> None:
        """Write the sum of dy · filter to dx (N, F). weight: (height, O, row), with rows padded to cache lines."""
        dy, indices, corners, places = passed.dy, passed.indices, patches.corners, patches.places
        height, row_step = patches.height, patches.step
        windows, filters, choices = dy.shape[1], dy.shape[2], places.size
        offsets = np.empty(windows * choices * filters, np.int32)
        factors = np.empty(windows * choices * filters, weight.dtype)
        counts = np.empty(windows * choices, np.int64)
        dy, dx = reals(dy), reals(dx)
        values, wide, length = weight.reshape(-1), room(dx[0]), weight.shape[2]
        for n in range(dy.shape[0]):
            out = scratch(dx[n], wide)
            out[:] = 0
            counts[:] = 0
            for k in range(windows):
                won, gradients = indices[n, k], dy[n, k]
                for o in range(filters):
                    q = k * choices + won[o]
                    at = q * filters + counts[q]
                    offsets[at] = o * length
                    factors[at] = gradients[o]
                    counts[q] += gradients[o] != 0
            for ky in range(height):
                for q in range(windows * choices):
                    if counts[q]:
                        base, first = ky * filters * length, q * filters
                        target = corners[q // choices] + places[q % choices] + ky * row_step
                        for _ in range(full):
                            weighted_rows(block, out, target, values, base, offsets, factors, first, counts[q])
                            base, target = base + block, target + block
                        if rest:
                            weighted_rows(rest, out, target, values, base, offsets, factors, first, counts[q])
            write_back(dx[n], wide)

    return gradient
