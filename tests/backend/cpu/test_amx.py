"""Products of bfloat16 in AMX units: dense layers, and the convolutions of test_winograd.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend
from cupynet.backend.cpu.kernels import amx
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.window import Window
from tests.backend.cpu.test_winograd import SHAPES
from tests.support.comparisons import compare
from tests.support.pairwise import pairwise

needs_amx = pytest.mark.skipif(not amx.available(), reason="this processor has no AMX units")
LENGTHS = (1, 16, 33, 64, 130)
MARGIN = 1 << 12  # bytes


@pytest.fixture
def nan_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Borrow buffers that are full of NaN, and have NaN before and after them."""

    def allocate(backend: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.full(size + 2 * MARGIN, 255, np.uint8)[MARGIN : MARGIN + size].view(dtype).reshape(shape)

    monkeypatch.setattr(NumpyBackend, "allocate", allocate)


@needs_amx
@pytest.mark.usefixtures("nan_around")
@pairwise(rows=LENGTHS, depth=LENGTHS, columns=LENGTHS, transposed=(True, False), left=("bfloat16", "float32"))
def test_bfloat16_products_are_as_exact_as_float(
    rows: int, depth: int, columns: int, transposed: bool, left: str
) -> None:
    backend, rng = create_backend("numba", "bfloat16"), np.random.default_rng(0)
    shapes = (rows, depth), ((columns, depth) if transposed else (depth, columns))
    a, b = (rng.normal(size=shape).astype(backend.policy.storage) for shape in shapes)
    found = backend._product(a.astype(left), b, transpose_b=transposed)
    exact = a.astype(float) @ (b.T if transposed else b).astype(float)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * depth**0.5)


@needs_amx
@pytest.mark.usefixtures("nan_around")
@pytest.mark.parametrize("operation", ["conv2d", "conv2d_backward"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_convolutions_equal_the_reference(operation: str, shape: str) -> None:
    compare(operation, create_backend("numba", "bfloat16"), SHAPES[shape], seed=3)


@needs_amx
def test_padding_of_bfloat16_products_does_not_multiply_infinity_by_zero() -> None:
    backend = create_backend("numba", "bfloat16")
    a, b = np.ones((3, 5), backend.policy.storage), np.ones((5, 7), backend.policy.storage)
    a[1, 4] = np.inf
    expected = np.full((3, 7), 5.0)
    expected[1] = np.inf
    assert np.array_equal(backend.matmul(a, b).astype(float), expected)


@needs_amx
@pytest.mark.parametrize("channels", [16, 32, 48])
def test_nan_reaches_only_the_windows_of_a_bfloat16_convolution_that_contain_it(channels: int) -> None:
    backend = create_backend("numba", "bfloat16")
    x, weight = (np.ones(shape, backend.policy.storage) for shape in ((3, 6, 7, channels), (3, 3, channels, 16)))
    x[1, 0, 2] = np.nan
    expected = np.full((3, 4, 5, 16), 9.0 * channels)
    expected[1, 0, :3] = np.nan
    assert np.array_equal(backend.conv2d(x, weight, None, Window((3, 3)))[0].astype(float), expected, equal_nan=True)


@pytest.mark.parametrize("status", [-1, 0])
def test_amx_is_used_only_with_the_permission_of_the_system(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "target_features", lambda: {"+amx-tile", "+amx-bf16"})
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(syscall=lambda *_: status))
    assert amx.available.__wrapped__() == (status == 0)


def test_a_processor_without_amx_is_not_asked_for_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "target_features", lambda: {"+avx2", "-amx-tile", "-amx-bf16"})
    monkeypatch.setattr("ctypes.CDLL", None)
    assert not amx.available.__wrapped__()
