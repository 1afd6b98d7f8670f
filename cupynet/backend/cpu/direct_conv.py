"""Tables that describe the sums of a convolution, for `kernels/tiles.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
def passes(image: tuple[int, ...], filters: int, window: Window, itemsize: int, groups: int = 1) -> Passes | None:
    """Return the passes for images (H, W, C), or None if no window covers a pixel."""
    (height, width, channels), (rows, cols) = image, window.output(image[0], image[1])
    padded, step = window.padded(height, width), window.padded(height, width)[1] * channels
    (top, _), (left, _) = window.padding
    size = padded[0] * step if window.pads else 0
    frame = tiles.Frame(size, top * step + left * channels, height, width * channels, step)
    corners = _grid(rows, cols, window.stride[0] * step, window.stride[1] * channels)
    pixels = _grid(*window.kernel, window.dilation[0] * step, window.dilation[1] * channels)
    own_channels, own_filters = channels // groups, filters // groups
    patch, values = (pixels[:, None] + np.arange(own_channels)).reshape(-1), np.arange(own_filters)
    outputs, weights = np.arange(corners.size) * filters, np.arange(patch.size) * filters
    seen = _seen(image, filters, window)
    if not seen:
        return None
    # the first channel and filter of each group; a depthwise convolution is computed for all channels at a time
    by_column = groups == channels == filters > 1
    firsts = [(0, 0)] if by_column else [(g * own_channels, g * own_filters) for g in range(groups)]
    across_filters = _Kind(filters if by_column else own_filters, by_column, itemsize)
    across_channels = across_filters._replace(columns=channels if by_column else own_channels)
    return Passes(
        frame,
        _sums([(corners + c, outputs + f) for c, f in firsts], patch, across_filters),
        _sums([(patch + c, weights + f) for c, f in firsts], corners, across_filters, [f for _, f in firsts]),
        _sums([(dy + f, dx + c) for dy, dx in seen.values() for c, f in firsts], values, across_channels),
        [*seen],
    )


def _grid(rows: int, cols: int, down: int, across: int) -> Array:
    return (np.arange(rows)[:, None] * down + np.arange(cols) * across).reshape(-1)


def _seen(image: tuple[int, ...], filters: int, window: Window) -> dict[int, tuple[Array, Array]]:
    """Return the window positions that cover pixels, and for each the offsets of gradients and pixels."""
    (height, width, channels), counts = image, window.output(image[0], image[1])
    seen = {}
    for place, position in enumerate(np.ndindex(*window.kernel)):
        y, x = (
            np.arange(counts[i]) * window.stride[i] + position[i] * window.dilation[i] - window.padding[i][0]
            for i in (0, 1)
        )
        row, col = np.flatnonzero((y >= 0) & (y < height)), np.flatnonzero((x >= 0) & (x < width))
        if row.size and col.size:
            windows, pixels = row[:, None] * counts[1] + col, y[row][:, None] * width + x[col]
            seen[place] = windows.reshape(-1) * filters, pixels.reshape(-1) * channels
    return seen


class _Kind(NamedTuple):
    columns: int
    by_column: bool
    itemsize: int


def _sums(parts: list[tuple[Array, Array]], table: Array, kind: _Kind, factors: Sequence[int] | None = None) -> Sums:
    """Combine the (starts, outs) of all parts. The last row of an incomplete tile is repeated to fill it.

    factors: offset of the factors of each part; by default, they are packed one part after the other.
    """
    height, _, _ = tiles.tile(kind.columns, kind.itemsize)
    bounds, row = np.zeros((len(parts), 3), np.int64), 0
    padded = []
    for i, (starts, outs) in enumerate(parts):
        bounds[i] = row, row + starts.size, i * table.size * kind.columns if factors is None else factors[i]
        padding = -starts.size % height
        padded.append([np.pad(offsets, (0, padding), "edge") for offsets in (starts, outs)])
        row += starts.size + padding
    starts, outs = (np.concatenate(arrays).astype(np.int32) for arrays in zip(*padded, strict=True))
    return tiles.Sums(bounds, starts, outs, table.astype(np.int32), kind.columns, kind.by_column)
