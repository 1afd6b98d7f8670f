"""A drawn digit as MNIST has its digits: light on black, in the middle of its image.

"The original black and white (bilevel) images from NIST were size normalized to fit in a 20x20 pixel box while
preserving their aspect ratio. The resulting images contain grey levels as a result of the anti-aliasing technique used
by the normalization algorithm. The images were centered in a 28x28 image by computing the center of mass of the pixels,
and translating the image so as to position this point at the center of the 28x28 field." (LeCun, Cortes, Burges: the
page of the MNIST database; LeCun et al. 1998, section III.A.) The middle is that of pixel 14, counted from 0: there the
mean centre of mass of the 10,000 test images lies, in both directions. What was done so is hardly changed by doing it
again: by 0.4 levels of 255 in the mean of a pixel of theirs.
"""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError
from cupynet.data.sources.image_folder import resized

BOX = 20 / 28  # of the image's side
FAINT = 0.1  # of the ink: less is none
GRAIN = 6  # standard deviations of the paper, which are none either
COARSE = 10  # pixels of a picture, at most, to one of the image's box when it is looked for: it evens out the grain
LEAST = 16  # levels between paper and ink, of 255


def is_dark_on_light(pixels: Array) -> bool:
    """Whether a picture (H, W, C) uint8 shows something dark on light ground, by what runs around it."""
    grey = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels.mean(axis=2, dtype=np.float32)
    return _ground(grey) > (float(grey.min()) + float(grey.max())) / 2


def centred_as_mnist(pixels: Array, side: int = 28) -> Array:
    """What is drawn light on dark in a picture (H, W, 1) uint8, as (side, side, 1) uint8.

    DataError: nothing is drawn there.
    """
    box = round(side * BOX)
    most = max(pixels.shape) / (COARSE * box)
    if most > 1:
        pixels = resized(pixels, *(max(1, round(each / most)) for each in pixels.shape[:2]))
    grey = pixels[:, :, 0].astype(np.float64)
    ground, top = _ground(grey), float(grey.max())
    if top - ground < LEAST:
        raise DataError(f"nothing is drawn in it: it is of one level, {ground:.0f} of 255")
    ink = ((grey - ground) / (top - ground)).clip(0, 1)
    grain = 1.4826 * float(np.median(abs(_around(grey) - ground)))  # of a normal distribution the standard deviation
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
    """The level of what runs around a picture (H, W)."""
    return float(np.median(_around(grey)))


def _around(grey: Array) -> Array:
    return np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])


def _offset(small: Array, axis: int, side: int) -> int:
    """Where a box begins along an axis, so that its centre of mass is in the middle pixel and nothing sticks out."""
    mass = small.sum(axis=(1 - axis, 2), dtype=np.float64)
    middle = (mass * np.arange(len(mass))).sum() / mass.sum()
    return int(min(max(round(side / 2 - middle), 0), side - len(mass)))
