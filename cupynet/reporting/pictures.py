"""Pictures in a page: images as PNG, the filters of a layer, a confusion matrix.

The colour shows the sign of a number and the opacity its magnitude, so one picture suits light and dark pages.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

POSITIVE, NEGATIVE = (213, 94, 0), (0, 114, 178)
MAX_FILTERS = 128
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # of PNG, by channels


class Picture(NamedTuple):
    """An image within a page: its address, its text, and its size in CSS pixels."""

    source: str
    alt: str
    width: int
    height: int


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an image (H, W, C) as PNG; 1 to 4 channels: grey, grey and alpha, RGB, RGB and alpha.

    Format: Portable Network Graphics (PNG) Specification, ISO/IEC 15948.
    """
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    size = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", size), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture(pixels: NDArray[np.uint8], alt: str, zoom: float) -> Picture:
    """Return an image as a picture, scaled by `zoom`."""
    source = "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")
    height, width = (max(round(size * zoom), 1) for size in pixels.shape[:2])
    return Picture(source, alt, width, height)


def example(image: NDArray[np.uint8], alt: str) -> Picture:
    """Return an image (H, W, C) with a longer side of 96 CSS pixels. Without 1, 3 or 4 channels, show the first."""
    shown = image if image.shape[2] in (1, 3, 4) else image[:, :, :1]
    return picture(np.ascontiguousarray(shown), alt, 96 / max(image.shape[:2]))


def filters(weights: NDArray[Any], name: str) -> Picture | None:
    """Return the filters of a convolution, (K_h, K_w, C, O), side by side, each relative to its largest weight.

    Filters of three channels are shown in RGB, others as the mean over their channels. None if a weight is not finite.
    """
    kernel_h, kernel_w, channels, count = weights.shape
    if 0 in weights.shape or not np.isfinite(weights).all():
        return None
    count = min(count, MAX_FILTERS)
    tiles = np.moveaxis(np.asarray(weights[..., :count], np.float64), 3, 0)  # (O, K_h, K_w, C)
    largest = np.abs(tiles).max(axis=(1, 2, 3), keepdims=True)
    tiles = tiles / np.where(largest == 0, 1, largest)
    coloured = _in_colour(tiles) if channels == 3 else by_sign(tiles.mean(axis=3))
    columns = math.ceil(math.sqrt(2 * count))
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * columns, kernel_h + 1, kernel_w + 1, 4), np.uint8)  # each with a gap below and beside it
    sheet[:count, :kernel_h, :kernel_w] = coloured
    sheet = sheet.reshape(rows, columns, kernel_h + 1, kernel_w + 1, 4).swapaxes(1, 2)
    sheet = sheet.reshape(rows * (kernel_h + 1), columns * (kernel_w + 1), 4)[:-1, :-1]
    return picture(sheet, f"filters of {name}", max(min(8, 520 // sheet.shape[1]), 1))


def by_sign(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return numbers from -1 to 1 as RGBA: the sign is the colour, the magnitude the opacity."""
    colour = np.where(values[..., None] > 0, np.array(POSITIVE), np.array(NEGATIVE))
    alpha = np.round(255 * np.clip(np.abs(values), 0.03, 1.0))[..., None]
    return np.concatenate([colour, alpha], axis=-1).astype(np.uint8)


def _in_colour(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return three channels of -1 to 1 as opaque RGBA; 0 is grey."""
    opaque = np.full((*values.shape[:-1], 1), 255.0)
    return np.concatenate([np.round(127.5 + 127.5 * values), opaque], axis=-1).astype(np.uint8)


class Cell(NamedTuple):
    """A cell of a matrix: its text, the strength of its colour (0..1), the colour in style.css, and its tooltip."""

    text: str = ""
    strength: float = 0.0
    colour: str = "heat"
    title: str = ""


def confusion(counts: NDArray[np.int64], names: list[str]) -> list[tuple[str, list[Cell]]]:
    """Return a confusion matrix: for each actual class its name, and a cell for each prediction.

    Correct predictions are shaded by their share of the class, mistakes by their share of the most frequent mistake.
    """
    diagonal = np.eye(len(counts), dtype=bool)
    right = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    wrong = np.where(diagonal, 0, counts)
    shares = np.where(diagonal, right, wrong / max(int(wrong.max(initial=0)), 1))
    strengths = np.where(counts == 0, 0, 0.08 + 0.87 * shares)
    rows = []
    for actual, name in enumerate(names):
        row = zip(names, counts[actual].tolist(), strengths[actual].tolist(), strict=True)
        cells = [
            Cell(f"{count}", strength, "heat" if guess == name else "miss", f"{name} taken for {guess}: {count:,}")
            for guess, count, strength in row
        ]
        rows.append((name, cells))
    return rows
