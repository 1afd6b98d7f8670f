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


@kernel
def add_outer_products(a: Array, b: Array, out: Array) -> None:
    """out += aᵀ b for a (K, M), b (K, N) and out (M, N), with one pass over `out`. For small K."""
    count = len(a)
    for m in range(a.shape[1]):
        row = out[m]
        for k in range(0, count - 3, 4):
            f0, f1, f2, f3 = a[k, m], a[k + 1, m], a[k + 2, m], a[k + 3, m]
            b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            for n in range(row.size):
                row[n] += f0 * b0[n] + f1 * b1[n] + f2 * b2[n] + f3 * b3[n]
        for k in range(count - count % 4, count):
            factor, b0 = a[k, m], b[k]
            for n in range(row.size):
                row[n] += factor * b0[n]


@kernel
def dot_products(a: Array, b: Array, out: Array) -> None:
    """Write a bᵀ to out (M, N) for a (M, K) and b (N, K), with one pass over b. For small M."""
    rows = len(a)
    for n in range(len(b)):
        x = b[n]
        for m in range(0, rows - 3, 4):
            a0, a1, a2, a3 = a[m], a[m + 1], a[m + 2], a[m + 3]
            s0 = s1 = s2 = s3 = x.dtype.type(0)
            for k in range(x.size):
                s0, s1, s2, s3 = s0 + a0[k] * x[k], s1 + a1[k] * x[k], s2 + a2[k] * x[k], s3 + a3[k] * x[k]
            out[m, n], out[m + 1, n], out[m + 2, n], out[m + 3, n] = s0, s1, s2, s3
        for m in range(rows - rows % 4, rows):
            a0, s0 = a[m], x.dtype.type(0)
            for k in range(x.size):
                s0 += a0[k] * x[k]
            out[m, n] = s0
