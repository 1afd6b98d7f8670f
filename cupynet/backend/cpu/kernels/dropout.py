from __future__ import annotations

from typing import Any

import numba
import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals
from cupynet.backend.philox import FACTORS, STEPS

LOW, HIGH = np.uint64(FACTORS[0]), np.uint64(FACTORS[1])
STEP, OTHER_STEP = np.uint64(STEPS[0]), np.uint64(STEPS[1])
MASK, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
BLOCK = 256  # positions processed at a time


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def mixed(a: Any, b: Any, c: Any, d: Any, first: Any, second: Any) -> Any:
    """Return the counters after one round, and the key of the next round."""
    low, high = (a & MASK) * LOW, (c & MASK) * HIGH
    a, b, c, d = (high >> HALF) ^ b ^ first, high & MASK, (low >> HALF) ^ d ^ second, low & MASK
    return a, b, c, d, (first + STEP) & MASK, (second + OTHER_STEP) & MASK


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def four(a: Any, b: Any, c: Any, d: Any, first: Any, second: Any) -> Any:
    """Return four 32-bit random numbers for four counters and a key, all uint64. Unrolled for vectorization."""
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    a, b, c, d, first, second = mixed(a, b, c, d, first, second)
    return a, b, c, d


@kernel
def dropout(
    x: Array, out: Array, apart: bool, samples: Array, epoch: int, first: int, second: int, below: int, factor: Any
) -> None:
    """out (N, F) = x · factor where the random number is at least `below`, else 0.

    apart: out is not x, as in `activation`. first, second: the key.
    """
    x, out = reals(x), reals(out)
    features = x.shape[1]
    quarter = (features + 3) // 4
    least, key, other, when = np.uint32(below), np.uint64(first), np.uint64(second), np.uint64(epoch) & MASK
    zero = x.dtype.type(0)
    drawn = np.empty((4, BLOCK), np.uint32)
    one, two, three, last = drawn[0], drawn[1], drawn[2], drawn[3]
    for n in range(x.shape[0]):
        sample = np.uint64(samples[n])
        low, high = sample & MASK, sample >> HALF
        for start in range(0, quarter, BLOCK):
            count = min(BLOCK, quarter - start)
            for i in range(count):
                a, b, c, d = four(np.uint64(start + i), low, high, when, key, other)
                one[i] = a
                two[i] = b
                three[i] = c
                last[i] = d
            for lane in range(4):
                begin = lane * quarter + start
                numbers = drawn[lane]
                source, target = x[n, begin:], out[n, begin : begin + count]
                for i in range(target.size if apart else 0):
                    target[i] = source[i]
                for i in range(target.size):
                    target[i] = target[i] * factor if numbers[i] >= least else zero
