"""Means with half-precision transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.parallel.synchronizers.half_precision import half_mean
from tests.support.training import on_threads


def means(vectors: list[list[np.ndarray[Any, Any]]], weights: list[float], backend: str) -> list[Any]:
    """Return each worker's vectors after the mean, and the bytes it sent."""

    def task(communicator: Any) -> Any:
        communicator.attach(create_backend(backend, "float"))
        mine = [vector.copy() for vector in vectors[communicator.rank]]
        half_mean(communicator, mine, weights[communicator.rank])
        return mine, communicator.traffic.bytes_sent

    return on_threads(len(vectors), task)


@pytest.mark.parametrize(("dtype", "backend"), [(np.float32, "numba"), (np.float64, "numpy")])
def test_a_mean_in_16_bits_is_close_and_equal_on_all_workers(dtype: Any, backend: str) -> None:
    rng = np.random.default_rng(1)
    scales = [1e-12, 3e4]  # each vector has a factor of its own
    vectors = [[(scale * rng.normal(size=501)).astype(dtype) for scale in scales] for _ in range(3)]
    weights = [4.0, 0.0, 2.0]
    found = means(vectors, weights, backend)
    for i, scale in enumerate(scales):
        exact = (4 * vectors[0][i].astype(np.float64) + 2 * vectors[2][i]) / 6
        for (mine, sent), (first, _) in zip(found, found[:1] * 3, strict=True):
            assert mine[i].dtype == dtype and np.array_equal(mine[i], first[i])
            np.testing.assert_allclose(mine[i], exact, rtol=0, atol=4 * scale * 2.0**-10)
            assert np.abs(mine[i] - exact).max() > 0  # it is no copy of the exact mean
            assert sent < 2 * 2 * 501 * 2 * 2 / 3 + 100


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 65504.0, 3e38])
def test_no_magnitude_is_too_small_or_too_large(largest: float) -> None:
    vector = np.array([largest, -largest, largest / 3, 0], np.float32)
    ((mine,), _), ((other,), _) = means([[vector], [vector]], [1.0, 1.0], "numba")
    np.testing.assert_allclose(mine, vector, rtol=2.0**-10, atol=1e-43)
    assert np.array_equal(mine, other)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_and_infinity_are_kept(poison: float) -> None:
    good, bad = np.ones(8, np.float32), np.full(8, poison, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for (mine,), _ in means([[good], [bad]], [1.0, 1.0], "numpy"):
            assert not np.isfinite(mine).any()
