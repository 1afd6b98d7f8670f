"""Backends apart from their operations: arrays, images, names, precisions."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import BACKENDS, DtypePolicy, PixelScale, create_backend, select_backend
from cupynet.backend import select as selection
from tests.support.backends import every_backend, needs_bfloat16
from tests.support.refusals import refused


@every_backend
def test_loading_no_images_is_possible_and_loading_missing_ones_is_refused(name: str) -> None:
    backend, images = create_backend(name), np.zeros((4, 2, 2, 2), np.uint8)
    assert backend.load_images(images, np.zeros(0, np.int64)).shape == (0, 2, 2, 2)
    with pytest.raises(IndexError):
        backend.load_images(images, np.array([0, 4]))
    with pytest.raises(ValueError):
        backend.load_images(images, np.array([0]), PixelScale.of([0.5] * 3, [0.5] * 3))


@pytest.mark.parametrize(
    ("name", "storage", "compute", "accumulate", "loss_scale"),
    [
        ("half", "float16", "float32", "float32", 1024),
        ("float16", "float16", "float32", "float32", 1024),
        pytest.param("bfloat16", "bfloat16", "float32", "float32", 1, marks=needs_bfloat16),
        ("float", "float32", "float32", "float32", 1),
        ("double", "float64", "float64", "float64", 1),
    ],
)
def test_a_dtype_sets_the_precision_of_storage_and_of_sums_and_the_loss_scale(
    name: str, storage: str, compute: str, accumulate: str, loss_scale: int
) -> None:
    policy = DtypePolicy.of(name)
    assert (policy.storage.name, policy.compute.name, policy.accumulate.name) == (storage, compute, accumulate)
    assert policy.loss_scale == loss_scale
    if storage in ("float16", "bfloat16"):
        assert DtypePolicy.of(name, half_arithmetic=True).compute.name == storage


def test_bfloat16_without_ml_dtypes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with refused("dtype", "bfloat16"):
        create_backend("numpy", "bfloat16")
    assert create_backend("numpy", "half").policy.storage == np.float16


@pytest.mark.parametrize(
    ("function", "setting", "value"),
    [
        (DtypePolicy.of, "dtype", "floaty"),
        (DtypePolicy.of, "dtype", None),
        (DtypePolicy.of, "dtype", 32),
        (create_backend, "backend", "torch"),
        (select_backend, "backend", "torch"),
    ],
)
def test_an_unknown_dtype_or_backend_is_refused(function: Callable[[Any], Any], setting: str, value: Any) -> None:
    with refused(setting):
        function(value)


@pytest.mark.parametrize(
    ("missing", "gpu_priority", "expected"),
    [
        ({}, 100, ("cupy", None)),
        ({}, 0, ("cupy", None)),
        ({}, -1, ("numba", None)),
        ({"cupy": "no GPU"}, 100, ("numba", "no GPU")),
        ({"cupy": "no GPU", "numba": "no numba"}, 100, ("numpy", "no GPU; no numba")),
    ],
)
def test_backend_auto_selects_the_first_by_priority_that_works(
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


def test_numpy_is_selected_if_numba_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise RuntimeError("no locator\nMore.")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert select_backend("auto", gpu_priority=-1) == ("numpy", "Numba cannot be used (no locator)")


def test_numpy_is_selected_if_numba_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("numba").config, "DISABLE_JIT", 1)
    monkeypatch.delitem(sys.modules, "cupynet.backend.cpu.kernels.jit", raising=False)
    assert select_backend("auto", gpu_priority=-1)[0] == "numpy"
    with refused("backend", "numba"):
        select_backend("numba")
