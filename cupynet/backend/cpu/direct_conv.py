"""Tables that describe the sums of a convolution, for `kernels/tiles.py`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import tiles
from cupynet.backend.cpu.kernels.tiles import Frame, Sums
from cupynet.backend.window import Window


class Passes(NamedTuple):
    """Sums of the three passes of a convolution, for one image size.

    Attributes:
        frame: the padding of the images.
        forward: sums over the values of a patch, for each patch.
        weight_gradient: sums over patches, for each value in a patch.
        input_gradient: sums over filters, for each window position and each pixel it covers.
        places: window positions that cover any pixel, in the order of `input_gradient`.
    """

    frame: Frame
    forward: Sums
    weight_gradient: Sums
    input_gradient: Sums
    places: list[int]


@functools.lru_cache(maxsize=256)
def passes(image: tuple[int, ...], filters: int, window: Window, itemsize: int) -> Passes | None:
    """Return the passes for images (H, W, C), or None if no window covers a pixel."""
    (height, width, channels), (rows, cols) = image, window.output(image[0], image[1])
    padded, step = window.padded(height, width), window.padded(height, width)[1] * channels
    (top, _), (left, _) = window.padding
    size = padded[0] * step if window.pads else 0
    frame = tiles.Frame(size, top * step + left * channels, height, width * channels, step)
    corners = _grid(rows, cols, window.stride[0] * step, window.stride[1] * channels)
    pixels = _grid(*window.kernel, window.dilation[0] * step, window.dilation[1] * channels)
    patch = (pixels[:, None] + np.arange(channels)).reshape(-1)
    outputs, weights = np.arange(corners.size) * filters, np.arange(patch.size) * filters
    places, gradient_parts = _seen(image, filters, window)
    if not places:
        return None
    return Passes(
        frame,
        _sums([(corners, outputs, patch)], filters, itemsize),
        _sums([(patch, weights, corners)], filters, itemsize),
        _sums(gradient_parts, channels, itemsize),
        places,
    )


def _grid(rows: int, cols: int, down: int, across: int) -> Array:
    return (np.arange(rows)[:, None] * down + np.arange(cols) * across).reshape(-1)


def _seen(image: tuple[int, ...], filters: int, window: Window) -> tuple[list[int], list[tuple[Array, Array, Array]]]:
    """Return the window positions that cover pixels, and for each the offsets of gradients, pixels and filters."""
    (height, width, channels), counts = image, window.output(image[0], image[1])
    places, parts = [], []
    for place, position in enumerate(np.ndindex(*window.kernel)):
        y, x = (
            np.arange(counts[i]) * window.stride[i] + position[i] * window.dilation[i] - window.padding[i][0]
            for i in (0, 1)
        )
        row, col = np.flatnonzero((y >= 0) & (y < height)), np.flatnonzero((x >= 0) & (x < width))
        if row.size and col.size:
            windows, pixels = row[:, None] * counts[1] + col, y[row][:, None] * width + x[col]
            places.append(place)
            parts.append((windows.reshape(-1) * filters, pixels.reshape(-1) * channels, np.arange(filters)))
    return places, parts


def _sums(parts: list[tuple[Array, Array, Array]], columns: int, itemsize: int) -> Sums:
    """Combine the (starts, outs, table) of all parts. The last row of an incomplete tile is repeated to fill it."""
    height, _, _ = tiles.tile(columns, itemsize)
    bounds, row, value = np.zeros((len(parts), 5), np.int64), 0, 0
    padded = []
    for bound, (starts, outs, table) in zip(bounds, parts, strict=True):
        bound[:] = row, row + starts.size, value, table.size, value * columns
        padding = -starts.size % height
        padded.append((np.pad(starts, (0, padding), "edge"), np.pad(outs, (0, padding), "edge"), table))
        row, value = row + starts.size + padding, value + table.size
    starts, outs, table = (np.concatenate(arrays).astype(np.int32) for arrays in zip(*padded, strict=True))
    return tiles.Sums(bounds, starts, outs, table)
