"""Means of vectors on devices: they equal the mean of the host, on made-up devices of a CPU.

The means of processes over NCCL run between threads that act as ranks, on the stand-in of CuPy.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.devices import (
    DeviceMeans,
    RankMeans,
    check_reduce,
    means_of_ranks,
)
from cupynet.parallel.communicators.threads import ThreadCommunicator, ThreadGroup
from tests.support.backends import on_devices
from tests.support.refusals import refused
from tests.support.training import on_threads


class Recorded:
    """Sums between threads in place of NCCL, with a log of the calls."""

    def __init__(self, place: int, leaders: int, log: list[str], barrier: threading.Barrier, slots: list[Any]) -> None:
        self.place, self.leaders, self.log, self.barrier, self.slots = place, leaders, log, barrier, slots

    def sum(self, arrays: Any) -> None:
        for array in arrays:
            self.slots[self.place] = array.copy()
            self.barrier.wait(10)
            array[...] = sum(self.slots[: self.leaders])
            self.barrier.wait(10)
        self.log.append(f"sum {self.place} of {self.leaders}")

    def close(self) -> None:
        self.log.append(f"close {self.place}")


class HostDevice(NumpyBackend):
    """A device whose arrays are on the host: events are None, as all work is done when a call returns."""

    def record_event(self) -> None:
        pass

    def wait_event(self, *events: None) -> None:
        pass

    def fetch(self, out: Any, array: Any, source: Any) -> None:
        out[...] = array


def backend_on(device: int) -> Any:
    return HostDevice("double", device)


def means(
    devices: list[int], vectors: list[list[np.ndarray]], weights: list[float], rounds: int = 1, nccl: Any = None
) -> Any:
    """What each worker has after so many means of copies of its vectors."""
    group, failures = ThreadGroup.of(len(devices), 10.0), []
    results = [[vector.copy() for vector in mine] for mine in vectors]

    def work(rank: int) -> None:
        try:
            communicator = ThreadCommunicator(group, rank)
            own = DeviceMeans(communicator._exchange, rank, backend_on(devices[rank]), nccl)
            for _ in range(rounds):
                own.mean(results[rank], weights[rank])
            own.close()
        except BaseException as error:
            failures.append(error)
            group.team.fail(rank, error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failures:
        raise failures[0]
    return results


def vectors_of(workers: int, dtype: str = "float32") -> list[list[np.ndarray]]:
    rng = np.random.default_rng(1)
    return [[rng.normal(size=n).astype(dtype) for n in (37, 0, 5)] for _ in range(workers)]


def on_host(vectors: list[list[np.ndarray]], weights: list[float]) -> list[np.ndarray]:
    backend, made = create_backend("numpy", "double"), [[v.copy() for v in mine] for mine in vectors]
    for i in range(len(made[0])):
        backend.mean_in_place([mine[i] for mine in made], [weight / sum(weights) for weight in weights])
    return made[0]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("weights", [[128.0, 0.0, 57.0]])
def test_the_mean_on_one_device_equals_the_host_bit_for_bit(dtype, weights):
    vectors = vectors_of(3, dtype)
    wanted = on_host(vectors, weights)
    for mine in means([0, 0, 0], vectors, weights):
        for found, right in zip(mine, wanted, strict=True):
            assert found.dtype == right.dtype and found.tobytes() == right.tobytes()


@pytest.mark.parametrize("over_nccl", [False, True])
@pytest.mark.parametrize("devices", [[0, 1, 0, 1, 0], [2, 0, 2, 1]])
def test_on_several_devices_all_have_the_same_mean(devices, over_nccl):
    vectors, weights = vectors_of(len(devices), "float64"), [float(3 + rank) for rank in range(len(devices))]
    log: list[str] = []
    barrier, slots = threading.Barrier(len(set(devices))), [None] * len(devices)

    def connect(hand, place, leaders, backend, opened):
        assert hand(b"who calls first" if place == 0 else b"") == b"who calls first" and leaders == len(set(devices))
        if place is not None:
            opened(Recorded(place, leaders, log, barrier, slots))

    found = means(devices, vectors, weights, nccl=connect if over_nccl else None)
    wanted = on_host(vectors, weights)
    for mine in found:
        for i, vector in enumerate(mine):
            assert vector.tobytes() == found[0][i].tobytes()
            assert np.allclose(vector, wanted[i], rtol=0, atol=1e-14)
    leaders = len(set(devices))
    wanted_log = [line for place in range(leaders) for line in (f"sum {place} of {leaders}", f"close {place}")]
    assert sorted(log) == (sorted(wanted_log) if over_nccl else [])


def test_vectors_of_weight_zero_are_not_read():
    vectors = [[np.full(4, value)] for value in (1.0, np.nan, 3.0, np.nan)]
    for devices in ([0, 0, 0, 0], [0, 1, 0, 1]):
        for (found,) in means(devices, vectors, [1.0, 0.0, 1.0, 0.0]):
            assert found.tolist() == [2.0] * 4
    for mine, (before,) in zip(means([0, 1], vectors[:2], [0.0, 0.0]), vectors, strict=False):
        assert np.array_equal(mine[0], before, equal_nan=True)  # nobody has seen anything: nothing happens


@pytest.mark.parametrize("over_nccl", [False, True])
def test_vectors_of_one_dtype_are_summed_in_one_call(over_nccl, monkeypatch):
    """The result is bit-identical to one call for each vector."""
    single, double = vectors_of(2, "float32"), vectors_of(2, "float64")
    vectors = [single[rank] + double[rank] + single[rank] for rank in range(2)]
    lengths: list[list[int]] = []
    barrier, slots = threading.Barrier(2), [None] * 2

    class Counted(Recorded):
        def sum(self, arrays: Any) -> None:
            lengths.append([array.size for array in arrays])
            super().sum(arrays)

    def connect(hand, place, leaders, backend, opened):
        opened(Counted(place, leaders, [], barrier, slots))

    fetched: list[int] = []
    monkeypatch.setattr(
        HostDevice, "fetch", lambda self, out, array, source: fetched.append(out.size) or np.copyto(out, array)
    )
    found = means([0, 1], vectors, [3.0, 1.0], nccl=connect if over_nccl else None)
    wide = [np.float64(3 / 4) * a.astype(np.float64) for a in vectors[0]]
    rest = [np.float64(1 / 4) * b.astype(np.float64) for b in vectors[1]]
    for vector, a, b in zip(found[0], wide, rest, strict=True):
        assert vector.tobytes() == (a.astype(vector.dtype) + b.astype(vector.dtype)).tobytes()
    whole = [2 * (40 + 8), 38 + 6]  # 37 and 5 values, each padded to a multiple of 16 bytes
    assert lengths == ([whole] * 2 if over_nccl else []) and fetched == ([] if over_nccl else whole * 2)


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_nccl(monkeypatch):
    """Replace NCCL between threads that act as processes, and return the log of its calls."""
    log: list[str] = []
    barrier, slots = threading.Barrier(3), [None] * 3

    def connect(hand, place, leaders, backend, opened):
        assert hand(b"x" if place == 0 else b"") == b"x"
        return Recorded(place, leaders, log, barrier, slots)

    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "connect", connect)
    return log


def as_ranks(places: list[str], reduce: str, weights: list[float]) -> Any:
    """Return each rank's mean of its number and 10; None if the mean is computed on the host."""

    def task(communicator: Any) -> Any:
        backend = backend_on(0)
        backend.__class__ = type(
            "Gpu", (type(backend),), {"name": "cupy", "place": lambda self: places[communicator.rank]}
        )
        made = means_of_ranks(communicator, backend, reduce)
        if made is None:
            return None
        vectors = [np.array([float(communicator.rank), 10.0]), np.zeros(0)]
        for _ in range(2):
            made.mean(vectors, weights[communicator.rank])
        made.close()
        return vectors[0].tolist()

    return on_threads(len(places), task)


