"""Means of vectors on GPUs: over NCCL between ranks, and sums over NCCL on a single GPU.

On CuPy's stand-in, threads act as processes, and NCCL runs between them. test_communicators.py covers means of threads.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.policy import stored_dtype
from cupynet.parallel import Communicator
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.devices import RankMeans, check_reduce, means_of_ranks
from cupynet.parallel.communicators.nccl import NcclSum
from tests.standin import installed, machine
from tests.support.backends import needs_bfloat16, on_devices
from tests.support.mpi import ROOT
from tests.support.refusals import refused
from tests.support.training import on_threads

Vectors = list[np.ndarray[Any, Any]]
SHARES_A_GPU = 23003  # NCCL 2.30.3, the first version in which ranks can share a GPU


def gpu(device: int = 0, dtype: str = "float") -> CupyBackend:
    backend = create_backend("cupy", dtype, device)
    assert isinstance(backend, CupyBackend)
    backend.activate()
    return backend


# means of ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("weights", [(128.0, 57.0), (0.0, 3.0), (2.0, 0.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("dtype", on_devices("float16", "float64", count=2))
def test_ranks_on_different_gpus_average_over_nccl_with_weights(dtype: str, weights: tuple[float, float]) -> None:
    """Vectors of weight 0 are not read. If all weights are 0, nothing happens."""
    rng = np.random.default_rng(1)
    vectors = [[rng.normal(size=size).astype(dtype) for size in (37, 0, 5)] for _ in range(2)]

    def task(c: Communicator) -> Vectors:
        backend = gpu(c.rank, "double")
        means = means_of_ranks(c, backend, "auto")
        assert isinstance(means, RankMeans)
        spoilt = any(weights) and not weights[c.rank]
        own = [backend.asarray(vector * np.nan if spoilt else vector) for vector in vectors[c.rank]]
        for _ in range(3):
            means.mean(own, weights[c.rank])
        means.close()
        return [backend.to_host(array) for array in own]

    tolerance = 3 * np.finfo(dtype).eps if all(weights) else 0.0
    for rank, found in enumerate(on_threads(2, task)):
        for i, vector in enumerate(found):
            both, shares = [mine[i] for mine in vectors], np.array(weights) / (sum(weights) or 1)
            expected = np.average(both, axis=0, weights=shares) if any(weights) else both[rank]
            assert vector.dtype == dtype
            np.testing.assert_allclose(vector, expected, rtol=tolerance, atol=tolerance)


def created_means(devices: list[int], reduce: str) -> Any:
    def task(c: Communicator) -> Any:
        means = means_of_ranks(c, gpu(devices[c.rank], "double"), reduce)
        if means is not None:
            means.close()
        return means

    return on_threads(len(devices), task)


@pytest.mark.standin
@pytest.mark.smoke
@pytest.mark.parametrize("devices", [[0, 0, 1], [0, 1]], ids=["share a GPU", "no NCCL"])
def test_ranks_that_cannot_use_nccl_average_on_the_host_and_refuse_reduce_nccl(
    monkeypatch: pytest.MonkeyPatch, devices: list[int]
) -> None:
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
def test_reduce_is_refused_if_unknown_or_not_available_on_the_backend_or_between_processes(
    monkeypatch: pytest.MonkeyPatch, reduce: str, backend: str, processes: bool
) -> None:
    for module in ("cupy", "cupy.cuda"):  # even if this machine has CuPy
        monkeypatch.setitem(sys.modules, module, None)
    with refused("reduce", reduce):
        check_reduce(reduce, backend, processes=processes)


def test_reduce_nccl_is_refused_for_pipeline_stages_in_threads_and_auto_is_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "unavailable_reason", lambda: None)
    with refused("reduce", "nccl"):
        check_reduce("nccl", "cupy", processes=False, stages=2)
    assert check_reduce("auto", "cupy", processes=False, stages=2) == "device"
    assert check_reduce("nccl", "cupy", processes=True, stages=2) == "nccl"


# sums on one GPU ------------------------------------------------------------------------------------------------------


def integers(dtype: str, seed: int) -> Vectors:
    """Return numbers with exact sums of two."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-512, 512, size).astype(stored_dtype(dtype)) for size in (1, 1000, 431_080)]


def connected(
    backend: CupyBackend, hand: nccl.BroadcastBytes = lambda own: own, rank: int = 0, size: int = 1
) -> NcclSum:
    made = nccl.connect(hand, rank, size, backend, lambda opened: None)
    assert made is not None
    return made


@pytest.fixture
def backend(devices: str) -> Iterator[CupyBackend]:
    if why := nccl.unavailable_reason():
        pytest.skip(why)
    made = gpu()
    yield made
    made.deactivate()


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=needs_bfloat16), "float32", "float64"])
def test_a_single_rank_sums_only_floats_over_nccl_and_may_close_and_connect_again(
    backend: CupyBackend, dtype: str
) -> None:
    from cupy.cuda.nccl import NcclError

    for turn in range(2):  # it can connect again
        own, numbers = connected(backend), integers(dtype, turn)
        arrays = [backend.asarray(each) for each in numbers]
        own.sum(arrays)
        with pytest.raises(RuntimeError):
            own.sum([backend.asarray(np.zeros(3, np.int32))])
        own.close()
        assert [backend.to_host(each).tobytes() for each in arrays] == [each.tobytes() for each in numbers]
        with pytest.raises(NcclError):
            own.sum(arrays)


def test_two_ranks_that_share_a_gpu_are_summed_over_nccl(backend: CupyBackend) -> None:
    """It runs in a separate process because NCCL reads its variables only once."""
    from cupy.cuda.nccl import get_version

    if get_version() < SHARES_A_GPU:
        pytest.skip(f"NCCL {get_version()} lets no two ranks share a GPU: that takes {SHARES_A_GPU}")
    standin = machine.switched_on() is not None
    code = f"from tests.parallel.communicators.test_devices import sum_of_two; sum_of_two(standin={standin})"
    path = os.pathsep.join([str(ROOT), *sys.path])  # sys.path: packages may be on an inherited PYTHONPATH
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def sum_of_two(*, standin: bool) -> None:
    def task(c: Communicator) -> list[bytes]:
        backend = gpu()
        arrays = [backend.asarray(each) for each in integers("float32", c.rank)]

        def hand(own: bytes) -> bytes:
            texts = c.all_gather(np.frombuffer(own, np.uint8))
            return next(each.tobytes() for each in texts if len(each))

        own = connected(backend, hand, c.rank, 2)
        own.sum(arrays)
        backend.synchronize()
        c.barrier()  # both sums are complete, so memory may be allocated
        found = [backend.to_host(array).tobytes() for array in arrays]
        own.close()
        return found

    with installed(devices=1) if standin else nullcontext():
        both = zip(integers("float32", 0), integers("float32", 1), strict=True)
        expected = [(one + other).tobytes() for one, other in both]
        assert on_threads(2, task) == [expected, expected]
