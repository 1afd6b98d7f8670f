"""Every operation of CupyBackend against the reference, its kernels run on the CPU.

The launches are those of a GPU. Small grids and blocks must change nothing: a thread then does the work of many.
"""

from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupynet.backend.cuda import CupyBackend
from tests.backend.comparisons import COMPARISONS, Shape
from tests.backend.on_host import OnHost
from tests.backend.test_operations import LENET, compare, shapes
from tests.backends import every_dtype, needs_bfloat16

LIMITS = {"usual": (256, None), "tiny": (48, 1)}


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> OnHost:
    module = OnHost()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize("dtype", ["half", pytest.param("bfloat16", marks=needs_bfloat16), "float", "double"])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("operation", COMPARISONS)
def test_kernels_equal_the_reference(dtype: str, operation: str, limits: str) -> None:
    backend = CupyBackend(dtype, 0, *LIMITS[limits])

    @settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(shape=shapes, seed=st.integers(0, 10**6))
    def compared(shape: Shape, seed: int) -> None:
        compare(operation, backend, shape, seed)

    compared()


@every_dtype
@pytest.mark.parametrize("shape", LENET.values(), ids=LENET)
@pytest.mark.parametrize("operation", ["conv2d_backward", "max_pool2d_backward", "fused_pair"])
def test_kernels_equal_the_reference_at_real_sizes(dtype: str, operation: str, shape: Shape) -> None:
    compare(operation, CupyBackend(dtype), shape, seed=5)
