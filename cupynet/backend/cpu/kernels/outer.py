"""Weight gradient for patches with rows shorter than a vector, as in the first layer, vectorized over the filters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.patches import Block, Passed, Patches
from cupynet.backend.cpu.kernels.vectors import (
    I64,
    bytes_like,
    constants,
    element,
    load,
    multiply_add,
    pointers,
    registers,
    split,
    store,
    widths,
)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def outer_sums(
    typing: Any, pixels: Any, height: Any, length: Any, filters: Any, x: Any, x_at: Any, row_step: Any, corners: Any,
    places: Any, windows: Any, dy: Any, indices: Any, dy_at: Any, pitch: Any, grad: Any, grad_at: Any, grad_step: Any,
) -> Any:  # fmt: skip
    """Add dy times the patch of the maximum, for each window of one image, to a block of the weight gradient.

    grad[grad_at + h · grad_step + i · pitch + j] += sum over k < windows of
    x[x_at + corners[k] + places[won] + h · row_step + i] · dy[dy_at + k · pitch + j],
    won = indices[dy_at + k · pitch + j], for h < height, i < length, j < filters.

    `pixels`, `height`, `length` and `filters` are constants. Arrays are flat; corners and places are int32. Arguments
    are not checked.
    """
    literals = constants(pixels, height, length, filters)
    if literals is None:
        return None
    signature = types.void(
        pixels, height, length, filters, x, x_at, row_step, corners, places, windows, dy, indices, dy_at, pitch, grad,
        grad_at, grad_step,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, builder, signature, arguments)
        inputs = (
            pointer(4, 5),
            arguments[6],
            pointer(7),
            pointer(8),
            arguments[9],
            pointer(10, 12),
            pointer(11, 12),
            arguments[13],
        )
        _emit(builder, literals, inputs, pointer(14, 15), arguments[16])
        return context.get_dummy_value()

    return signature, generate


def _emit(b: Any, literals: list[int], inputs: Any, grad: Any, grad_step: Any) -> None:
    """Emit the loop over windows, with all sums in registers. Pixels that are not maxima are multiplied by zero."""
    pixels, height, length, filters = literals
    x, row_step, corners, places, windows, dy, indices, pitch = inputs
    parts = split(filters, x.type.pointee)
    cells = [(h, i, v) for h in range(height) for i in range(length) for v in range(len(parts))]

    def target(h: int, i: int) -> Any:
        steps = b.add(b.mul(grad_step, ir.Constant(I64, h)), b.mul(pitch, ir.Constant(I64, i)))
        return b.gep(grad, [steps])

    initial = [load(b, target(h, i), *parts[v]) for h, i, v in cells]
    patches = [b.gep(x, [element(b, places, ir.Constant(I64, p))]) for p in range(pixels)]
    entry, loop, done = b.block, b.append_basic_block("outer"), b.append_basic_block("outer.done")
    b.branch(loop)

    b.position_at_end(loop)
    k = b.phi(I64)
    phis = [b.phi(parts[v][1]) for _, _, v in cells]
    sums = dict(zip(cells, phis, strict=True))
    corner, row = element(b, corners, k), b.mul(k, pitch)
    gradients = [load(b, b.gep(dy, [row]), *part) for part in parts]
    won = [load(b, b.gep(indices, [row]), at, bytes_like(kind, 0).type) for at, kind in parts]
    for p, patch in enumerate(patches):
        won_gradients = [
            b.select(b.icmp_unsigned("==", w, bytes_like(g.type, p)), g, ir.Constant(g.type, None))
            for w, g in zip(won, gradients, strict=True)
        ]
        for h in range(height):
            line = b.gep(b.gep(patch, [corner]), [b.mul(row_step, ir.Constant(I64, h))])
            for i in range(length):
                value = b.load(b.gep(line, [ir.Constant(I64, i)]))
                for v, g in enumerate(won_gradients):
                    sums[h, i, v] = multiply_add(b, g, value, sums[h, i, v])
    next_k = b.add(k, ir.Constant(I64, 1))
    k.add_incoming(ir.Constant(I64, 0), entry)
    k.add_incoming(next_k, loop)
    for phi, first, cell in zip(phis, initial, cells, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(sums[cell], loop)
    b.cbranch(b.icmp_signed("<", next_k, windows), loop, done)

    b.position_at_end(done)
    for h, i, v in cells:
        store(b, sums[h, i, v], target(h, i), parts[v][0])


def blocks(filters: int, row: int, itemsize: int) -> list[tuple[int, int, int, int]]:
    """Split a gradient for patch rows of `row` values into blocks: (first filter, filters, values, patch rows)."""
    width, max_sums = registers()
    lanes, result, at = width // itemsize, [], 0
    per_row = max_sums // row  # vectors of filters for which the sums of a whole row fit in registers
    vectors = min(per_row, 4) if per_row > 1 else 4
    while at < filters:
        count = min(filters - at, vectors * lanes)
        per_value = len(widths(count, lanes))
        length = max(1, min(row, max_sums // per_value))
        result.append((at, count, length, max(1, max_sums // (per_value * length)) if length == row else 1))
        at += count
    return result


@functools.cache
def weight_gradient(pixels: int, height: int, length: int, filters: int) -> Callable[..., None]:
    """Return the kernel for `height` x `length` values of a patch and a block of `filters`."""

    @kernel
    def gradient(x: Array, patches: Patches, passed: Passed, block: Block, grad: Array) -> None:
        """grad (K_h·K_w·C, O) += patch ⊗ dy for all maxima, within `block`. `block.lines` is a multiple of `height`."""
        dy, indices, corners, places, row_step = (
            passed.dy, passed.indices, patches.corners, patches.places, patches.step
        )  # fmt: skip
        size, windows, pitch = x.shape[1], dy.shape[1], dy.shape[2]
        images, gradients, won, out = x.reshape(-1), dy.reshape(-1), indices.reshape(-1), grad.reshape(-1)
        step, windows_of_image = patches.row * pitch, windows * pitch
        for line in range(block.line, block.line + block.lines, height):
            x_at = line * row_step + block.value
            target = line * step + block.value * pitch + block.filter
            for n in range(x.shape[0]):
                base, own = n * size + x_at, n * windows_of_image + block.filter
                outer_sums(
                    pixels, height, length, filters, images, base, row_step, corners, places, windows, gradients, won,
                    own, pitch, out, target, step,
                )  # fmt: skip

    return gradient
