"""Settings without effect: for a single replica, on a CPU, and in general."""

from __future__ import annotations

from typing import Any

import pytest

from cupynet import config

COMMON = {
    "parallel.synchronizer._target_": "cupynet.parallel.ParameterAveraging",
    "parallel.averaging_frequency": 3,
    "parallel.learning_rate_scale": "none",
    "parallel.prefetch_buffer": 24,
}


def same(changed: dict[str, Any], workers: int, backend: str) -> bool:
    """Return True if settings with and without a change have the same effect."""
    one, other = (config.effective({**COMMON, **each}, workers, backend) for each in ({}, changed))
    return one == other


@pytest.mark.parametrize(
    ("key", "value"),
    [("parallel.timeout_s", 60.0), ("backend.max_block_size", 64), ("memory.data_on_device", True), ("workers", 1)],
)
def test_settings_without_effect_are_equal(key: str, value: Any) -> None:
    assert same({key: value}, 1, "numba") and (key == "workers" or same({key: value}, 2, "numba"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.averaging_frequency", 7),
        ("parallel.synchronizer.outer", "diloco"),
        ("parallel.learning_rate_scale", "linear"),
    ],
)
def test_a_single_replica_averages_with_none(key: str, value: Any) -> None:
    assert same({key: value}, 1, "numba") and not same({key: value}, 2, "numba")


@pytest.mark.parametrize(
    ("changed", "backend"),
    [
        ({"backend.max_block_size": 64}, "cupy"),
        ({"parallel.learning_rate_scale": 2.0}, "numba"),
        ({"parallel.prefetch_buffer": 0}, "numba"),
        ({"parallel.synchronizer._target_": "mine.Averaging"}, "numba"),
        ({"optimizer.learning_rate": 0.1}, "numba"),
    ],
)
def test_settings_with_an_effect_differ(changed: dict[str, Any], backend: str) -> None:
    assert not same(changed, 1, backend)
