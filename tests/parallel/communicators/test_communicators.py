"""One suite for every communicator: serial, threads, threads with arrays on GPUs, and ranks of MPI.

Under mpiexec every rank runs this file, and its part of each task; `CUPYNET_TEST_RANKS` is set there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.parallel import Communicator, MpiLauncher, ThreadLauncher
from tests.support.backends import works
from tests.support.mpi import needs_mpi, under_mpiexec

T = TypeVar("T")
Array = np.ndarray[Any, Any]

RANKS = int(os.environ.get("CUPYNET_TEST_RANKS", "0"))  # under mpiexec


class OnDevices:
    """A communicator that copies floating-point arrays to the worker's device for each call, and back."""

    def __init__(self, own: Communicator, backend: Backend) -> None:
        self.own, self.backend = own, backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def split(self, color: int, key: int) -> OnDevices:
        return OnDevices(self.own.split(color, key), self.backend)

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        there = [self._there(array) for array in arrays]
        self.own.allreduce_mean(there, weight)
        self._back(arrays, there)

    def broadcast(self, array: Array, root: int = 0) -> None:
        there = self._there(array)
        self.own.broadcast(there, root)
        self._back([array], [there])

    def send(self, array: Array, to: int) -> None:
        self.own.send(self._there(array), to)

    def recv(self, array: Array, source: int) -> None:
        there = self._there(array)
        self.own.recv(there, source)
        self._back([array], [there])

    def _there(self, array: Array) -> Any:
        return self.backend.asarray(array) if array.dtype.kind == "f" else array

    def _back(self, arrays: list[Array], there: list[Any]) -> None:
        for array, found in zip(arrays, there, strict=True):
            array[...] = self.backend.to_host(found)


class DeviceLauncher:
    """Threads on devices, with averages over NCCL."""

    first = 0

    def __init__(self, threads: ThreadLauncher, devices: int) -> None:
        self._threads, self.workers, self.devices = threads, threads.workers, devices

    def run(self, task: Callable[[Any], T]) -> T | None:
        def work(communicator: Communicator) -> T:
            backend = create_backend("cupy", device=communicator.rank % self.devices)
            backend.activate()
            communicator.close()  # of the task before
            communicator.attach(backend, "nccl")
            result = task(OnDevices(communicator, backend))
            backend.synchronize()
            return result

        return self._threads.run(work)


Team = MpiLauncher | ThreadLauncher | DeviceLauncher


def on_workers(team: Team, task: Callable[[Any], T]) -> list[T]:
    """Run `task(communicator)` on all workers and return their results in rank order."""
    results: dict[int, T] = {}

    def keep(communicator: Communicator) -> None:
        results[communicator.rank] = task(communicator)

    team.run(keep)
    if RANKS:
        from mpi4py import MPI

        return list(MPI.COMM_WORLD.allgather(results[team.first]))
    return [results[rank] for rank in range(team.workers)]


