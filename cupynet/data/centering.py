"""Prepare a picture of a digit like MNIST's digits: light on black, centered.

As NIST's images were: "size normalized to fit in a 20x20 pixel box while preserving their aspect ratio", with gray
levels from anti-aliasing, and "centered in a 28x28 image by computing the center of mass of the pixels" (LeCun, Cortes,
Burges: the page of the MNIST database; LeCun et al. 1998, section III.A). The center is pixel 14, counted from 0, as in
MNIST's test images on average.
"""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError
from cupynet.data.pictures import resized

BOX = 20 / 28  # of the image's side
FAINT = 0.1  # of the darkest ink: fainter pixels are paper
GRAIN = 6  # standard deviations of the paper's grain: fainter pixels are paper
COARSE = 10  # pictures with more pixels than this per pixel of the box are reduced first, which smooths the grain
LEAST = 16  # levels between paper and ink, of 255


def is_dark_on_light(pixels: Array) -> bool:
    """Return True if a picture (H, W, C) uint8 is dark on a light background, judging by its border."""
    gray = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels.mean(axis=2, dtype=np.float32)
    return _ground(gray) > (float(gray.min()) + float(gray.max())) / 2


def centered_as_mnist(pixels: Array, side: int = 28) -> Array:
    """Center the drawing, light on dark, of (H, W, 1) uint8 in (side, side, 1). Raise DataError if it is blank."""
    box = round(side * BOX)
    most = max(pixels.shape) / (COARSE * box)
    if most > 1:
        pixels = resized(pixels, *(max(1, round(each / most)) for each in pixels.shape[:2]))
    gray = pixels[:, :, 0].astype(np.float64)
    ground, top = _ground(gray), float(gray.max())
    if top - ground < LEAST:
        raise DataError(f"nothing is drawn in it: all pixels have the same level, {ground:.0f} of 255")
    ink = ((gray - ground) / (top - ground)).clip(0, 1)
    grain = 1.4826 * float(np.median(abs(_around(gray) - ground)))  # a standard deviation
    ink[ink < min(max(FAINT, GRAIN * grain / (top - ground)), 0.5)] = 0
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = (max(1, round(each * box / max(ink.shape))) for each in ink.shape)
    small = resized(np.rint(ink * 255).astype(np.uint8)[:, :, None], height, width)
    small = np.rint(small * (255 / small.max())).astype(np.uint8)  # thin lines have become faint
    top_row, left = (_offset(small, axis, side) for axis in (0, 1))
    image = np.zeros((side, side, 1), np.uint8)
    image[top_row : top_row + height, left : left + width] = small
    return image


def _ground(gray: Array) -> float:
    return float(np.median(_around(gray)))


def _around(gray: Array) -> Array:
    return np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])


def _offset(small: Array, axis: int, side: int) -> int:
    """Return the start of a box with its center of mass in the middle pixel, if it fits."""
    mass = small.sum(axis=(1 - axis, 2), dtype=np.float64)
    middle = (mass * np.arange(len(mass))).sum() / mass.sum()
    return int(min(max(round(side / 2 - middle), 0), side - len(mass)))
