from __future__ import annotations

import math

from cupynet.backend.array import Array
from cupynet.parallel.communicators.base import Communicator

TRANSFER_DTYPES = ("full", "half")
LARGEST = 15  # values are scaled below 2^15, so that float16 does not overflow
SHIFTS = 120  # largest exponent of a scale factor, within the range of single precision


def half_mean(communicator: Communicator, deltas: list[Array], weight: float) -> None:
    """Overwrite each vector with the weighted mean over the workers, sent in 16 bits.

    Results are bit-identical on all workers. This is intended for gradients, and for differences from common weights;
    11 bits are too few for weights themselves. Each vector is scaled by a power of two so that the largest magnitude on
    any worker just fits. Values below 2^-39 times this magnitude are lost. Sums are computed in double precision.

    deltas: finite flat vectors (see `Communicator.allreduce_mean`), which are empty for a stage without weights.
    """
    maxima = [float(abs(delta).max()) if len(delta) else 0.0 for delta in deltas]
    largest = communicator.gather_numbers(*maxima).max(axis=0)
    factors = [2.0 ** max(-SHIFTS, min(SHIFTS, LARGEST - math.frexp(maximum)[1])) for maximum in largest.tolist()]
    halves = [(delta * factor).astype("float16") for delta, factor in zip(deltas, factors, strict=True)]
    communicator.allreduce_mean(halves, weight)
    for delta, half, factor in zip(deltas, halves, factors, strict=True):
        delta[...] = half
        delta /= factor