def on(kind: str, workers: int, devices: int, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param((workers, devices), id=f"{kind}{workers}on{devices}", marks=marks)


TEAMS = [
    *[pytest.param((workers, 0), id=str(workers)) for workers in (1, 2, 3)],
    *[on("standin", *team, pytest.mark.standin) for team in ((1, 1), (2, 2), (3, 2))],
    *[on("gpu", *team, pytest.mark.gpu) for team in ((1, 1), (2, 1)) if works("cupy")],
    *[on("gpu", *team, pytest.mark.gpu, pytest.mark.multi_gpu) for team in ((2, 2), (4, 2)) if works("cupy")],
]


@pytest.fixture(params=[None] if RANKS else TEAMS)
def team(request: pytest.FixtureRequest, made_up_devices: None) -> Iterator[Team]:
    """One worker is the serial communicator, several are threads, with arrays on devices too, or ranks of mpiexec."""
    if RANKS:
        yield MpiLauncher(timeout_s=20)
        return
    workers, devices = request.param
    threads = ThreadLauncher(workers, timeout_s=20)
    with threads:
        yield DeviceLauncher(threads, devices) if devices else threads


@pytest.fixture
def several(team: Team) -> Team:
    if team.workers == 1:
        pytest.skip("a single worker cannot send")
    return team


@pytest.mark.skipif(bool(RANKS), reason="it starts them")
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(3, marks=needs_mpi),
        *(pytest.param(ranks, marks=[*needs_mpi, pytest.mark.slow]) for ranks in (2, 4)),
    ],
)
def test_the_suite_under_mpiexec(ranks: int) -> None:
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = under_mpiexec(ranks, *command, CUPYNET_TEST_RANKS=str(ranks), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    of_all = [test for test in tests if {"team", "several"} & signature(test).parameters.keys()]
    assert re.findall(r"(\d+) passed", done.stdout) == [str(len(of_all))] * ranks, done.stdout


def test_all_gather_is_in_rank_order(team: Team) -> None:
    def task(c: Communicator) -> list[list[Array]]:
        found = []
        for turn in range(5):
            time.sleep(0.002 * ((c.rank + turn) % 3))
            found.append(c.all_gather(np.array([turn, c.rank], np.int64)))
        return found

    expected = [[[turn, rank] for rank in range(team.workers)] for turn in range(5)]
    for gathered in on_workers(team, task):
        assert gathered[0][0].dtype == np.int64
        np.testing.assert_array_equal(gathered, expected)


def test_gathered_arrays_are_copies(team: Team) -> None:
    def task(c: Communicator) -> tuple[Array, Array]:
        own = np.full(3, float(c.rank))
        gathered = c.all_gather(own)
        c.barrier()
        own[:] = 7.0
        c.barrier()
        kept = np.stack(gathered)
        for each in gathered:
            each[:] = -1.0
        c.barrier()
        return kept, np.stack(c.all_gather(own))

    for kept, again in on_workers(team, task):
        np.testing.assert_array_equal(kept, [[rank] * 3 for rank in range(team.workers)])
        np.testing.assert_array_equal(again, np.full((team.workers, 3), 7.0))


def test_broadcast_sends_the_roots_array_to_all(team: Team) -> None:
    root = team.workers - 1

    def task(c: Communicator) -> list[float]:
        array = np.full(7, float(c.rank))
        c.broadcast(array, root)
        return list(array)

    assert on_workers(team, task) == [[float(root)] * 7] * team.workers


def test_messages_arrive_in_order_and_may_cross(several: Team) -> None:
    def task(c: Communicator) -> list[float]:
        message, into, received = np.zeros(3, np.float32), np.zeros(3, np.float32), []
        for turn in range(4):
            message[...] = 10 * c.rank + turn
            c.send(message, (c.rank + 1) % c.size)  # all send before anybody receives
        for _ in range(4):
            c.recv(into, (c.rank - 1) % c.size)
            received.append(float(into[2]))
        return received

    for rank, received in enumerate(on_workers(several, task)):
        source = (rank - 1) % several.workers
        assert received == [10 * source + turn for turn in range(4)]


def test_workers_of_one_colour_form_a_group_in_the_order_of_their_keys(team: Team) -> None:
    def task(c: Communicator) -> tuple[int, float, int, list[float]]:
        group = c.split(color=c.rank % 2, key=-c.rank)
        mean, first = np.array([float(c.rank)]), np.array([c.rank])
        group.allreduce_mean([mean], 1)
        group.broadcast(first, 0)
        c.barrier()
        return group.rank, mean[0], int(first[0]), group.split(0, 0).gather_numbers(c.rank)[:, 0].tolist()

    for rank, found in enumerate(on_workers(team, task)):
        members = [r for r in range(team.workers) if r % 2 == rank % 2][::-1]
        assert found == (members.index(rank), sum(members) / len(members), members[0], members)


def test_traffic_is_counted(team: Team) -> None:
    def task(c: Communicator) -> list[int]:
        group = c.split(0, c.rank)

        def message() -> None:
            if c.size > 1:
                c.send(np.zeros(7), (c.rank + 1) % c.size)
                c.recv(np.zeros(7), (c.rank - 1) % c.size)

        calls: list[Callable[[], Any]] = [
            lambda: group.allreduce_mean([np.zeros(1200, np.float32)], 1),
            lambda: c.all_gather(np.zeros(c.rank, np.int32)),
            lambda: c.broadcast(np.zeros(5), c.size - 1),
            message,
        ]
        counts = [c.traffic.bytes_sent]
        for call in calls:
            call()
            counts.append(c.traffic.bytes_sent)
        return list(np.diff(counts))

    others = team.workers - 1
    for rank, (reduced, *counts) in enumerate(on_workers(team, task)):
        assert counts == [4 * rank * others, 40 * others * (rank == others), 56 * (others > 0)]
        assert abs(reduced - 2 * others * 4800 // team.workers) <= 32 * others  # weights are sent if they are not known


def test_mean_is_weighted_and_the_same_bits_everywhere(team: Team) -> None:
    rng = np.random.default_rng(5)
    vectors = [[rng.normal(size=length) for length in (1, 1000)] for _ in range(team.workers)]
    weights = rng.integers(1, 100, team.workers)

    def task(c: Communicator) -> list[Array]:
        arrays = [vector.copy() for vector in vectors[c.rank]]
        c.allreduce_mean(arrays, int(weights[c.rank]))
        return arrays

    results = on_workers(team, task)
    for i in range(2):
        expected = np.average([mine[i] for mine in vectors], axis=0, weights=weights)
        np.testing.assert_allclose(results[0][i], expected, rtol=1e-13, atol=1e-15)
        assert {arrays[i].tobytes() for arrays in results} == {results[0][i].tobytes()}


def test_a_worker_of_weight_zero_adds_nothing(team: Team) -> None:
    idle = 1 if team.workers > 1 else -1

    def task(c: Communicator) -> list[float]:
        array = np.full(10, np.nan if c.rank == idle else 2.0, np.float32)
        c.allreduce_mean([array], 0 if c.rank == idle else 3)
        return list(array)

    assert on_workers(team, task) == [[2.0] * 10] * team.workers


def test_all_weights_zero_changes_nothing(team: Team) -> None:
    def task(c: Communicator) -> list[float]:
        array = np.full(4, float(c.rank))
        c.allreduce_mean([array], 0)
        return list(array)

    assert on_workers(team, task) == [[float(rank)] * 4 for rank in range(team.workers)]


def test_sums_do_not_depend_on_timing(team: Team) -> None:
    rng = np.random.default_rng(8)
    vectors = (rng.normal(size=(4, 999)) * 10.0 ** rng.integers(-6, 6, (4, 999))).astype(np.float32)

    def mean(c: Communicator, slowest: int = 0) -> bytes:
        time.sleep(0.01 if c.rank == slowest else 0)
        array = vectors[c.rank].copy()
        c.allreduce_mean([array], 1 + c.rank)
        return bytes(array)

    found = {bits for rank in range(3) for bits in on_workers(team, partial(mean, slowest=rank))}
    assert len(found) == 1
    if getattr(team, "devices", 1) == 1:  # NCCL adds the sums of devices in an order of its own
        with ThreadLauncher(team.workers, timeout_s=20) as threads:
            assert found == {threads.run(mean)}


def test_a_large_vector_arrives_whole(several: Team) -> None:
    """It is larger than the messages that MPI sends eagerly."""

    def task(c: Communicator) -> tuple[int, int, float, float]:
        message, into = np.arange(1_000_000) + c.rank, np.empty(1_000_000, np.int64)
        c.send(message, (c.rank + 1) % c.size)
        message[:] = -1  # the receiver does not see it
        time.sleep(0.01)
        c.recv(into, (c.rank - 1) % c.size)
        mean = np.full(500_001, float(c.rank), np.float32)
        c.allreduce_mean([mean, mean[:7].copy()], 1)
        return int(into[0]), int(into[-1]), float(mean.min()), float(mean.max())

    middle = (several.workers - 1) / 2
    for rank, found in enumerate(on_workers(several, task)):
        source = (rank - 1) % several.workers
        assert found == (source, 999_999 + source, middle, middle)


class DeviceArray:
    """An array that the host cannot touch by itself, as CuPy's are."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __setitem__(self, where: Any, other: Any) -> None:
        assert isinstance(other, DeviceArray), "the device takes arrays of its own"
        self.values[where] = other.values


class Device(NumpyBackend):
    """A backend of such arrays: every way between the two is a copy."""

    def to_host(self, array: Any) -> Any:
        return array.values.copy() if isinstance(array, DeviceArray) else array

    def asarray(self, array: Any, dtype: Any = None) -> Any:
        return array if isinstance(array, DeviceArray) else DeviceArray(array)


def test_arrays_of_a_device_travel_through_the_host(team: Team) -> None:
    last = team.workers - 1

    def task(c: Any) -> tuple[list[float], list[float]]:
        c = getattr(c, "own", c)
        c.attach(Device("double"))
        mean, sent = DeviceArray([float(c.rank)] * 4), DeviceArray([float(c.rank)] * 4)
        c.allreduce_mean([mean], 1)
        c.broadcast(sent, last)
        return mean.values.tolist(), sent.values.tolist()

    assert on_workers(team, task) == [([last / 2] * 4, [float(last)] * 4)] * team.workers
