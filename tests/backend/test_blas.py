"""BLAS: each worker's threads, and the description of the library."""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from threadpoolctl import threadpool_limits

from cupynet.backend import blas
from cupynet.backend.environment import environment

MODULE = import_module("cupynet.backend.environment")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine of eight cores, without environment variables for BLAS."""
    for name in blas.THREADS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(blas, "available_cores", lambda: 8)
    libraries(monkeypatch, library())


def library(**info: Any) -> dict[str, Any]:
    known = {"user_api": "blas", "internal_api": "openblas", "version": "0.3.31.188.0", "architecture": "SkylakeX"}
    return {**known, "filepath": "/lib/numpy.libs/libscipy_openblas64_.so", "num_threads": 8, **info}


def libraries(monkeypatch: pytest.MonkeyPatch, *infos: dict[str, Any]) -> None:
    monkeypatch.setattr(MODULE, "thread_pools", lambda: SimpleNamespace(info=lambda: list(infos)))


def test_numpy_workers_share_the_cores() -> None:
    assert [blas.threads_per_worker("numpy", workers) for workers in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("name", blas.THREADS_VARIABLES)
def test_numba_workers_use_one_blas_thread_unless_more_are_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [blas.threads_per_worker("numba", workers) for workers in (1, 2, 8)] == [1, 1, 1]
    monkeypatch.setenv(name, "2")
    libraries(monkeypatch, library(num_threads=2))
    assert [blas.threads_per_worker("numba", workers) for workers in (1, 4, 8)] == [2, 2, 1]


def test_workers_never_use_more_blas_threads_than_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, library(num_threads=3), library(num_threads=5), library(user_api="openmp", num_threads=1))
    assert [blas.threads_per_worker("numpy", workers) for workers in (1, 2, 4)] == [3, 3, 2]
    libraries(monkeypatch)
    assert blas.threads_per_worker("numpy", 1) == 1


def test_the_last_of_several_thread_limits_restores_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = blas.threads_now()
    first, second = blas.Limit(1), blas.Limit(1)
    with first:
        with second:
            assert blas.threads_now() == 1
        assert blas.threads_now() == 1
    assert blas.threads_now() == before


def test_any_thread_may_limit_the_threads_while_and_after_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads live on, as a notebook's main thread and the thread of a fit do."""
    monkeypatch.undo()
    before, inner = blas.threads_now(), blas.Limit(1)
    if before == 1:
        pytest.skip("BLAS has one thread")
    with ThreadPoolExecutor(1) as other:
        with blas.Limit(before):
            other.submit(inner.__enter__).result()
            assert blas.threads_now() == 1
            other.submit(inner.__exit__).result()
        assert blas.threads_now() == before
        later = other.submit(threadpool_limits, 1).result()
        assert blas.threads_now() == 1
        other.submit(later.restore_original_limits).result()
        with blas.Limit(1):
            assert blas.threads_now() == 1


def test_only_the_blas_library_of_numpy_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    scipy = library(version="0.3.30", filepath="/lib/scipy.libs/libscipy_openblas.so", num_threads=2)
    libraries(monkeypatch, scipy, library())
    assert [each["version"] for each in environment()["blas"]] == ["0.3.31.188.0"]
    assert "0.3.31" in blas.description() and blas.threads_now() == 8
    libraries(monkeypatch, scipy)
    assert "0.3.30" in blas.description()
