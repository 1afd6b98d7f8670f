"""Normalization of channels and of rows. Each kernel makes one pass over memory.

In the kernels for channels, sums over a block of rows (R, C) stay in the L1 cache and are added in double. With few
channels, k pixels are processed as one row, (R, k · C), and parameters are repeated k times. The second pass over an
array starts with its last block, which is still in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals

BLOCK = 64  # rows per block in `normalize_rows_backward`
WIDE_BLOCK = 16  # rows per block in the kernels for channels
LAST_FIRST = 64  # rows per block in kernels that start with the last block


@kernel
def channel_moments(x: Array, moments: Array) -> None:
    """Write the mean and biased variance of the channels of x (R, k · C) to moments (2, C).

    Makes two passes over each block and combines blocks as in Chan et al. 1979. If the mean is s standard deviations
    from zero, the measured relative error of the variance is at most (10 + 0.3 s) times the machine epsilon.
    """
    x = reals(x)
    (rows, columns), channels = x.shape, moments.shape[1]
    mean, spread = np.zeros(columns, np.float64), np.zeros(columns, np.float64)
    part, square = np.empty(columns, moments.dtype), np.empty(columns, moments.dtype)
    for start in range(0, rows, WIDE_BLOCK):
        stop = min(start + WIDE_BLOCK, rows)
        part[:] = 0
        for r in range(start, stop):
            row = x[r]
            for c in range(columns):
                part[c] += row[c]
        share = x.dtype.type(1) / x.dtype.type(stop - start)
        for c in range(columns):
            part[c] *= share
            square[c] = 0
        for r in range(start, stop):
            row = x[r]
            for c in range(columns):
                apart = row[c] - part[c]
                square[c] += apart * apart
        weight = (stop - start) / stop
        for c in range(columns):
            delta = np.float64(part[c]) - mean[c]
            mean[c] += delta * weight
            spread[c] += square[c] + delta * delta * start * weight
    for at in range(channels, columns):  # merge the moments of all pixels of a row
        c, before = at % channels, at // channels
        delta = mean[at] - mean[c]
        mean[c] += delta / (before + 1)
        spread[c] += spread[at] + delta * delta * rows * before / (before + 1)
    for c in range(channels):
        moments[0, c] = mean[c]
        moments[1, c] = spread[c] / (rows * (columns // channels))


@kernel
def normalize(x: Array, mean: Array, factor: Array, shift: Array, y: Array, relu: bool) -> None:
    """y = (x - mean) · factor + shift for each column, then max(y, 0) if relu. x, y: (R, k · C)."""
    x, y = reals(x), reals(y)
    channels, zero = x.shape[1], x.dtype.type(0)
    for stop in range(len(x), 0, -LAST_FIRST):
        for r in range(max(stop - LAST_FIRST, 0), stop):
            source, target = x[r], y[r]
            if relu:
                for c in range(channels):
                    value = (source[c] - mean[c]) * factor[c] + shift[c]
                    target[c] = zero if value <= zero else value
            else:
                for c in range(channels):
                    target[c] = (source[c] - mean[c]) * factor[c] + shift[c]


@kernel
def normalize_add(x: Array, mean: Array, factor: Array, shift: Array, y: Array, relu: bool, around: Array) -> None:
    """y = (x - mean) · factor + shift + around for each column, then max(y, 0) if relu. x, y: (R, k · C)."""
    x, y, around = reals(x), reals(y), reals(around)
    lowest = x.dtype.type(0 if relu else -np.inf)
    for stop in range(len(x), 0, -LAST_FIRST):
        for r in range(max(stop - LAST_FIRST, 0), stop):
            source, added, target = x[r], around[r], y[r]
            for c in range(source.size):
                value = (source[c] - mean[c]) * factor[c] + shift[c] + added[c]
                target[c] = lowest if value <= lowest else value


@kernel
def normalize_sums(dy: Array, x: Array, y: Array, mean: Array, sums: Array, relu: bool) -> None:
    """Write the sums of dy and dy · (x - mean) to sums (2, C). If relu, first set dy (R, k · C) to 0 where y <= 0."""
    dy, x, y = reals(dy), reals(x), reals(y)
    channels, wide = sums.shape[1], (2, mean.size)
    totals, parts = np.zeros(wide, np.float64), np.empty(wide, sums.dtype)
    zero, part, part_product = x.dtype.type(0), parts[0], parts[1]
    for start in range(0, len(x), WIDE_BLOCK):
        block, sources = dy[start : start + WIDE_BLOCK], x[start : start + WIDE_BLOCK]
        if relu:
            passed, output = block.reshape(-1), y[start : start + WIDE_BLOCK].reshape(-1)
            for i in range(passed.size):  # a separate loop, because it is vectorized less well if fused with the sums
                passed[i] = passed[i] if output[i] > zero else zero
        parts[:] = 0
        for r in range(len(block)):
            gradient, source = block[r], sources[r]
            for c in range(gradient.size):
                part[c] += gradient[c]
                part_product[c] += gradient[c] * (source[c] - mean[c])
        for c in range(mean.size):
            totals[0, c] += part[c]
            totals[1, c] += part_product[c]
    for i in range(2):  # loops, because operations on arrays take seconds to compile
        for at in range(channels, mean.size):  # the pixels of a row
            totals[i, at % channels] += totals[i, at]
        for c in range(channels):
            sums[i, c] = totals[i, c]


@kernel
def normalize_backward(
    dy: Array, x: Array, dx: Array, apart: bool, mean: Array, factor: Array, slope: Array, offset: Array
) -> None:
    """dx = dy · factor - (x - mean) · slope - offset for each column. x: (R, k · C). apart: dx is not dy."""
    dy, x, dx = reals(dy), reals(x), reals(dx)
    channels = x.shape[1]
    for stop in range(len(x), 0, -LAST_FIRST):
        for r in range(max(stop - LAST_FIRST, 0), stop):
            given, gradient, source = dy[r], dx[r], x[r]
            for c in range(channels if apart else 0):  # a copy in the L1 cache, so that one loop serves both cases
                gradient[c] = given[c]
            for c in range(channels):
                gradient[c] = gradient[c] * factor[c] - (source[c] - mean[c]) * slope[c] - offset[c]


@kernel
def normalize_rows(x: Array, scale: Array, shift: Array, epsilon: Any, y: Array, moments: Array) -> None:
    """y = (x - mean) / sqrt(variance + epsilon) · scale + shift for each row; moments (R, 2): mean and 1 / sqrt(...).

    Uses the corrected two-pass algorithm (Chan et al. 1983), because the mean of a long row has a rounding error.
    """
    x, scale, shift, y = reals(x), reals(scale), reals(shift), reals(y)
    columns, real = x.shape[1], moments.dtype.type
    for r in range(x.shape[0]):
        source, target = x[r], y[r]
        mean = real(0)
        for c in range(columns):
            mean += source[c]
        mean /= real(columns)
        square = drift = real(0)
        for c in range(columns):
            apart = source[c] - mean
            drift += apart
            square += apart * apart
        drift /= real(columns)
        mean += drift
        variance = max(square / real(columns) - drift * drift, real(0))
        inverse = real(1) / np.sqrt(variance + epsilon)
        for c in range(columns):
            target[c] = (source[c] - mean) * inverse * scale[c] + shift[c]
        moments[r, 0] = mean
        moments[r, 1] = inverse


@kernel
def normalize_rows_backward(
    dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, need_dx: bool
) -> None:
    """Add the gradients of scale and shift (D,). If `need_dx`, overwrite dy (R, D) with dx."""
    dy, x, scale = reals(dy), reals(x), reals(scale)
    rows, columns = x.shape
    part, part_product = np.empty(columns, moments.dtype), np.empty(columns, moments.dtype)
    for start in range(0, rows, BLOCK):
        part[:] = 0
        part_product[:] = 0
        for r in range(start, min(start + BLOCK, rows)):
            gradient, source = dy[r], x[r]
            mean, inverse = moments[r, 0], moments[r, 1]
            first = second = x.dtype.type(0)
            for c in range(columns):
                normal = (source[c] - mean) * inverse
                part[c] += gradient[c]
                part_product[c] += gradient[c] * normal
                slope = gradient[c] * scale[c]
                first += slope
                second += slope * normal
            if need_dx:
                first /= x.dtype.type(columns)
                second /= x.dtype.type(columns)
                for c in range(columns):
                    normal = (source[c] - mean) * inverse
                    gradient[c] = inverse * (gradient[c] * scale[c] - first - normal * second)
        for c in range(columns):
            shift_grad[c] += part[c]
            scale_grad[c] += part_product[c]
