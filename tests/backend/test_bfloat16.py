"""dtype=bfloat16: float's range in 16 bits, stored with ml_dtypes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupynet.backend import DtypePolicy, create_backend
from cupynet.core.errors import ConfigError
from tests.backend.test_operations import compare, shapes
from tests.support.backends import every_backend, needs_bfloat16
from tests.support.comparisons import COMPARISONS, Shape


@needs_bfloat16
@every_backend
@pytest.mark.parametrize("operation", COMPARISONS)
def test_a_backend_equals_the_reference(name: str, operation: str) -> None:
    backend = create_backend(name, "bfloat16")

    @settings(
        max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(shape=shapes, seed=st.integers(0, 10**6))
    def compared(shape: Shape, seed: int) -> None:
        compare(operation, backend, shape, seed)

    compared()


@needs_bfloat16
def test_its_policy() -> None:
    policy, on_a_gpu = DtypePolicy.of("bfloat16"), DtypePolicy.of("bfloat16", half_arithmetic=True)
    assert (policy.storage.name, policy.compute, policy.accumulate) == ("bfloat16", np.float32, np.float32)
    assert on_a_gpu.compute == on_a_gpu.storage == policy.storage
    assert policy.loss_scale == 1.0
    assert float(np.float32(1e-30).astype(policy.storage)) > 0  # which half would lose


def test_without_ml_dtypes_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: Any = None
    monkeypatch.setitem(sys.modules, "ml_dtypes", hidden)
    with pytest.raises(ConfigError, match="^dtype=bfloat16: ml_dtypes is not installed .*: pip install ml_dtypes$"):
        create_backend("numpy", "bfloat16")
    assert create_backend("numpy", "half").policy.storage == np.float16
