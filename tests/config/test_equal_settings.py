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


@pytest.mark.parametrize(
    ("key", "value", "workers", "backend", "same"),
    [
        ("parallel.averaging_frequency", 7, 1, "numba", True),
        ("parallel.averaging_frequency", 7, 2, "numba", False),
        ("parallel.synchronizer.outer_optimizer", "diloco", 1, "numba", True),
        ("parallel.synchronizer.outer_optimizer", "diloco", 2, "numba", False),
        ("parallel.learning_rate_scale", "linear", 1, "numba", True),
        ("parallel.learning_rate_scale", "linear", 2, "numba", False),
        ("parallel.prefetch_buffer", 0, 1, "numba", False),
        ("parallel.timeout_s", 60.0, 2, "numba", True),
        ("memory.data_on_device", True, 2, "numba", True),
        ("backend.max_block_size", 64, 2, "numba", True),
        ("backend.max_block_size", 64, 1, "cupy", False),
        ("optimizer.learning_rate", 0.1, 1, "numba", False),
    ],
)
def test_settings_are_equal_if_they_differ_only_without_effect(
    key: str, value: Any, workers: int, backend: str, same: bool
) -> None:
    one, other = (config.effective({**COMMON, **each}, workers, backend) for each in ({}, {key: value}))
    assert (one == other) == same
