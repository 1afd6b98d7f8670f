"""Glyphs of handwritten digits, as strokes through control points.

A stroke is a Catmull-Rom curve, which is linear in its control points: dots (M, 2) = weights (M, K) @ controls (K, 2).
The M dots of a glyph are equally spaced along its strokes. Coordinates are x to the right and y down, from 0 to 1 in a
digit's box, whose width is `ASPECT` times its height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np

from cupynet.backend.array import Array

Stroke: TypeAlias = "list[tuple[float, float]]"

ASPECT = 0.68  # width / height of a digit's box
_FINE = 100  # steps per curve segment, for measuring its length


def arc(x: float, y: float, width: float, height: float, start: float, stop: float, points: int = 7) -> Stroke:
    """Return control points on an ellipse around (x, y), clockwise from `start` to `stop` degrees from the right."""
    turn = np.radians(np.linspace(start, stop, points))
    xs, ys = x + width / 2 * np.cos(turn), y + height / 2 * np.sin(turn)
    return [(float(a), float(b)) for a, b in zip(xs, ys, strict=True)]


# strokes of each glyph of each digit
GLYPHS: dict[int, list[list[Stroke]]] = {
    0: [
        [arc(0.5, 0.5, 1, 1, -90, 270, 9)],
        [arc(0.5, 0.5, 0.8, 1, -60, 310, 9)],
    ],
    1: [
        [[(0.55, 0), (0.53, 0.35), (0.5, 0.7), (0.48, 1)]],
        [[(0.2, 0.24), (0.38, 0.14), (0.56, 0)], [(0.56, 0), (0.55, 0.35), (0.54, 0.7), (0.54, 1)]],
        [
            [(0.25, 0.22), (0.4, 0.13), (0.54, 0)],
            [(0.54, 0), (0.53, 0.5), (0.52, 1)],
            [(0.2, 1), (0.5, 1), (0.85, 0.99)],
        ],
    ],
    2: [
        [
            arc(0.5, 0.29, 0.86, 0.58, -170, 15, 6) + [(0.72, 0.6), (0.35, 0.83), (0.02, 1)],
            [(0.02, 1), (0.5, 0.97), (1, 1)],
        ],
        [
            arc(0.48, 0.27, 0.8, 0.54, -165, 20, 6)
            + [(0.6, 0.72), (0.32, 0.96), (0.08, 0.95), (0.06, 0.8), (0.25, 0.76), (0.6, 0.93), (1, 0.96)]
        ],
    ],
    3: [
        [arc(0.45, 0.25, 0.8, 0.5, -155, 90, 6), arc(0.45, 0.74, 0.96, 0.52, -90, 155, 6)],
        [[(0.08, 0), (0.5, 0.01), (0.9, 0)], [(0.9, 0), (0.65, 0.2), (0.42, 0.4)], arc(0.42, 0.7, 1, 0.6, -90, 150, 6)],
    ],
    4: [
        [
            [(0.2, 0), (0.15, 0.25), (0.06, 0.55)],
            [(0.06, 0.55), (0.5, 0.56), (1, 0.53)],
            [(0.75, 0.06), (0.73, 0.5), (0.7, 1)],
        ],
        [
            [(0.7, 0), (0.38, 0.34), (0.02, 0.68)],
            [(0.02, 0.68), (0.5, 0.68), (1, 0.67)],
            [(0.7, 0), (0.7, 0.5), (0.69, 1)],
        ],
    ],
    5: [
        [
            [(0.9, 0), (0.55, 0.01), (0.2, 0.01)],
            [(0.2, 0.01), (0.17, 0.2), (0.13, 0.43)],
            arc(0.42, 0.69, 1, 0.6, -125, 145, 7),
        ],
        [
            arc(0.3, 0.72, 1.2, 0.56, -100, 115, 6),
            [(0.2, 0.44), (0.26, 0.2), (0.34, 0.04)],
            [(0.34, 0.04), (0.65, 0.03), (1, 0)],
        ],
    ],
    6: [
        [[(0.75, 0), (0.4, 0.2), (0.14, 0.48)] + arc(0.5, 0.72, 0.86, 0.55, 180, -160, 8)],
        [[(0.5, 0), (0.25, 0.25), (0.1, 0.55)] + arc(0.48, 0.73, 0.82, 0.52, 165, -150, 8)],
    ],
    7: [
        [[(0.02, 0.03), (0.5, 0.02), (0.97, 0)], [(0.97, 0), (0.7, 0.4), (0.4, 1)]],
        [
            [(0.02, 0.03), (0.5, 0.02), (0.97, 0)],
            [(0.97, 0), (0.66, 0.45), (0.42, 1)],
            [(0.3, 0.52), (0.6, 0.5), (0.9, 0.49)],
        ],
        [[(0.05, 0.2), (0.1, 0.03)], [(0.1, 0.03), (0.55, 0.08), (0.95, 0.02)], [(0.95, 0.02), (0.62, 0.5), (0.5, 1)]],
    ],
    8: [
        [
            [(0.82, 0.14), (0.5, 0), (0.18, 0.16), (0.3, 0.38), (0.68, 0.56), (0.9, 0.8), (0.5, 1), (0.1, 0.8)]
            + [(0.32, 0.56), (0.68, 0.38), (0.84, 0.16)]
        ],
        [arc(0.5, 0.24, 0.72, 0.48, 90, 450, 7), arc(0.5, 0.74, 0.94, 0.52, -90, 270, 7)],
    ],
    9: [
        [arc(0.46, 0.28, 0.84, 0.56, 0, -350, 8), [(0.88, 0.2), (0.85, 0.6), (0.78, 1)]],
        [arc(0.5, 0.27, 0.84, 0.54, -10, -350, 8) + [(0.92, 0.5), (0.78, 0.86), (0.4, 1), (0.12, 0.93)]],
    ],
}


@dataclass(frozen=True)
class Alphabet:
    """All G glyphs in the order of digits, each with at most K control points and exactly M dots."""

    controls: Array  # (G, K, 2) float32, relative to the center of the box, in units of its height; unused points are 0
    weights: Array  # (G, M, K) float32
    ink: Array  # (G,) float32: distance between neighboring dots, in units of the height
    first: Array  # (10,) the first glyph of each digit
    count: Array  # (10,) the number of glyphs of each digit


@cache
def alphabet(dots: int) -> Alphabet:
    glyphs = [glyph for digit in range(10) for glyph in GLYPHS[digit]]
    widest = max(sum(map(len, glyph)) for glyph in glyphs)
    controls = np.zeros((len(glyphs), widest, 2), np.float32)
    weights = np.zeros((len(glyphs), dots, widest), np.float32)
    ink = np.zeros(len(glyphs), np.float32)
    for g, glyph in enumerate(glyphs):
        points = (np.concatenate([np.array(stroke) for stroke in glyph]) - 0.5) * (ASPECT, 1)  # (K, 2)
        matrix, spacing = _sampled(points, [len(stroke) for stroke in glyph], dots)
        controls[g, : len(points)], weights[g, :, : len(points)], ink[g] = points, matrix, spacing
    count = np.array([len(GLYPHS[digit]) for digit in range(10)])
    return Alphabet(controls, weights, ink, np.cumsum(count) - count, count)


def _sampled(points: Array, lengths: Sequence[int], dots: int) -> tuple[Array, float]:
    """Return weights (dots, K) of equally spaced dots along strokes with these lengths, and their spacing."""
    fine = np.zeros((0, len(points)))
    pen_down: list[bool] = []  # False for the step between two strokes
    start = 0
    for length in lengths:
        curve = np.zeros(((length - 1) * _FINE + 1, len(points)))
        curve[:, start : start + length] = _catmull_rom(length)
        pen_down += [False] * bool(start) + [True] * (len(curve) - 1)
        fine = np.concatenate([fine, curve])
        start += length
    steps = np.linalg.norm(np.diff(fine @ points, axis=0), axis=1) * pen_down
    distance = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = (np.arange(dots) + 0.5) * distance[-1] / dots
    return fine[np.searchsorted(distance, wanted)], float(distance[-1] / dots)


def _catmull_rom(length: int) -> Array:
    """Return weights ((length - 1) * _FINE + 1, length) of points on the curve."""
    padded = np.zeros((length + 2, length))  # phantom points extend the ends linearly
    padded[1:-1] = np.eye(length)
    padded[0, :2], padded[-1, -2:] = (2, -1), (-1, 2)
    t = np.arange(_FINE)[:, np.newaxis] / _FINE
    basis = np.hstack([-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, -(t**2) + t**3]) / 2
    segments = [basis @ padded[i : i + 4] for i in range(length - 1)]
    return np.concatenate([*segments, padded[-2:-1]])
