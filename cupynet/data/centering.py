"""Preprocess pictures of digits in the style of MNIST: light on black, and centered.

MNIST's digits were "size normalized to fit in a 20x20 pixel box while preserving their aspect ratio", with gray levels
from anti-aliasing, and "centered in a 28x28 image by computing the center of mass of the pixels" (LeCun, Cortes,
Burges, web page of the MNIST database; LeCun et al. 1998, section III.A). The center of mass is moved to pixel 14,
counted from 0, its mean position in MNIST's test images.
"""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError
from cupynet.data.pictures import resized

BOX = 20 / 28  # fraction of the image's side
FAINT = 0.1  # pixels below this fraction of the strongest ink count as background
NOISE = 6  # pixels within this many standard deviations of the background noise count as background
COARSE = 10  # downsample pictures first if they exceed the box by this factor, which smooths noise
CONTRAST = 16  # minimum difference between background and ink, out of 255


def is_dark_on_light(pixels: Array) -> bool:
    """Return True if the border of a picture (H, W, C) uint8 is lighter than the middle of its gray range."""
    gray = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels.mean(axis=2, dtype=np.float32)
    return _background(gray) > (float(gray.min()) + float(gray.max())) / 2


def centered_as_mnist(pixels: Array, side: int = 28) -> Array:
    """Return a light-on-dark drawing (H, W, 1) uint8, scaled and centered like a digit of MNIST, as (side, side, 1).

    Raises DataError if the drawing is blank.
    """
    box = round(side * BOX)
    factor = max(pixels.shape) / (COARSE * box)
    if factor > 1:
        pixels = resized(pixels, *(max(1, round(each / factor)) for each in pixels.shape[:2]))
    gray = pixels[:, :, 0].astype(np.float64)
    background, top = _background(gray), float(gray.max())
    if top - background < CONTRAST:
        raise DataError(f"the picture is blank: no pixel is much lighter than the border, {background:.0f} of 255")
    ink = ((gray - background) / (top - background)).clip(0, 1)
    noise = 1.4826 * float(np.median(abs(_border(gray) - background)))  # estimated standard deviation
    ink[ink < min(max(FAINT, NOISE * noise / (top - background)), 0.5)] = 0
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    height, width = (max(1, round(each * box / max(ink.shape))) for each in ink.shape)
    small = resized(np.rint(ink * 255).astype(np.uint8)[:, :, None], height, width)
    small = np.rint(small * (255 / small.max())).astype(np.uint8)  # because resizing makes thin lines faint
    top_row, left = (_offset(small, axis, side) for axis in (0, 1))
    image = np.zeros((side, side, 1), np.uint8)
    image[top_row : top_row + height, left : left + width] = small
    return image


def _background(gray: Array) -> float:
    return float(np.median(_border(gray)))


def _border(gray: Array) -> Array:
    return np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])


def _offset(small: Array, axis: int, side: int) -> int:
    """Return the offset that moves the center of mass to the middle, limited so that all pixels stay in the image."""
    mass = small.sum(axis=(1 - axis, 2), dtype=np.float64)
    middle = (mass * np.arange(len(mass))).sum() / mass.sum()
    return int(min(max(round(side / 2 - middle), 0), side - len(mass)))
