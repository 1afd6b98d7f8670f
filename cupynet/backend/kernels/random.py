"""Random numbers of Philox, as backend/philox.py has them, in compiled loops."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.kernels.loops import kernel
from cupynet.backend.philox import FACTORS, ROUNDS, STEPS

LOW, HIGH = np.uint64(FACTORS[0]), np.uint64(FACTORS[1])
STEP, OTHER_STEP = np.uint64(STEPS[0]), np.uint64(STEPS[1])
MASK, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def four(a: Any, b: Any, c: Any, d: Any, first: Any, second: Any) -> Any:
    """Four numbers of 32 bits for four counters and a key; all are uint64."""
    for _ in range(ROUNDS):
        low, high = a * LOW, c * HIGH
        a, b, c, d = (high >> HALF) ^ b ^ first, high & MASK, (low >> HALF) ^ d ^ second, low & MASK
        first, second = (first + STEP) & MASK, (second + OTHER_STEP) & MASK
    return a, b, c, d


@kernel
def dropout(x: Array, out: Array, samples: Array, epoch: int, first: int, second: int, below: int, factor: Any) -> None:
    """out = x · factor where the value's number is at least `below`, else 0; (N, F), (N,). first, second: the key."""
    features = x.shape[1]
    quads = features // 4
    least, key, other, when = np.uint64(below), np.uint64(first), np.uint64(second), np.uint64(epoch) & MASK
    zero = x.dtype.type(0)
    for n in range(x.shape[0]):
        source, target = x[n], out[n]
        sample = np.uint64(samples[n])
        low, high = sample & MASK, sample >> HALF
        for q in range(quads):
            a, b, c, d = four(np.uint64(q), low, high, when, key, other)
            at = 4 * q
            target[at] = source[at] * factor if a >= least else zero
            target[at + 1] = source[at + 1] * factor if b >= least else zero
            target[at + 2] = source[at + 2] * factor if c >= least else zero
            target[at + 3] = source[at + 3] * factor if d >= least else zero
        if 4 * quads < features:
            a, b, c, d = four(np.uint64(quads), low, high, when, key, other)
            for lane in range(features - 4 * quads):
                number = a if lane == 0 else (b if lane == 1 else c)
                at = 4 * quads + lane
                target[at] = source[at] * factor if number >= least else zero
