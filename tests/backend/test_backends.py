"""Backends besides their operations: arrays, images, names, precisions."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from cupynet.backend import BACKENDS, DTYPES, DtypePolicy, PixelScale, create_backend, select_backend
from cupynet.backend import select as selection
from tests.support.backends import every_backend, every_dtype, needs_bfloat16
from tests.support.refusals import refused


@every_backend
def test_an_array_starts_on_a_cache_line(name: str) -> None:
    backend = create_backend(name)
    for dtype in (np.float16, np.float32, np.float64, np.uint8, np.int64):
        shapes: list[tuple[int, ...]] = [(1,), (3, 5), (7, 3, 2, 1), (1000,)]
        arrays = [backend.allocate(shape, dtype) for shape in shapes]
        for array, shape in zip(arrays, shapes, strict=True):
            assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
            assert backend.address(array) % 64 == 0
            array[...] = 1
        assert all(bool((array == 1).all()) for array in arrays)


@every_backend
@every_dtype
def test_pixels_become_fractions(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    images = np.arange(256, dtype=np.uint8).reshape(4, 8, 4, 2)
    batch = backend.load_images(images, np.array([3, 0, 3]))
    assert (batch.shape, batch.dtype) == ((3, 8, 4, 2), backend.policy.storage)
    expected = images[[3, 0, 3]] / 255
    np.testing.assert_allclose(backend.to_host(batch), expected, rtol=1e-3 if dtype == "half" else 1e-6)
    assert float(batch.max()) == 1.0 and float(batch.min()) == 0.0
    assert backend.workspace.on_loan == 0  # a prefetcher's thread loads: nothing is borrowed


@every_backend
@every_dtype
def test_an_image_that_does_not_exist_is_refused(name: str, dtype: str) -> None:
    images = np.zeros((4, 2, 2, 1), np.uint8)
    with pytest.raises(IndexError):
        create_backend(name, dtype).load_images(images, np.array([0, 4]))


@every_backend
def test_a_scale_for_other_channels_is_refused(name: str) -> None:
    images, pixels = np.zeros((4, 2, 2, 2), np.uint8), PixelScale.of([0.5] * 3, [0.5] * 3)
    with pytest.raises(ValueError):
        create_backend(name).load_images(images, np.array([0]), pixels)


def test_policies() -> None:
    half, single, double = (np.dtype(t) for t in (np.float16, np.float32, np.float64))
    assert DtypePolicy.of("half") == DtypePolicy("half", half, single, single, 1024.0)
    assert DtypePolicy.of("half", half_arithmetic=True) == DtypePolicy("half", half, half, single, 1024.0)
    assert DtypePolicy.of("float") == DtypePolicy("float", single, single, single, 1.0)
    assert DtypePolicy.of("double") == DtypePolicy("double", double, double, double, 1.0)
    assert DTYPES == ("half", "bfloat16", "float", "double")
    for alias, name in (("float16", "half"), ("float32", "float"), ("float64", "double")):
        assert DtypePolicy.of(alias) == DtypePolicy.of(name)
    for wrong in ("floaty", None, 32):
        with refused("dtype"):
            DtypePolicy.of(wrong)  # type: ignore[arg-type]


@needs_bfloat16
def test_the_policy_of_bfloat16() -> None:
    policy, on_a_gpu = DtypePolicy.of("bfloat16"), DtypePolicy.of("bfloat16", half_arithmetic=True)
    assert (policy.storage.name, policy.compute, policy.accumulate) == ("bfloat16", np.float32, np.float32)
    assert on_a_gpu.compute == on_a_gpu.storage == policy.storage
    assert policy.loss_scale == 1.0
    assert float(np.float32(1e-30).astype(policy.storage)) > 0  # which half would lose


def test_bfloat16_without_ml_dtypes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: Any = None
    monkeypatch.setitem(sys.modules, "ml_dtypes", hidden)
    with refused("dtype", "bfloat16"):
        create_backend("numpy", "bfloat16")
    assert create_backend("numpy", "half").policy.storage == np.float16


def test_an_unknown_backend_is_refused() -> None:
    for function in (create_backend, select_backend):
        with refused("backend", "torch"):
            function("torch")


@pytest.mark.parametrize(
    ("missing", "gpu_priority", "expected"),
    [
        ({}, 100, ("cupy", None)),
        ({}, -1, ("numba", None)),
        ({"cupy": "no GPU"}, 100, ("numba", "no GPU")),
        ({"numba": "no numba"}, -1, ("numpy", "no numba")),
        ({"cupy": "no GPU", "numba": "no numba"}, 100, ("numpy", "no GPU; no numba")),
        ({}, 0, ("cupy", None)),
    ],
)
def test_auto_takes_the_first_by_priority_that_works(
    missing: dict[str, str], gpu_priority: int, expected: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_missing", lambda name, device=0: missing.get(name))
    assert select_backend("auto", gpu_priority=gpu_priority, cpu_priority=0) == expected


@pytest.mark.parametrize("name", BACKENDS)
def test_a_named_backend_is_selected_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_missing", lambda *_: None)
    assert select_backend(name) == (name, None)
    monkeypatch.setattr(selection, "_missing", lambda *_: "it is broken")
    with refused("backend", name):
        select_backend(name)


@pytest.mark.parametrize("error", [ImportError("Numba needs NumPy 2.2 or less.\nMore."), RuntimeError("no locator")])
def test_a_numba_that_does_not_import_is_missing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise error

    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda module: object())
    monkeypatch.setattr(selection.importlib, "import_module", fail)
    reason = f"numba cannot be used ({str(error).splitlines()[0]})"
    assert select_backend("auto", gpu_priority=-1) == ("numpy", reason)


def test_a_numba_that_compiles_nothing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("numba").config, "DISABLE_JIT", 1)
    monkeypatch.delitem(sys.modules, "cupynet.backend.cpu.kernels.jit", raising=False)
    name, reason = select_backend("auto", gpu_priority=-1)
    assert name == "numpy" and reason is not None and "NUMBA_DISABLE_JIT" in reason
    with refused("backend", "numba"):
        select_backend("numba")
