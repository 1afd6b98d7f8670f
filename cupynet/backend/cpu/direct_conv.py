"""The sums of a convolution on the CPU, as tables for `kernels/tiles.py`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import tiles
from cupynet.backend.cpu.kernels.tiles import Frame, Sums
from cupynet.backend.window import Window


class Passes(NamedTuple):
    """The sums of the three passes of a convolution, for one image size.

    Attributes:
        frame: the padding of an image.
        forward: sums over the values of a patch, for each patch.
        weight_gradient: sums over patches, for each value of a patch.
        input_gradient: sums over filters, for each place of the window and each pixel it saw.
        places: the places of the window that saw any pixel, in the order of `input_gradient`.
    """

    frame: Frame
    forward: Sums
    weight_gradient: Sums
    input_gradient: Sums
    places: list[int]


@functools.lru_cache(maxsize=256)
def passes(image: tuple[int, ...], filters: int, window: Window, itemsize: int) -> Passes | None:
    """Return the passes for images (H, W, C), or None if no window sees a pixel."""
    (height, width, channels), (rows, cols) = image, window.output(image[0], image[1])
    padded, step = window.padded(height, width), window.padded(height, width)[1] * channels
    (top, _), (left, _) = window.padding
    size = padded[0] * step if window.pads else 0
    frame = tiles.Frame(size, top * step + left * channels, height, width * channels, step)
    corners = _grid(rows, cols, window.stride[0] * step, window.stride[1] * channels)
    pixels = _grid(*window.kernel, window.dilation[0] * step, window.dilation[1] * channels)
    patch = (pixels[:, None] + np.arange(channels)).reshape(-1)
    outputs, weights = np.arange(corners.size) * filters, np.arange(patch.size) * filters
    places, seen = _seen(image, filters, window)
    if not places:
        return None
    return Passes(
        frame,
        _sums([(corners, outputs, patch)], filters, itemsize),
        _sums([(patch, weights, corners)], filters, itemsize),
        _sums(seen, channels, itemsize),
        places,
    )


def _grid(rows: int, cols: int, down: int, across: int) -> Array:
    """Return the offsets of the points of a grid, row by row."""
    return (np.arange(rows)[:, None] * down + np.arange(cols) * across).reshape(-1)


def _seen(image: tuple[int, ...], filters: int, window: Window) -> tuple[list[int], list[tuple[Array, Array, Array]]]:
    """Places of the window that saw pixels; for each, offsets into gradients (H', W', O), pixels and filters."""
    (height, width, channels), counts = image, window.output(image[0], image[1])
    places, found = [], []
    for place, at in enumerate(np.ndindex(*window.kernel)):
        y, x = (
            np.arange(counts[i]) * window.stride[i] + at[i] * window.dilation[i] - window.padding[i][0] for i in (0, 1)
        )
        row, col = np.flatnonzero((y >= 0) & (y < height)), np.flatnonzero((x >= 0) & (x < width))
        if row.size and col.size:
            windows, pixels = row[:, None] * counts[1] + col, y[row][:, None] * width + x[col]
            places.append(place)
            found.append((windows.reshape(-1) * filters, pixels.reshape(-1) * channels, np.arange(filters)))
    return places, found


def _sums(parts: list[tuple[Array, Array, Array]], columns: int, itemsize: int) -> Sums:
    """(starts, outs, table) of each part for kernels; tiles are filled by repeating their last row."""
    height, _, _ = tiles.tile(columns, itemsize)
    numbers, row, value = np.zeros((len(parts), 5), np.int64), 0, 0
    filled = []
    for number, (starts, outs, table) in zip(numbers, parts, strict=True):
        number[:] = row, row + starts.size, value, table.size, value * columns
        more = -starts.size % height
        filled.append((np.pad(starts, (0, more), "edge"), np.pad(outs, (0, more), "edge"), table))
        row, value = row + starts.size + more, value + table.size
    starts, outs, table = (np.concatenate(arrays).astype(np.int32) for arrays in zip(*filled, strict=True))
    return tiles.Sums(numbers, starts, outs, table)
