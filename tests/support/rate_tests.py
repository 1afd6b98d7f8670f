"""Results of learning-rate range tests, without training."""

import math

from cupynet.training import RateTest


def made(losses: list[float], planned: int = 100) -> RateTest:
    found = RateTest(1e-4, 10.0, planned)
    found.losses = losses
    return found


def valley(place: int) -> list[float]:
    """Return a hundred losses with their minimum at `place`, and fast growth after it."""
    return [2.3 - 2.0 / (1 + math.exp(-(i - 0.7 * place) / 4)) + (0.3 * max(i - place, 0)) for i in range(100)]
