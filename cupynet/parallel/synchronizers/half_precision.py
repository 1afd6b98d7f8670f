"""Averaging with half-precision transfer."""

from __future__ import annotations

import math

from cupynet.backend.array import Array
from cupynet.parallel.communicators.base import Communicator

TRANSFER_DTYPES = ("full", "half")
RESOLUTION = 2.0**-10  # relative error of a 16-bit mean, which is rounded twice
LARGEST = 15  # float16 holds magnitudes below 2^15, and means of them, without overflow
SHIFTS = 120  # largest exponent of a scale factor, representable in single precision


def half_mean(communicator: Communicator, deltas: list[Array], weight: float) -> None:
    """Overwrite each vector with the weighted mean over the workers, sent in 16 bits and bit-identical on all.

    For vectors that are small if replicas agree, such as gradients or differences from common weights. The 11-bit
    significand is too short for the weights themselves. Each vector is scaled by a power of two so that the largest
    magnitude on any worker just fits. Values up to 2^-39 of it are lost. Sums are computed in double precision.

    Args:
        deltas: finite flat vectors, see `Communicator.allreduce_mean`; empty for a stage without weights.
        weight: see `Communicator.allreduce_mean`.
    """
    own = [float(abs(delta).max()) if len(delta) else 0.0 for delta in deltas]
    largest = communicator.gather_numbers(*own).max(axis=0)
    factors = [2.0 ** max(-SHIFTS, min(SHIFTS, LARGEST - math.frexp(each)[1])) for each in largest.tolist()]
    halves = [(delta * factor).astype("float16") for delta, factor in zip(deltas, factors, strict=True)]
    communicator.allreduce_mean(halves, weight)
    for delta, half, factor in zip(deltas, halves, factors, strict=True):
        delta[...] = half
        delta /= factor
