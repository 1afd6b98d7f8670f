"""Small pictures of a run: PNG from arrays, examples, the filters of a layer, a confusion matrix.

Colours of positive and negative numbers are laid over the page with as much as they are large, so that the same picture
will do on light and on dark paper.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.report.page import Markup, element, picture

POSITIVE, NEGATIVE = (213, 94, 0), (0, 114, 178)
MOST_FILTERS = 128
MOST_CELLS = 25  # classes of a confusion matrix whose counts are written out
_COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # of PNG, by channels


def png(pixels: NDArray[np.uint8]) -> bytes:
    """An image (H, W, C) of 1 to 4 channels as a PNG file: grey, grey and alpha, RGB, RGB and alpha.

    Format: Portable Network Graphics (PNG) Specification, ISO/IEC 15948.
    """
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    size = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    parts = ((b"IHDR", size), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def example(image: NDArray[np.uint8], alt: str) -> Markup:
    """One image of a data set, (H, W, C), whatever its size; of other than 1, 3 or 4 channels the first."""
    height, width, channels = image.shape
    shown = image if channels in (1, 3, 4) else image[:, :, :1]
    scale = 96 / max(height, width, 1)
    return picture(png(np.ascontiguousarray(shown)), alt, size=(max(round(width * scale), 1), round(height * scale)))


def filters(weights: NDArray[Any], name: str) -> Markup:
    """The filters of a convolution, (K_h, K_w, C, O), side by side, each by its own largest weight.

    Those of three channels are shown in their colours, others by the mean over their channels.
    """
    kernel_h, kernel_w, channels, count = weights.shape
    if 0 in weights.shape or not np.isfinite(weights).all():
        return Markup("")
    count = min(count, MOST_FILTERS)
    tiles = np.moveaxis(np.asarray(weights[..., :count], np.float64), 3, 0)  # (O, K_h, K_w, C)
    largest = np.abs(tiles).max(axis=(1, 2, 3), keepdims=True)
    tiles = tiles / np.where(largest == 0, 1, largest)
    coloured = _in_colour(tiles) if channels == 3 else _by_sign(tiles.mean(axis=3))
    columns = math.ceil(math.sqrt(2.0 * count)) if count > 4 else count
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * (kernel_h + 1) - 1, columns * (kernel_w + 1) - 1, 4), np.uint8)
    for index, tile in enumerate(coloured):
        top, left = (kernel_h + 1) * (index // columns), (kernel_w + 1) * (index % columns)
        sheet[top : top + kernel_h, left : left + kernel_w] = tile
    zoom = max(min(8, 520 // sheet.shape[1]), 1)
    return picture(png(sheet), f"filters of {name}", size=(zoom * sheet.shape[1], zoom * sheet.shape[0]))


def _by_sign(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Numbers of -1 to 1 as RGBA: the colour says which sign, how solid it is how large."""
    colour = np.where(values[..., None] > 0, np.array(POSITIVE), np.array(NEGATIVE))
    alpha = np.round(255 * np.clip(np.abs(values), 0.03, 1.0))[..., None]
    return np.concatenate([colour, alpha], axis=-1).astype(np.uint8)


def _in_colour(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Three channels of -1 to 1 as RGBA, 0 in the middle."""
    solid = np.full((*values.shape[:-1], 1), 255.0)
    return np.concatenate([np.round(127.5 + 127.5 * values), solid], axis=-1).astype(np.uint8)


def confusion(counts: NDArray[np.int64], names: list[str]) -> Markup:
    """A confusion matrix, rows the actual class: what is right in one colour, what is wrong in another.

    Right by its share of the class, wrong by its share of the most frequent mistake.
    """
    right = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    wrong = np.where(np.eye(len(counts), dtype=bool), 0, counts)
    wrong = wrong / max(int(wrong.max(initial=0)), 1)
    if len(counts) > MOST_CELLS:
        shown = np.where(np.eye(len(counts), dtype=bool), -right, np.sqrt(wrong))
        zoom = max(600 // len(counts), 1)
        return picture(png(_by_sign(shown)), "confusion matrix", size=(zoom * len(counts), zoom * len(counts)))
    lines = []
    for actual, row in enumerate(counts.tolist()):
        cells = []
        for guess, count in enumerate(row):
            colour, share = ("heat", right[actual, guess]) if actual == guess else ("miss", wrong[actual, guess])
            strength = 0.08 + 0.87 * share if count else 0.0
            kind = "nil" if not count else "strong" if strength > 0.6 else None
            said = f"{names[actual]} taken for {names[guess]}: {count:,}"
            style = f"background:rgba(var(--{colour}),{strength:.2f})" if count else None
            cells.append(element("td", f"{count}", class_=kind, style=style, title=said))
        lines.append(element("tr", element("th", names[actual], scope="row"), *cells))
    head = element("tr", element("td", class_="nil"), *(element("th", name, scope="col") for name in names))
    inside = (element("thead", head), element("tbody", *lines))
    return element("div", element("table", *inside, class_="matrix"), class_="scroll", tabindex=0)


def mistakes(images: NDArray[np.uint8] | None, rows: list[tuple[str, str, str, str]]) -> Markup:
    """Images that were taken for something else. rows: sample, label, guess and confidence of each, as text."""
    figures = []
    for index, (sample, label, guess, confidence) in enumerate(rows):
        shown = "" if images is None else example(images[index], f"sample {sample}, {label} taken for {guess}")
        said = (element("span", guess, class_="guess"), f" {confidence}", Markup("<br>"))
        true = ("is ", element("span", label, class_="label"))
        figures.append(element("figure", shown, element("figcaption", *said, *true), title=f"sample {sample}"))
    return element("div", *figures, class_="gallery") if figures else Markup("")
