from __future__ import annotations

import math

from cupynet.backend.array import Array
from cupynet.parallel.communicators.base import Communicator

TRANSFER_DTYPES = ("full", "half")
LARGEST = 15  # values are scaled below 2^15, so that float16 does not overflow
SHIFTS = 120  # largest exponent of a scale factor, within the range of single precision


def half_mean(communicator: Communicator, delta: Array, weight: float) -> None:
    """Overwrite a vector with the weighted mean over the workers, sent in 16 bits.

    Results are bit-identical on all workers. This is intended for gradients, and for differences from common weights;
    11 bits are too few for weights themselves. The vector is scaled by a power of two so that the largest magnitude on
    any worker just fits. Values below 2^-39 times this magnitude are lost. Sums are computed in double precision.

    delta: a finite flat vector (see `Communicator.allreduce_mean`), which is empty for a stage without weights.
    """
    maximum = float(abs(delta).max()) if len(delta) else 0.0
    largest = float(communicator.gather_numbers(maximum).max())
    factor = 2.0 ** max(-SHIFTS, min(SHIFTS, LARGEST - math.frexp(largest)[1]))
    half = (delta * factor).astype("float16")
    communicator.allreduce_mean([half], weight)
    delta[...] = half
    delta /= factor
