"""Settings without effect: for a single replica, on a CPU, and in general."""

from __future__ import annotations

from typing import Any

from cupynet import config

OURS = {"parallel.synchronizer._target_": "cupynet.parallel.ParameterAveraging", "parallel.averaging_frequency": 3}
CHANGED: dict[str, Any] = {
    "parallel.averaging_frequency": 7,
    "parallel.synchronizer.outer": "diloco",
    "parallel.learning_rate_scale": "linear",
    "parallel.timeout_s": 60.0,
    "backend.max_block_size": 64,
    "memory.data_on_device": True,
}


def same(changed: dict[str, Any], workers: int = 1, backend: str = "numba", **settings: Any) -> bool:
    """Return True if settings with and without a change have the same effect."""
    common = {**OURS, "parallel.learning_rate_scale": "none", "parallel.prefetch_buffer": 24, **settings}
    first, second = (config.effective({**common, **each}, workers, backend) for each in ({}, changed))
    return first == second


def test_settings_without_effect_are_equal() -> None:
    assert same(CHANGED) and same({"workers": 1, "backend.name": "auto"})
    assert all(same({key: value}) for key, value in CHANGED.items())


def test_settings_with_an_effect_are_not() -> None:
    assert [key for key, value in CHANGED.items() if same({key: value}, workers=2)] == [
        "parallel.timeout_s", "backend.max_block_size", "memory.data_on_device",
    ]  # fmt: skip
    assert not same({"backend.max_block_size": 64}, backend="cupy")
    assert not same({"parallel.learning_rate_scale": 2.0}) and not same({"parallel.prefetch_buffer": 0})
    assert not same({"parallel.synchronizer._target_": "mine.Averaging"})
    assert not same({"seed": 1}) and not same({"optimizer.learning_rate": 0.1})
