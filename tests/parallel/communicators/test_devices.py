"""Means of vectors on GPUs equal those on the host, between threads and between processes.

On CuPy's stand-in, threads act as processes, and NCCL runs between them.
"""

import sys
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda.backend import CupyBackend
from cupynet.parallel import Communicator
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.devices import RankMeans, check_reduce, means_of_ranks
from tests.support.backends import on_devices
from tests.support.refusals import refused
from tests.support.training import on_threads

pytestmark = pytest.mark.smoke
Vectors = list[np.ndarray[Any, Any]]
standin = pytest.mark.standin


def gpu(device: int) -> CupyBackend:
    backend = create_backend("cupy", "double", device)
    assert isinstance(backend, CupyBackend)
    backend.activate()
    return backend


def vectors_of(workers: int, dtype: str) -> list[Vectors]:
    rng = np.random.default_rng(1)
    return [[rng.normal(size=n).astype(dtype) for n in (37, 0, 5)] for _ in range(workers)]


def mean_on_host(vectors: list[Vectors], weights: list[float]) -> Vectors:
    backend, found = create_backend("numpy", "double"), [vector.copy() for vector in vectors[0]]
    for i, mean in enumerate(found):
        others = [mine[i].copy() for mine in vectors[1:]]
        backend.mean_in_place([mean, *others], [weight / sum(weights) for weight in weights])
    return found


def means_of_threads(devices: list[int], vectors: list[Vectors], weights: list[float], reduce: str) -> list[Vectors]:
    """Return each worker's result of averaging copies of its vectors."""

    def task(c: Communicator) -> Vectors:
        backend = gpu(devices[c.rank])
        c.attach(backend, reduce)
        own = [backend.asarray(vector) for vector in vectors[c.rank]]
        c.allreduce_mean(own, weights[c.rank])
        found = [backend.to_host(array) for array in own]
        c.close()
        return found

    return on_threads(len(devices), task)


@pytest.mark.parametrize("dtype", on_devices("float16", "float64"))
def test_the_mean_on_one_device_equals_the_host_bit_for_bit(dtype: str) -> None:
    vectors, weights = vectors_of(3, dtype), [128.0, 0.0, 57.0]
    expected = mean_on_host(vectors, weights)
    for found in means_of_threads([0, 0, 0], vectors, weights, "auto"):
        for vector, right in zip(found, expected, strict=True):
            assert (vector.dtype, vector.tobytes()) == (right.dtype, right.tobytes())


@standin
@pytest.mark.parametrize("reduce", ["device", "nccl"])
@pytest.mark.parametrize("devices", [[0, 1, 0, 1, 0], [1, 0, 1]])
def test_on_several_devices_all_have_the_same_mean(devices: list[int], reduce: str) -> None:
    vectors, weights = vectors_of(len(devices), "float64"), [3.0, 4.0, 5.0, 6.0, 7.0][: len(devices)]
    results = means_of_threads(devices, vectors, weights, reduce)
    for i, expected in enumerate(mean_on_host(vectors, weights)):
        np.testing.assert_allclose(results[0][i], expected, rtol=0, atol=1e-14)
        assert {found[i].tobytes() for found in results} == {results[0][i].tobytes()}


@pytest.mark.parametrize("weights", [(128.0, 57.0), (0.0, 3.0), (2.0, 0.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("dtype", on_devices("float16", "float64", count=2))
def test_the_mean_of_ranks_over_nccl_is_that_of_the_host(dtype: str, weights: tuple[float, float]) -> None:
    """Vectors of weight 0 are not read. If all weights are 0, nothing happens."""
    vectors = vectors_of(2, dtype)

    def task(c: Communicator) -> Vectors:
        backend = gpu(c.rank)
        means = means_of_ranks(c, backend, "auto")
        assert isinstance(means, RankMeans)
        spoilt = any(weights) and not weights[c.rank]
        own = [backend.asarray(vector * np.nan if spoilt else vector) for vector in vectors[c.rank]]
        for _ in range(3):
            means.mean(own, weights[c.rank])
        means.close()
        return [backend.to_host(array) for array in own]

    expected = [mean_on_host(vectors, list(weights))] * 2 if any(weights) else vectors
    for found, right in zip(on_threads(2, task), expected, strict=True):
        for vector, exact in zip(found, right, strict=True):
            assert vector.dtype == exact.dtype
            tolerance = 3 * np.finfo(exact.dtype).eps if all(weights) else 0.0
            np.testing.assert_allclose(vector, exact, rtol=tolerance, atol=tolerance)


def created_means(devices: list[int], reduce: str) -> Any:
    def task(c: Communicator) -> Any:
        means = means_of_ranks(c, gpu(devices[c.rank]), reduce)
        if means is not None:
            means.close()
        return means

    return on_threads(len(devices), task)


@standin
@pytest.mark.parametrize("devices", [[0, 0, 1], [0, 1]], ids=["share a GPU", "no NCCL"])
def test_ranks_that_cannot_use_nccl_average_on_the_host(monkeypatch: pytest.MonkeyPatch, devices: list[int]) -> None:
    if devices == [0, 1]:
        monkeypatch.setattr(nccl, "unavailable_reason", lambda: "NCCL is not installed")
    for reduce in ("auto", "host"):
        assert created_means(devices, reduce) == [None] * len(devices)
    with refused("reduce", "nccl"):
        created_means(devices, "nccl")


@pytest.mark.parametrize(
    ("reduce", "backend", "processes"),
    [("device", "cupy", True), ("nccl", "cupy", False), ("nccl", "numba", False), ("ring", "cupy", False)],
)
def test_impossible_reductions_are_refused(
    monkeypatch: pytest.MonkeyPatch, reduce: str, backend: str, processes: bool
) -> None:
    for module in ("cupy", "cupy.cuda"):  # even if this machine has CuPy
        monkeypatch.setitem(sys.modules, module, None)
    with refused("reduce", reduce):
        check_reduce(reduce, backend, processes=processes)
