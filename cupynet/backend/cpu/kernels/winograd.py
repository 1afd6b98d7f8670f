"""Convolution with Winograd's minimal filtering, with or without 2x2 max pooling.

Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.

With K x K filters and n = K + m - 1, a tile of m x m outputs takes n² multiplications instead of m²·K²: a sixth for
5 x 5 filters and m = 4. With constant matrices A, B and G, y = Aᵀ ((G w Gᵀ) ⊙ (Bᵀ x B)) A. At each of the n² points,
the sum over channels is a matrix product. The backward pass is the transpose. Larger tiles need fewer multiplications
per output, but their rounding errors are larger: in float, up to 14 times as large as with direct sums for m = 4, and
up to 22 times for m = 6.

In this module, `size` is K and `side` is m. Both are compile-time constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sized
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import inlined, kernel
from cupynet.backend.cpu.kernels.narrow import reals, scratch
from cupynet.backend.cpu.kernels.prefetching import prefetch_rows
from cupynet.backend.cpu.kernels.vectors import (
    I64,
    constants,
    load,
    multiply_add,
    pointers,
    registers,
    rolled,
    size_of,
    store,
    sums_of_products,
)

POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)  # the finite points; the last point is infinity


@functools.cache
def matrices(size: int, side: int) -> list[Array]:
    """Return Aᵀ (m, n), A, Bᵀ (n, n), B, G (n, K) and Gᵀ (Toom-Cook with interpolation at the first `POINTS`)."""
    points = np.array(POINTS[: size + side - 2])
    others = [np.delete(points, i) for i in range(points.size)]
    scale = [*(np.prod(point - rest) for point, rest in zip(points, others, strict=True)), 1]
    outputs, filters = (
        np.vstack([points[:, None] ** np.arange(count), np.eye(1, count, count - 1)]) for count in (side, size)
    )
    inputs = np.array([*(np.append(np.poly(rest)[::-1], 0) for rest in others), np.poly(points)[::-1]])
    filters /= np.array(scale)[:, None]
    return [outputs.T, outputs, inputs, inputs.T, filters, filters.T]


class Tiles(NamedTuple):
    """Tiles of images, and buffers. C and O are padded to a multiple of the `block` width.

    Attributes:
        down, across: number of tiles per image, vertically and horizontally. The last ones may be incomplete.
        top, left: padding of the images.
        group: number of rows of tiles that are computed together.
        lanes: number of values in a vector.
        frame: (n, W · channels + padding), the pixels that a row of tiles reads, where W = m · across + K - 1.
        gradient: (n · W, C), the gradient of these pixels. The forward pass uses neither this nor `turned`.
        outputs: (m · m, O), the outputs of a tile.
        weights: (n², C, O), G w Gᵀ or its gradient.
        turned: (n², O, C), the transposed weights for the input gradient.
        points, products: (tiles, n² · C) and (tiles, n² · O), padded by a vector per tile to avoid cache conflicts.
    """

    down: int
    across: int
    top: int
    left: int
    group: int
    lanes: int
    frame: Array
    gradient: Array
    outputs: Array
    weights: Array
    turned: Array
    points: Array
    products: Array


def block(columns: int, itemsize: int) -> tuple[int, int]:
    """Return the numbers of rows and columns in a block of sums in registers. Columns are padded to full blocks."""
    width, sums = registers()
    vectors, max_across = -(-columns * itemsize // width), 4 if sums >= 16 else 3
    # the widest block with the least padding; a single vector would need a load for each product
    across = min(range(min(vectors, 2), max_across + 1), key=lambda count: (-(-vectors // count) * count, -count))
    return 1 << (min(sums // across, 8).bit_length() - 1), across * width // itemsize


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def transform(
    typing: Any, size: Any, side: Any, which: Any, adds: Any, x: Any, x_at: Any, x_down: Any, x_across: Any, y: Any,
    y_at: Any, y_down: Any, y_across: Any,
) -> Any:  # fmt: skip
    """y = T x Tᵀ for a vector of channels of a tile, or y += T x Tᵀ if `adds` is 1.

    T is matrix `which` of `matrices`. `_down` and `_across` are the strides of rows and columns. The first four
    arguments are constants. Arrays are flat. Arguments are not checked.
    """
    literals = constants(size, side, which, adds)
    if literals is None:
        return None
    *key, chosen, added = literals
    matrix, by_row = matrices(*key)[chosen], chosen in (1, 2, 4)
    after, before = matrix.shape

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, b, signature, arguments)
        source, target = pointer(4, 5), pointer(8, 9)
        real = source.type.pointee
        kind = ir.VectorType(real, registers()[0] // size_of(real))
        half = cgutils.alloca_once(b, real, size=before * after * kind.count)
        half.align = registers()[0]
        lanes, line = I64(kind.count), I64(before * kind.count)
        for_each = functools.partial(_emit, b, matrix, kind, by_row=by_row)
        for_each(before, (source, arguments[6], arguments[7]), (half, line, lanes), adds=False)
        for_each(after, (half, lanes, line), (target, arguments[11], arguments[10]), adds=bool(added))
        return context.get_dummy_value()

    return types.void(size, side, which, adds, x, x_at, x_down, x_across, y, y_at, y_down, y_across), generate


def _emit(b: Any, matrix: Array, kind: Any, count: int, x: Any, y: Any, *, by_row: bool, adds: bool) -> None:
    """Emit `count` products of the matrix and a vector. x, y: (pointer, stride in a vector, stride between vectors)."""
    with cgutils.for_range(b, I64(count)) as loop:
        source, target = (b.gep(base, [b.mul(loop.index, following)]) for base, _, following in (x, y))
        values = [load(b, b.gep(source, [b.mul(x[1], I64(j))]), 0, kind) for j in range(matrix.shape[1])]
        for i, result in enumerate(_transformed(b, matrix, values, by_row=by_row)):
            place = b.gep(target, [b.mul(y[1], I64(i))])
            store(b, b.fadd(load(b, place, 0, kind), result) if adds else result, place, 0)
        last = b.block
    rolled(b, last.terminator)


def _transformed(b: Any, matrix: Array, values: list[Any], *, by_row: bool) -> list[Any]:
    """Emit the product of a matrix and values.

    Rows (or columns, unless `by_row`) 1 and 2, 3 and 4, ... belong to a point and its negative. They are u + v and
    u - v, where u and v have few nonzero elements in common.
    """
    points = matrix.copy() if by_row else matrix.T.copy()
    for i in _pairs(points):
        points[i : i + 2] = (points[i] + points[i + 1]) / 2, (points[i] - points[i + 1]) / 2
    if by_row:
        return _added_pairs(b, [_sum(b, row, values) for row in points.tolist()])
    values = _added_pairs(b, values)
    return [_sum(b, row, values) for row in points.T.tolist()]


def _pairs(points: Sized) -> range:
    """Return the indices of the first point of each pair (p, -p). The last point is infinity."""
    return range(1, len(points) - 2, 2)


def _added_pairs(b: Any, values: list[Any]) -> list[Any]:
    """Replace the values at a point and its negative with their sum and difference."""
    result = list(values)
    for i in _pairs(values):
        result[i : i + 2] = b.fadd(values[i], values[i + 1]), b.fsub(values[i], values[i + 1])
    return result


def _sum(b: Any, factors: list[float], values: list[Any]) -> Any:
    total = None
    for factor, value in zip(factors, values, strict=True):
        if factor and total is None:
            total = value if factor == 1 else b.fmul(value, ir.Constant(value.type, [factor] * value.type.count))
        elif factor in (1, -1):
            total = b.fadd(total, value) if factor == 1 else b.fsub(total, value)
        elif factor:
            total = multiply_add(b, value, ir.Constant(value.type.element, factor), total)
    return total


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def product(
    typing: Any, height: Any, width: Any, adds: Any, x: Any, x_at: Any, places: Any, table: Any, w: Any, w_at: Any,
    pitch: Any, count: Any, y: Any, y_at: Any, y_step: Any,
) -> Any:  # fmt: skip
    """y[y_at + i · y_step + j] = sum over t < count of x[x_at + places[i] + table[t]] · w[w_at + t · pitch + j].

    Computed for i < height and j < width. The first three arguments are constants. See `transform` for `adds` and
    arrays.
    """
    literals = constants(height, width, adds)
    if literals is None:
        return None

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, b, signature, arguments)
        inputs = (
            pointer(3, 4),
            pointer(5),
            literals[0],
            pointer(6),
            pointer(7, 8),
            arguments[9],
            arguments[10],
            literals[1],
        )
        sums, parts = sums_of_products(b, *inputs)
        for i, row_sums in enumerate(sums):
            target = b.gep(pointer(11, 12), [b.mul(arguments[13], I64(i))])
            for (at, kind), total in zip(parts, row_sums, strict=True):
                store(b, b.fadd(load(b, target, at, kind), total) if literals[2] else total, target, at)
        return context.get_dummy_value()

    return types.void(height, width, adds, x, x_at, places, table, w, w_at, pitch, count, y, y_at, y_step), generate


@inlined
def multiply(
    height: int, width: int, adds: int, sizes: Any, x: Array, x_steps: Any, w: Array, w_steps: Any, y: Array,
    y_steps: Any,
) -> None:  # fmt: skip
    """Compute x (rows, count) @ w (count, columns) at each point. sizes: (points, rows, columns, count)."""
    points, rows, columns, count = sizes
    places, table = np.empty(height, np.int32), np.empty(count, np.int32)
    for i in range(height):
        places[i] = i * x_steps[1]
    for t in range(count):
        table[t] = t * x_steps[2]
    for p in range(points):
        for r in range(0, rows, height):
            x_at, w_at, y_at = p * x_steps[0] + r * x_steps[1], p * w_steps[0], p * y_steps[0] + r * y_steps[1]
            for c in range(0, columns, width):
                product(
                    height, width, adds, x, x_at, places, table, w, w_at + c, w_steps[1], count, y, y_at + c, y_steps[1]
                )  # fmt: skip


@inlined
def transform_filters(size: int, side: int, which: int, lanes: int, x: Array, y: Array) -> None:
    """Transform filters (K · K, values) to points (n², values) if `which` is 4, or apply the transpose if it is 5."""
    x_step, y_step, n = x.shape[1], y.shape[1], size + side - 1
    before, after = (size, n) if which == 4 else (n, size)
    x, y = x.reshape(-1), y.reshape(-1)
    for c in range(0, x_step, lanes):
        transform(size, side, which, 0, x, c, before * x_step, x_step, y, c, after * y_step, y_step)


@inlined
def transform_images(size: int, side: int, x: Array, first: int, last: int, tiles: Tiles) -> Any:
    """Write Bᵀ x B for rows of tiles in images (N, H, W, C) to `points`. Return the sum of |x| over the pixels read."""
    pixels, frame, points, total = (
        x.reshape(len(x), -1),
        tiles.frame,
        tiles.points.reshape(-1),
        tiles.frame.dtype.type(0),
    )
    channels, n, line, own = tiles.gradient.shape[1], size + side - 1, x.shape[2] * x.shape[3], x.shape[3]
    flat, step, all_x = frame.reshape(-1), frame.shape[1], x.reshape(-1)
    used = min(line, (tiles.across * side + size - 1 - tiles.left) * own)
    for row in range(first, last):
        for i in range(n):
            at = row % tiles.down * side + i - tiles.top
            inside = 0 <= at < x.shape[1]
            source = pixels[row // tiles.down, at * line :][: used if inside else 0]
            target = frame[i, tiles.left * own :]
            if not inside:
                frame[i] = 0
            for j in range(source.size):
                target[j] = source[j]
                total += abs(target[j])
        for t in range(tiles.across):
            x_at, y_at = t * side * own, ((row - first) * tiles.across + t) * tiles.points.shape[1]
            for c in range(0, channels, tiles.lanes):
                transform(size, side, 2, 0, flat, x_at + c, step, own, points, y_at + c, n * channels, channels)
            following = row // tiles.down * x.shape[1] + row % tiles.down * side + n - tiles.top
            prefetch_rows(0, all_x, following * line + t * side * own, side, line, side * own)
    return total


@inlined
def transform_gradient(size: int, side: int, tiles: Tiles, first: int, last: int, dx: Array) -> None:
    """Write B dV Bᵀ for rows of tiles to dx (N, H, W, C). Pixels shared with the next row stay in `gradient`."""
    gradient, points, n, start = tiles.gradient, tiles.points.reshape(-1), size + side - 1, 0
    channels, width, flat = gradient.shape[1], gradient.shape[0] // n, gradient.reshape(-1)
    for row in range(first, last):
        for t in range(tiles.across):
            for c in range(0, channels, tiles.lanes):
                transform(
                    size, side, 3, 1, points, start + c, n * channels, channels, flat, t * side * channels + c,
                    width * channels, channels,
                )  # fmt: skip
            start += tiles.points.shape[1]
        down = row % tiles.down
        done = n if down == tiles.down - 1 else side
        for i in range(done):
            at = down * side + i - tiles.top
            if 0 <= at < dx.shape[1]:
                for j in range(min(dx.shape[2], width - tiles.left)):
                    source, target = gradient[i * width + tiles.left + j], dx[row // tiles.down, at, j]
                    for c in range(target.size):
                        target[c] = source[c]
        kept = (n - done) * width * channels
        for i in range(kept):
            flat[i] = flat[done * width * channels + i]
        flat[kept:] = 0


@inlined
def pool(side: int, outputs: Array, at: int, bias: Array, y: Array, indices: Array) -> None:
    """Write the maximum of four outputs plus bias, and its index, the first among equals."""
    for o in range(bias.size):
        best, won = outputs[at, o], np.uint8(0)
        for q in range(1, 4):
            value = outputs[at + q // 2 * side + q % 2, o]
            if value > best:
                best, won = value, np.uint8(q)
        y[o], indices[o] = best + bias[o], won


@inlined
def unpool(side: int, dy: Array, indices: Array, outputs: Array, at: int) -> None:
    for q in range(4):
        target = outputs[at + q // 2 * side + q % 2]
        for o in range(dy.size):
            target[o] = dy[o] if indices[o] == q else 0


@inlined
def write_outputs(
    size: int, side: int, pools: int, tiles: Tiles, first: int, last: int, bias: Array, y: Array, indices: Array
) -> None:
    """Write Aᵀ m A plus bias, or the maxima, for rows of tiles to y (N, H', W', O), without outputs beyond it."""
    products, outputs, n, start = tiles.products.reshape(-1), tiles.outputs, size + side - 1, 0
    filters, flat, high, line, own = outputs.shape[1], outputs.reshape(-1), side // pools, y[0, 0].size, y.shape[3]
    all_y = y.reshape(-1)
    whole, in_place = scratch(all_y, flat), pools == 1 and y.itemsize == outputs.itemsize and own == filters
    for row in range(first, last):
        image, top = row // tiles.down, row % tiles.down * high
        for t in range(tiles.across):
            at = (image * y.shape[1] + top) * line + t * high * own
            tall, wide = min(high, y.shape[1] - top), min(high, y.shape[2] - t * high)
            prefetch_rows(1, all_y, at + high * line, high, line, high * own)
            if in_place and tall == high and wide == high:
                for o in range(own):  # value (1, 1) contributes to all outputs
                    products[start + (n + 1) * filters + o] += bias[o]
                for o in range(0, filters, tiles.lanes):
                    transform(size, side, 0, 0, products, start + o, n * filters, filters, whole, at + o, line, own)
            else:
                for o in range(0, filters, tiles.lanes):
                    transform(
                        size, side, 0, 0, products, start + o, n * filters, filters, flat, o, side * filters, filters
                    )
                for i in range(tall):
                    for j in range(wide):
                        target = y[image, top + i, t * high + j]
                        if pools == 2:
                            pool(side, outputs, 2 * (i * side + j), bias, target, indices[image, top + i, t * high + j])
                        else:
                            source = outputs[i * side + j]
                            for o in range(bias.size):
                                target[o] = source[o] + bias[o]
            start += tiles.products.shape[1]


@inlined
def transform_output_gradients(
    size: int, side: int, pools: int, tiles: Tiles, first: int, last: int, dy: Array, indices: Array
) -> None:
    """Write A dy Aᵀ for rows of tiles of dy (N, H', W', O), which is zero beyond its last pixels, to `products`."""
    products, outputs, n, start = tiles.products.reshape(-1), tiles.outputs, size + side - 1, 0
    filters, flat, high, line, own = outputs.shape[1], outputs.reshape(-1), side // pools, dy[0, 0].size, dy.shape[3]
    all_dy = dy.reshape(-1)
    whole, in_place = scratch(all_dy, flat), pools == 1 and dy.itemsize == outputs.itemsize and own == filters
    for row in range(first, last):
        image, top = row // tiles.down, row % tiles.down * high
        for t in range(tiles.across):
            at = (image * dy.shape[1] + top) * line + t * high * own
            tall, wide = min(high, dy.shape[1] - top), min(high, dy.shape[2] - t * high)
            prefetch_rows(0, all_dy, at + high * line, high, line, high * own)
            if in_place and tall == high and wide == high:
                for o in range(0, filters, tiles.lanes):
                    transform(size, side, 1, 0, whole, at + o, line, own, products, start + o, n * filters, filters)
                start += tiles.products.shape[1]
                continue
            if tall < high or wide < high:
                outputs[:] = 0
            for i in range(tall):
                for j in range(wide):
                    source = dy[image, top + i, t * high + j]
                    if pools == 2:
                        unpool(side, source, indices[image, top + i, t * high + j], outputs, 2 * (i * side + j))
                    else:
                        target = outputs[i * side + j]
                        for o in range(source.size):
                            target[o] = source[o]
            for o in range(0, filters, tiles.lanes):
                transform(size, side, 1, 0, flat, o, side * filters, filters, products, start + o, n * filters, filters)
            start += tiles.products.shape[1]


@functools.cache
def forward(size: int, side: int, height: int, width: int, pools: int) -> Callable[..., bool]:
    """Return the forward kernel. height, width: see `block`; pools: 2 with pooling, or 1."""

    @kernel
    def convolve(x: Array, large: Any, weight: Array, bias: Array, tiles: Tiles, y: Array, indices: Array) -> bool:
        """Write outputs, and the indices of maxima. Return False if a sum of |x| is not below `large`.

        x: (N, H, W, C) images; weight: (K · K, C · O padded); bias: (O,); y, indices: (N, H', W', O).
        """
        x, y, v, m, w = reals(x), reals(y), tiles.points, tiles.products, tiles.weights
        flat, across, total = m.reshape(-1), tiles.across, len(x) * tiles.down
        n, channels, filters = size + side - 1, tiles.gradient.shape[1], w.shape[2]
        transform_filters(size, side, 4, tiles.lanes, weight, w.reshape(n * n, -1))
        tiles.frame[:] = 0
        for first in range(0, total, tiles.group):
            rows = min(tiles.group, total - first)
            if not transform_images(size, side, x, first, first + rows, tiles) < large:
                return False
            multiply(
                height, width, 0, (n * n, rows * across, filters, x.shape[3]), v.reshape(-1), (channels, v.shape[1], 1),
                w.reshape(-1), (w.shape[1] * filters, filters), flat, (filters, m.shape[1]),
            )  # fmt: skip
            write_outputs(size, side, pools, tiles, first, first + rows, bias, y, indices)
        return True

    return convolve


@functools.cache
def backward(
    size: int, side: int, height: int, width: int, dx_height: int, dx_width: int, pools: int
) -> Callable[..., bool]:
    """Return the backward kernel. height, width: `block` of filters; dx_height, dx_width: channels."""

    @kernel
    def gradients(
        x: Array, large: Any, dy: Array, indices: Array, turned: Array, tiles: Tiles, grad: Array, dx: Array
    ) -> bool:  # fmt: skip
        """Write grad (K · K, C · O padded), and dx unless it is empty. Return False like `forward`; dy is not checked.

        x: (N, H, W, C); dy, indices: (N, H', W', O); turned: (K · K, O · C padded), not used without dx.
        """
        x, dy, dx, v, m, w = reals(x), reals(dy), reals(dx), tiles.points, tiles.products, tiles.weights
        flat, across, total = m.reshape(-1), tiles.across, len(x) * tiles.down
        n, channels, filters = size + side - 1, tiles.gradient.shape[1], w.shape[2]
        if len(dx):
            transform_filters(size, side, 4, tiles.lanes, turned, tiles.turned.reshape(n * n, -1))
        w[:], tiles.frame[:], tiles.gradient[:], tiles.outputs[:] = 0, 0, 0, 0
        for first in range(0, total, tiles.group):
            rows = min(tiles.group, total - first)
            if not transform_images(size, side, x, first, first + rows, tiles) < large:
                return False
            transform_output_gradients(size, side, pools, tiles, first, first + rows, dy, indices)
            multiply(
                height, width, 1, (n * n, x.shape[3], filters, rows * across), v.reshape(-1), (channels, 1, v.shape[1]),
                flat, (filters, m.shape[1]), w.reshape(-1), (w.shape[1] * filters, filters),
            )  # fmt: skip
            if len(dx):
                multiply(
                    dx_height, dx_width, 0, (n * n, rows * across, channels, dy.shape[3]), flat,
                    (filters, m.shape[1], 1), tiles.turned.reshape(-1), (dy.shape[3] * channels, channels),
                    v.reshape(-1), (channels, v.shape[1]),
                )  # fmt: skip
                transform_gradient(size, side, tiles, first, first + rows, dx)
        transform_filters(size, side, 5, tiles.lanes, w.reshape(n * n, -1), grad)
        return True

    return gradients
