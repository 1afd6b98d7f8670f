"""Prepare a picture of a digit like MNIST's digits: light on black, centred.

"The original black and white (bilevel) images from NIST were size normalized to fit in a 20x20 pixel box while
preserving their aspect ratio. The resulting images contain grey levels as a result of the anti-aliasing technique used
by the normalization algorithm. The images were centered in a 28x28 image by computing the center of mass of the pixels,
and translating the image so as to position this point at the center of the 28x28 field." (LeCun, Cortes, Burges: the
page of the MNIST database; LeCun et al. 1998, section III.A.) The centre is pixel 14, counted from 0: the mean centre
of mass of the 10,000 test images in both directions. Centring them again changes pixels by 0.4 of 255 levels on
average.
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
    grey = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels.mean(axis=2, dtype=np.float32)
    return _ground(grey) > (float(grey.min()) + float(grey.max())) / 2


def centred_as_mnist(pixels: Array, side: int = 28) -> Array:
    """Centre the drawing, light on dark, of a picture (H, W, 1) uint8 in an image (side, side, 1) uint8.

    DataError: nothing is drawn in it.
    """
    box = round(side * BOX)
    most = max(pixels.shape) / (COARSE * box)
    if most > 1:
        pixels = resized(pixels, *(max(1, round(each / most)) for each in pixels.shape[:2]))
    grey = pixels[:, :, 0].astype(np.float64)
    ground, top = _ground(grey), float(grey.max())
    if top - ground < LEAST:
        raise DataError(f"nothing is drawn in it: all pixels have the same level, {ground:.0f} of 255")
    ink = ((grey - ground) / (top - ground)).clip(0, 1)
    grain = 1.4826 * float(np.median(abs(_around(grey) - ground)))  # a standard deviation
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


def _ground(grey: Array) -> float:
    """Return the median level of the border of a picture (H, W)."""
    return float(np.median(_around(grey)))


def _around(grey: Array) -> Array:
    return np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])


def _offset(small: Array, axis: int, side: int) -> int:
    """Return the first row or column of a box whose centre of mass is in the middle pixel, if it fits."""
    mass = small.sum(axis=(1 - axis, 2), dtype=np.float64)
    middle = (mass * np.arange(len(mass))).sum() / mass.sum()
    return int(min(max(round(side / 2 - middle), 0), side - len(mass)))
