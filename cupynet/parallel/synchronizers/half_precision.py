"""Means of vectors that are sent in half precision."""

from __future__ import annotations

import math

from cupynet.backend.array import Array
from cupynet.parallel.communicators.base import Communicator

TRANSFER_DTYPES = ("full", "half")
RESOLUTION = 2.0**-10  # of a mean in 16 bits, which is rounded twice
LARGEST = 15  # a magnitude below 2^15 is finite in 16 bits; so is the mean of several
SHIFTS = 120  # factors are powers of two that single precision has


def half_mean(communicator: Communicator, deltas: list[Array], weight: float) -> None:
    """Overwrite each vector with the weighted mean over the workers, sent in 16 bits; the same bits on all of them.

    For vectors that are small if replicas agree, such as gradients or differences from common weights. The 11 bits are
    too few for the weights themselves. Each vector is multiplied by a power of two, so that the largest magnitude on
    any worker just fits; values of 2^-39 of that or less are lost. Sums are made in double precision.

    Args:
        deltas: flat vectors, finite, see `Communicator.allreduce_mean`; empty for a stage without weights.
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
