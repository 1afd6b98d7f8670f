"""Means with half-precision transfers."""

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.parallel import Communicator
from cupynet.parallel.synchronizers.half_precision import half_mean
from tests.support.training import on_threads

Vector = np.ndarray[Any, Any]


def means(vectors: list[Vector], weights: list[float]) -> list[tuple[Vector, int]]:
    """Return each worker's vector after averaging, and the bytes it sent."""

    def task(c: Communicator) -> tuple[Vector, int]:
        c.attach(create_backend("numpy", "float"))
        mine = vectors[c.rank].copy()
        half_mean(c, mine, weights[c.rank])
        return mine, c.traffic.bytes_sent

    return on_threads(len(vectors), task)


@pytest.mark.parametrize(("dtype", "scale"), [(np.float32, 1e-12), (np.float64, 3e4)])
def test_means_sent_in_16_bits_are_weighted_close_and_bit_identical_on_all_workers(dtype: Any, scale: float) -> None:
    rng = np.random.default_rng(1)
    vectors = [(scale * rng.normal(size=501)).astype(dtype) for _ in range(3)]
    exact = (4 * vectors[0].astype(np.float64) + 2 * vectors[2]) / 6
    results = means(vectors, [4.0, 0.0, 2.0])
    for mean, sent in results:
        np.testing.assert_array_equal(mean, results[0][0])
        np.testing.assert_allclose(mean, exact, rtol=0, atol=4 * scale * 2.0**-10)
        assert mean.dtype == dtype and sent < 2 * 501 * 2 * 2 / 3 + 100


@pytest.mark.parametrize("largest", [1e-45, 65504.0, 3e38])
def test_means_sent_in_16_bits_neither_overflow_nor_underflow(largest: float) -> None:
    vector = np.array([largest, -largest, largest / 3, 0], np.float32)
    for mean, _ in means([vector, vector], [1.0, 1.0]):
        np.testing.assert_allclose(mean, vector, rtol=2.0**-10, atol=1e-43)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_means_sent_in_16_bits_keep_nan_and_infinity(poison: float) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        results = means([np.ones(8, np.float32), np.full(8, poison, np.float32)], [1.0, 1.0])
    assert not any(np.isfinite(mean).any() for mean, _ in results)
