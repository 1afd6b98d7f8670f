"""Convolutions of bfloat16 images with 3x3 filters and stride 1 on AMX units (`amx.py`), without im2col.

A group of images is copied to a flat array, the frame, with zeros around each image. Windows at consecutive pixels
start C values apart, so tiles are loaded from the frame directly. Windows start at every pixel of the frame; the
results for windows that extend beyond an image are dropped.

The gradient of the filters is a sum over pixels. The frame is transposed to (C, pixels). In this layout, the inputs for
each of the nine filter positions are the same rows at a different offset.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.amx import ROWS, SIDE, add_products, configure, pair_rows, release
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals
from cupynet.backend.cpu.kernels.vectors import I32, I64

I16 = ir.IntType(16)


class Layout(NamedTuple):
    """Layout of images (M, H, W, C) in a frame: first offset, and distances between rows and between images."""

    first: int
    row: int
    image: int


@intrinsic  # type: ignore[untyped-decorator]
def transpose_block(typing: Any, source: Any, start: Any, row: Any, target: Any, at: Any, pitch: Any) -> Any:
    """Transpose a block of 16 x 16 16-bit values: target[at + pitch c + r] = source[start + row r + c]."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        data = [context.make_array(signature.args[i])(context, b, arguments[i]).data for i in (0, 3)]
        vector = ir.VectorType(I16, SIDE)

        def place(array: Any, start: Any, pitch: Any, i: int) -> Any:
            address = b.gep(array, [b.add(start, b.mul(pitch, ir.Constant(I64, i)))])
            return b.bitcast(address, vector.as_pointer())

        rows = [b.load(place(data[0], arguments[1], arguments[2], i), align=2) for i in range(SIDE)]
        low = ir.Constant(ir.VectorType(I32, SIDE), [i // 2 + SIDE * (i % 2) for i in range(SIDE)])
        high = ir.Constant(ir.VectorType(I32, SIDE), [8 + i // 2 + SIDE * (i % 2) for i in range(SIDE)])
        for _ in range(4):  # each pass interleaves rows i and i + 8
            pairs = zip(rows[:8], rows[8:], strict=True)
            rows = [b.shuffle_vector(x, y, order) for x, y in pairs for order in (low, high)]
        for i, values in enumerate(rows):
            b.store(values, place(data[1], arguments[4], arguments[5], i), align=2)
        return context.get_dummy_value()

    return types.void(source, start, row, target, at, pitch), generate


@kernel
def place(images: Array, layout: Layout, values: Array) -> None:
    """Copy images (M, H, W · C) to the frame `values`, whose padding remains zero."""
    for m in range(images.shape[0]):
        for r in range(images.shape[1]):
            start, source = layout.first + m * layout.image + r * layout.row, images[m, r]
            target = values[start : start + source.size]
            for i in range(source.size):
                target[i] = source[i]


@kernel
def write_rows(sums: Array, layout: Layout, bias: Array, y: Array) -> None:
    """y (M, H', W' · O) = sums + bias. bias: (W' · O); sums: flat, with the rows and images of the layout."""
    y = reals(y)
    for m in range(y.shape[0]):
        for r in range(y.shape[1]):
            target, start = y[m, r], m * layout.image + r * layout.row
            row = sums[start : start + target.size]
            for i in range(target.size):
                target[i] = row[i] + bias[i]


@kernel
def convolve(
    images: Array, layout: Layout, values: Array, steps: Array, weight: Array, bias: Array, sums: Array, channels: int,
    y: Array,
) -> None:  # fmt: skip
    """Write a convolution of images (N / M, M, H, W · C) to y (N / M, M, H', W' · O). `values` has room for M images.

    steps: for each step, the offset in a window of the values that it multiplies. weight: (16 · steps, O), pairs of
    rows. bias: (W' · O). sums: (pixels, O), a buffer for the sums at all pixels of a frame.
    """
    configure()
    flat, filters = sums.reshape(-1), weight.shape[1]
    tiles = np.arange(0, ROWS, SIDE) * channels
    results = Layout(0, layout.row // channels * filters, layout.image // channels * filters)
    for n in range(images.shape[0]):
        place(images[n], layout, values)
        for p in range(0, sums.shape[0], ROWS):
            for o in range(0, filters, SIDE):
                at = p * filters + o
                add_products(
                    False, values, tiles + p * channels, channels, steps, weight, o, filters, flat, at, filters
                )
        write_rows(flat, results, bias, y[n])
    release()


@kernel
def weight_gradient(
    images: Array, layout: Layout, values: Array, columns: Array, starts: Array, dy: Array, gradients: Array,
    pairs: Array, sums: Array,
) -> None:  # fmt: skip
    """Add the gradient of the filters to sums (9 C, O), padded to a multiple of 64 rows. See `convolve` for the images.

    columns: buffer for the transposed frame, (C, pixels). starts: (groups, 4), offsets of the tiles in `columns`; each
    tile yields 16 rows of `sums`. dy: (N / M, M, H', W' · O). gradients: (pixels, O), initially zero; receives dy at
    the pixels where windows start. pairs: buffer for pairs of rows of `gradients`.
    """
    configure()
    channels, (pixels, filters) = columns.shape[0], gradients.shape
    flat, flat_columns, length = sums.reshape(-1), columns.reshape(-1), columns.shape[1]
    steps = np.arange(0, pixels, 2 * SIDE)
    places = Layout(0, layout.row // channels * filters, layout.image // channels * filters)
    for n in range(images.shape[0]):
        place(images[n], layout, values)
        for p in range(0, length, SIDE):
            for c in range(0, channels, SIDE):
                transpose_block(values, p * channels + c, channels, flat_columns, c * length + p, length)
        place(dy[n], places, gradients.reshape(-1))
        pair_rows(gradients, pairs)
        for g in range(starts.shape[0]):
            for o in range(0, filters, SIDE):
                at = ROWS * g * filters + o
                add_products(True, flat_columns, starts[g], length, steps, pairs, o, filters, flat, at, filters)
    release()
