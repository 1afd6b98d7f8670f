from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals


@kernel
def add_column_sums(dy: Array, grad: Array) -> None:
    """grad += dy.sum(axis=0), in blocks of 64 rows to reduce rounding errors. dy: (R, O); grad: (O,)."""
    dy = reals(dy)
    part = np.empty_like(grad)
    for start in range(0, dy.shape[0], 64):
        part[:] = 0
        for r in range(start, min(start + 64, dy.shape[0])):
            row = dy[r]
            for j in range(part.size):
                part[j] += row[j]
        for j in range(part.size):
            grad[j] += part[j]


@kernel
def count_hits(scores: Array, labels: Array) -> Any:
    """Return the number of rows of `scores` (N, C) whose argmax is the label. labels: (N,)."""
    scores, hits = reals(scores), 0
    for r in range(scores.shape[0]):
        place = 0
        for c in range(1, scores.shape[1]):
            if scores[r, c] > scores[r, place]:
                place = c
        hits += place == labels[r]
    return hits


@kernel
def add_bias(product: Array, bias: Array, y: Array) -> None:
    """Write product + bias to y. product, y: (R, O); bias: (O,)."""
    bias, y = reals(bias), reals(y)
    for r in range(product.shape[0]):
        row, target = product[r], y[r]
        for j in range(row.size):
            target[j] = row[j] + bias[j]
