"""dtype=bfloat16: its policy. tests/backend/test_operations.py compares its operations."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from cupynet.backend import DtypePolicy, create_backend
from cupynet.core.errors import ConfigError
from tests.support.backends import needs_bfloat16


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