def test_ranks_with_a_gpu_each_communicate_over_nccl(with_nccl):
    found = as_ranks(["a 1", "a 2", "b 1"], "auto", [1.0, 1.0, 2.0])
    assert found == [[1.25, 10.0]] * 3 and len(with_nccl) == 9
    assert as_ranks(["a 1", "a 2", "b 1"], "nccl", [0.0, 0.0, 0.0]) == [[0.0, 10.0], [1.0, 10.0], [2.0, 10.0]]


WEIGHTS = {"unequal": (128.0, 57.0), "the first none": (0.0, 3.0), "the last none": (2.0, 0.0), "none": (0.0, 0.0)}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("dtype", on_devices("float16", "float32", "float64", count=2))
def test_the_mean_of_ranks_over_nccl_is_that_of_the_host(dtype, weights):
    """NCCL between threads that act as ranks on their own devices. Vectors of weight 0 are not read."""
    vectors, rounds = vectors_of(2, dtype), 3

    def task(communicator: Any) -> list[np.ndarray]:
        rank = communicator.rank
        backend = create_backend("cupy", "double", rank)
        backend.activate()
        made = means_of_ranks(communicator, backend, "nccl")
        assert isinstance(made, RankMeans)
        spoilt = [v * np.nan for v in vectors[rank]] if any(weights) and not weights[rank] else vectors[rank]
        own = [backend.asarray(v) for v in spoilt]
        for _ in range(rounds):
            made.mean(own, weights[rank])
        made.close()
        return [backend.to_host(v) for v in own]

    results = on_threads(2, task)
    wanted = [on_host(vectors, list(weights))] * 2 if any(weights) else vectors
    tolerance = rounds * np.finfo(dtype).eps if all(weights) else 0.0
    for mine, right in zip(results, wanted, strict=True):
        for found, vector in zip(mine, right, strict=True):
            assert found.dtype == vector.dtype
            np.testing.assert_allclose(found, vector, rtol=tolerance, atol=tolerance)
    if any(weights):
        assert [v.tobytes() for v in results[0]] == [v.tobytes() for v in results[1]]


def test_ranks_that_share_a_gpu_average_on_the_host(with_nccl):
    assert as_ranks(["a 1", "a 1", "b 1"], "auto", [1.0] * 3) == [None] * 3
    with refused("reduce", "nccl"):
        as_ranks(["a 1", "a 1", "b 1"], "nccl", [1.0] * 3)
    assert as_ranks(["a 1", "a 2", "b 1"], "host", [1.0] * 3) == [None] * 3


def test_bad_reductions_are_refused(monkeypatch):
    for module in ("cupy", "cupy.cuda"):  # whatever this machine has
        monkeypatch.setitem(sys.modules, module, None)
    wrong = ("device", "cupy", True), ("nccl", "cupy", False), ("nccl", "numba", False), ("ring", "cupy", False)
    for reduce, backend, processes in wrong:
        with refused("reduce", reduce):
            check_reduce(reduce, backend, processes=processes)
    assert check_reduce("auto", "numba", processes=True) == "auto"


def test_one_rank_without_nccl_is_named(with_nccl, monkeypatch):
    monkeypatch.setattr(nccl, "missing", lambda: "NCCL is not installed")
    with refused("reduce", "nccl"):
        as_ranks(["a 1", "a 2", "b 1"], "nccl", [1.0] * 3)
