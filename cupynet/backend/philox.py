"""Counter-based random numbers: Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

Four 32-bit counters and a key of two 32-bit numbers determine four random numbers, regardless of order and backend.
`cpu/kernels/dropout.py` and `cuda/kernels/dropout.cu` implement the same generator.
"""

from __future__ import annotations

import hashlib
from types import ModuleType
from typing import Any

from cupynet.backend.array import Array

ROUNDS = 10
FACTORS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
MASK = (1 << 32) - 1


def key_of(seed: int, name: str) -> int:
    """Return a 64-bit key derived from a seed and the name of its user, such as a layer."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def dropped_below(rate: float) -> int:
    """Return the threshold below which a random 32-bit number falls with probability `rate`."""
    return min(round(rate * (1 << 32)), MASK)


def numbers(counters: tuple[Array, Array, Array, Array], key: int) -> tuple[Array, Array, Array, Array]:
    """Return four 32-bit random numbers for each element of the counters, as uint64 arrays. Counters are broadcast."""
    a, b, c, d = counters
    first, second = key & MASK, key >> 32
    for _ in range(ROUNDS):
        low, high = a * FACTORS[0], c * FACTORS[1]
        a, b, c, d = (high >> 32) ^ b ^ first, high & MASK, (low >> 32) ^ d ^ second, low & MASK
        first, second = (first + STEPS[0]) & MASK, (second + STEPS[1]) & MASK
    return a, b, c, d


def of_examples(xp: ModuleType, samples: Array, epoch: Any, key: int, features: int) -> Array:
    """Return a 32-bit random number for each value of each sample: (N, features) uint64.

    The counters are a position, the sample index (two counters) and the epoch. Value v uses position v mod Q and random
    number v // Q, with Q = ceil(features / 4).
    """
    quarter = -(-features // 4)
    position = xp.arange(quarter, dtype="uint64").reshape(1, -1)
    sample = xp.asarray(samples).astype("uint64").reshape(-1, 1)
    epochs = (xp.zeros((1, 1), "uint64") + xp.asarray(epoch).astype("uint64").reshape(-1)) & MASK
    result = xp.empty((len(sample), 4, quarter), "uint64")
    for lane, values in enumerate(numbers((position, sample & MASK, sample >> 32, epochs), key)):
        result[:, lane] = values
    return result.reshape(len(sample), -1)[:, :features]
