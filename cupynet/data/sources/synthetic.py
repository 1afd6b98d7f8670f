"""Synthetic digits, for machines without network access.

Each image is a glyph of `strokes` with noise on its control points, transformed by a random affine map, bent, and drawn
as a smooth distance field. With dots p_m along the strokes and S(x, y) = sum of exp(-|(x, y) - p_m|^2 / 2 s^2), -log S
is a soft minimum of the squared distances to the dots. The terms of S are separable, so S is a product of two small
matrices. Each block of images has its own random stream, so that image i does not depend on the number of images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.checks import integer
from cupynet.data.dataset import TEST_STREAM, TRAIN_STREAM, Dataset, philox
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.strokes import alphabet

BLOCK = 100  # images drawn at a time; a block fits into a core's cache
DOTS = 48  # dots per glyph
SIDE = 28  # pixels

# Variation of the digits, chosen so that LeNet learns them but a linear model does not.
HEIGHT = 17.0  # pixels, height of a digit's box before scaling
TREMBLE = 0.022  # standard deviation of the noise on control points, in units of HEIGHT
TURN = 0.30  # radians, maximum rotation
SHEAR = 0.40
SCALE = (0.78, 1.15)  # for each axis
SHIFT = 2.0  # pixels, maximum displacement along each axis
BEND = 0.9  # pixels, maximum amplitude of a wave through the image
SOFT = (0.75, 1.05)  # pixels, s in the formula above; small values give sharp edges
THICK = (0.9, 1.9)  # pixels from the middle of a stroke to half intensity
CONTRAST = (0.75, 1.0)
NOISE = 0.06  # standard deviation of the pixel noise, as a fraction of 255


@dataclass(eq=False)
class Synthetic(Source):
    """Synthetic digits of 28 x 28 pixels in balanced classes. They depend only on the seed. See `Source`."""

    image_shape = (SIDE, SIDE, 1)
    classes = 10
    on_black = centered = True
    name = "synthetic"

    train: int = 10_000
    test: int = 2_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.train = integer("train", self.train, 1)
        self.test = integer("test", self.test, 1)
        self.samples = self.train, self.test

    def load(self) -> Data:
        train = self._drawn("train", TRAIN_STREAM, self.train)
        test = self._drawn("test", TEST_STREAM, self.test)
        return self._divided(self.name, train, test)

    def _drawn(self, part: str, stream: int, samples: int) -> Dataset:
        images = np.empty((samples, SIDE, SIDE, 1), np.uint8)
        labels = np.empty(samples, np.int64)
        for block, start in enumerate(range(0, samples, BLOCK)):
            drawn, digits = draw(philox(self.seed, stream, block))
            rows = slice(start, min(start + BLOCK, samples))
            size = rows.stop - start
            images[rows, :, :, 0], labels[rows] = drawn[:size], digits[:size]
        return Dataset(f"{self.name}-{part}", images, labels, self.classes)


def draw(rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw a block of images (BLOCK, SIDE, SIDE) uint8 and digits (BLOCK,) int64."""
    digits = rng.permuted(np.tile(np.arange(10), (BLOCK // 10, 1)), axis=1).ravel()  # each digit once per ten images
    dots, ink = _dots(digits, rng)  # (BLOCK, M, 2) in pixels, (BLOCK,)
    soft = _uniform(rng, *SOFT)  # (BLOCK,)
    pixels = np.arange(SIDE, dtype=np.float32)
    field = dots[..., np.newaxis] - pixels  # (BLOCK, M, 2, SIDE)
    field *= field
    field *= (-0.5 / soft**2)[:, np.newaxis, np.newaxis, np.newaxis]
    np.exp(field, out=field)
    across, down = field[:, :, 0], field[:, :, 1].transpose(0, 2, 1)  # (BLOCK, M, SIDE), (BLOCK, SIDE, M)
    near = np.matmul(down, across)  # (BLOCK, SIDE, SIDE)
    near *= (ink / (soft * np.float32(np.sqrt(2 * np.pi))))[:, np.newaxis, np.newaxis]  # 1 in the middle of a stroke
    half = np.exp(-0.5 * (_uniform(rng, *THICK) / soft) ** 2)[:, np.newaxis, np.newaxis]
    near *= near
    near /= near + half * half  # 1/2 at the edge
    near *= (255 * _uniform(rng, *CONTRAST))[:, np.newaxis, np.newaxis]
    near += np.float32(255 * NOISE) * rng.standard_normal(near.shape, dtype=np.float32)
    return np.clip(near + np.float32(0.5), 0, 255, out=near).astype(np.uint8), digits.astype(np.int64)


def _dots(digits: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the dots of digits, (BLOCK, M, 2), and the line length per dot, (BLOCK,), both in pixels."""
    glyphs = alphabet(DOTS)
    choice = glyphs.first[digits] + (rng.random(BLOCK) * glyphs.count[digits]).astype(np.int64)
    controls = glyphs.controls[choice]  # (BLOCK, K, 2)
    controls += np.float32(TREMBLE) * rng.standard_normal(controls.shape, dtype=np.float32)
    dots = np.matmul(np.matmul(glyphs.weights[choice], controls), _affine(rng))  # (BLOCK, M, 2)
    dots -= ((dots.max(axis=1) + dots.min(axis=1)) / 2)[:, np.newaxis]  # center at the origin
    dots += ((SIDE - 1) / 2 + _uniform(rng, -SHIFT, SHIFT, 2))[:, np.newaxis]
    wave = _uniform(rng, 0.5, 1.0, 2) * np.float32(2 * np.pi / SIDE)  # half a wave to a whole wave over the image
    phase, height = _uniform(rng, 0, 2 * np.pi, 2), _uniform(rng, 0, BEND, 2)
    bend = dots[..., ::-1] * wave[:, np.newaxis] + phase[:, np.newaxis]
    dots += height[:, np.newaxis] * np.sin(bend)  # x is displaced by a function of y, and y by one of x
    return dots, glyphs.ink[choice] * np.float32(HEIGHT)


def _affine(rng: np.random.Generator) -> Array:
    """Draw matrices (BLOCK, 2, 2) that map row vectors from units of the box height to pixels: scale, shear, rotate."""
    turn, shear, scale = _uniform(rng, -TURN, TURN), _uniform(rng, -SHEAR, SHEAR), _uniform(rng, *SCALE, 2)
    cos, sin = np.cos(turn), np.sin(turn)
    rotation = np.stack([cos, sin, -sin, cos], axis=-1).reshape(-1, 2, 2)
    sheared = np.zeros((BLOCK, 2, 2), np.float32)
    sheared[:, 0, 0], sheared[:, 1, 1], sheared[:, 1, 0] = 1, 1, -shear
    return np.float32(HEIGHT) * scale[:, :, np.newaxis] * np.matmul(sheared, rotation)


def _uniform(rng: np.random.Generator, low: float, high: float, *axes: int) -> Array:
    return rng.random((BLOCK, *axes), dtype=np.float32) * np.float32(high - low) + np.float32(low)
