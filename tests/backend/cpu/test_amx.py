"""Products of bfloat16 in AMX units. test_operations.py and test_winograd.py compare layers."""

import llvmlite.binding
import numpy as np
import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend
from cupynet.backend.cpu.kernels import amx
from tests.support.pairwise import pairwise

needs_amx = pytest.mark.skipif(not amx.available(), reason="this processor has no AMX units")
LENGTHS = (1, 16, 33, 64, 130)


@needs_amx
@pairwise(rows=LENGTHS, depth=LENGTHS, columns=LENGTHS, transposed=(True, False))
def test_a_product_is_as_exact_as_in_float(rows: int, depth: int, columns: int, transposed: bool) -> None:
    backend, rng = create_backend("numba", "bfloat16"), np.random.default_rng(0)
    shapes = (rows, depth), ((columns, depth) if transposed else (depth, columns))
    a, b = (rng.normal(size=shape).astype(backend.policy.storage) for shape in shapes)
    found = backend._product(a, b, transpose_b=transposed)
    exact = a.astype(float) @ (b.T if transposed else b).astype(float)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * depth**0.5)


@needs_amx
def test_one_operand_may_be_float() -> None:
    backend, rng = create_backend("numba", "bfloat16"), np.random.default_rng(0)
    a, b = rng.normal(size=(5, 9)).astype("f"), rng.normal(size=(9, 4)).astype(backend.policy.storage)
    np.testing.assert_allclose(backend._product(a, b), a @ b.astype("f"), rtol=1e-5)


@needs_amx
def test_padding_does_not_multiply_infinity_by_zero() -> None:
    backend = create_backend("numba", "bfloat16")
    a, b = np.ones((3, 5), backend.policy.storage), np.ones((5, 7), backend.policy.storage)
    a[1, 4] = np.inf
    expected = np.full((3, 7), 5.0)
    expected[1] = np.inf
    assert np.array_equal(backend.matmul(a, b).astype(float), expected)


def test_a_processor_without_amx_is_not_asked_for_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", dict)
    monkeypatch.setattr("ctypes.CDLL", None)
    assert not amx.available.__wrapped__()
