"""Images in a report: samples and the confusion matrix."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # PNG color type by number of channels


class Picture(NamedTuple):
    """An image on a page, with its data URL, alternative text, and size in CSS pixels."""

    source: str
    alt: str
    width: int
    height: int


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode a gray, RGB or RGBA image (H, W, C) as PNG (ISO/IEC 15948)."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # the first byte of each row, 0, means no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    size = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", size), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def example(image: NDArray[np.uint8], alt: str) -> Picture:
    """Show an image (H, W, C) with a longer side of 96 CSS pixels; if C is not 1, 3 or 4, only its first channel."""
    source = png(image if image.shape[2] in COLOR_TYPES else image[:, :, :1])
    height, width = (max(round(96 * size / max(image.shape[:2])), 1) for size in image.shape[:2])
    return Picture("data:image/png;base64," + base64.b64encode(source).decode("ascii"), alt, width, height)


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
