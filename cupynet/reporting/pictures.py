"""Images in a report: samples, the filters of a layer, and the confusion matrix.

Filters use color for the sign of a weight and opacity for its magnitude, so that they work on light and dark pages.
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
COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # PNG color type by number of channels


class Picture(NamedTuple):
    """An image on a page, with its data URL, alternative text, and size in CSS pixels."""

    source: str
    alt: str
    width: int
    height: int


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode a gray, gray and alpha, RGB or RGBA image (H, W, C) as PNG (ISO/IEC 15948)."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # the first byte of each row, 0, means no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    size = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", size), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def picture(pixels: NDArray[np.uint8], alt: str, zoom: float) -> Picture:
    source = "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")
    height, width = (max(round(size * zoom), 1) for size in pixels.shape[:2])
    return Picture(source, alt, width, height)


def example(image: NDArray[np.uint8], alt: str) -> Picture:
    """Show an image (H, W, C) with a longer side of 96 CSS pixels; if C is not 1, 3 or 4, only its first channel."""
    shown = image if image.shape[2] in (1, 3, 4) else image[:, :, :1]
    return picture(np.ascontiguousarray(shown), alt, 96 / max(image.shape[:2]))


def filters(weights: NDArray[Any], name: str) -> Picture | None:
    """Draw the filters (K_h, K_w, C, O) of a convolution side by side, each scaled by its largest absolute weight.

    Filters with three channels are drawn in RGB, others as the mean over channels. At most `MAX_FILTERS` are drawn.
    Return None if there are no weights, or if one is not finite.
    """
    kernel_h, kernel_w, channels, count = weights.shape
    if 0 in weights.shape or not np.isfinite(weights).all():
        return None
    count = min(count, MAX_FILTERS)
    tiles = np.moveaxis(np.asarray(weights[..., :count], np.float64), 3, 0)  # (O, K_h, K_w, C)
    largest = np.abs(tiles).max(axis=(1, 2, 3), keepdims=True)
    tiles = tiles / np.where(largest == 0, 1, largest)
    colored = _in_color(tiles) if channels == 3 else by_sign(tiles.mean(axis=3))
    columns = math.ceil(math.sqrt(2 * count))
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * columns, kernel_h + 1, kernel_w + 1, 4), np.uint8)  # tiles with a gap of one pixel
    sheet[:count, :kernel_h, :kernel_w] = colored
    sheet = sheet.reshape(rows, columns, kernel_h + 1, kernel_w + 1, 4).swapaxes(1, 2)
    sheet = sheet.reshape(rows * (kernel_h + 1), columns * (kernel_w + 1), 4)[:-1, :-1]
    return picture(sheet, f"filters of {name}", max(min(8, 520 // sheet.shape[1]), 1))


def by_sign(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Draw numbers from -1 to 1 as RGBA, with color for the sign and opacity for the magnitude."""
    color = np.where(values[..., None] > 0, np.array(POSITIVE), np.array(NEGATIVE))
    alpha = np.round(255 * np.clip(np.abs(values), 0.03, 1.0))[..., None]
    return np.concatenate([color, alpha], axis=-1).astype(np.uint8)


def _in_color(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Draw three channels with values from -1 to 1 as opaque RGBA. Pixels with three zeros are gray."""
    opaque = np.full((*values.shape[:-1], 1), 255.0)
    return np.concatenate([np.round(127.5 + 127.5 * values), opaque], axis=-1).astype(np.uint8)


class Cell(NamedTuple):
    """Cell of a matrix, with its text, color strength (0 to 1), color name in style.css, and tooltip."""

    text: str = ""
    strength: float = 0.0
    color: str = "heat"
    title: str = ""


def confusion(counts: NDArray[np.int64], names: list[str]) -> list[tuple[str, list[Cell]]]:
    """Build the rows of a confusion matrix, each with the name of an actual class and one cell per predicted class.

    Correct predictions are shaded by their fraction of the class, mistakes relative to the most frequent mistake.
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
            Cell(f"{count}", strength, "heat" if guess == name else "miss", f"{name} predicted as {guess}: {count:,}")
            for guess, count, strength in row
        ]
        rows.append((name, cells))
    return rows
