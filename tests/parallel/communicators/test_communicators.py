"""One suite for every communicator: serial, threads, threads with arrays on GPUs, and MPI ranks.

Under mpiexec, where `CUPYNET_TEST_RANKS` is set, every rank runs this file and its own part of each task.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.parallel import Communicator, MpiLauncher, ThreadLauncher
from cupynet.parallel.launchers.base import Launcher
from tests.support.backends import works
from tests.support.mpi import needs_mpi, under_mpiexec

T = TypeVar("T")

RANKS = int(os.environ.get("CUPYNET_TEST_RANKS", "0"))  # 0 unless under mpiexec


class Team:
    """Workers with arrays on the host or on `devices` GPUs. `reduce`: where means are computed."""

    def __init__(self, launcher: Launcher, devices: int, reduce: str) -> None:
        self.launcher, self.workers, self.devices, self.reduce = launcher, launcher.workers, devices, reduce

    def run(self, task: Callable[[Communicator], T]) -> list[T]:
        results: dict[int, T] = {}

        def work(c: Communicator) -> None:
            c.close()  # the previous task's NCCL communicator
            if self.devices:
                backend = create_backend("cupy", device=c.rank % self.devices)
                backend.activate()
                c.attach(backend, self.reduce)
            results[c.rank] = task(c)
            c._backend.synchronize()

        self.launcher.run(work)
        if RANKS:
            from mpi4py import MPI

            return list(MPI.COMM_WORLD.allgather(results[self.launcher.first]))
        return [results[rank] for rank in range(self.workers)]


def there(c: Communicator, values: Any) -> Any:
    return c._backend.asarray(np.array(values))


def here(c: Communicator, array: Any) -> Any:
    return np.array(c._backend.to_host(array))


def on(kind: str, workers: int, devices: int, reduce: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param((workers, devices, reduce), id=f"{kind} {workers} {devices} {reduce}", marks=marks)


UNDER_MPIEXEC = [on("ranks", RANKS, 0, "host"), on("standin", RANKS, 1, "host", pytest.mark.standin)]
TEAMS = [
    *[on("threads", workers, 0, "host") for workers in (1, 2, 3)],
    *[on("standin", workers, workers, "host", pytest.mark.standin, pytest.mark.smoke) for workers in (1, 2)],
    *[on("standin", *team, "nccl", pytest.mark.standin) for team in ((1, 1), (2, 2), (3, 2))],
    *[on("gpu", *team, "nccl", pytest.mark.gpu) for team in ((1, 1), (2, 1)) if works("cupy")],
    *[on("gpu", *team, "nccl", pytest.mark.gpu, pytest.mark.multi_gpu) for team in ((2, 2), (4, 2)) if works("cupy")],
]


@pytest.fixture(params=UNDER_MPIEXEC if RANKS else TEAMS)
def team(request: pytest.FixtureRequest, made_up_devices: None) -> Iterator[Team]:
    """Yield one worker with the serial communicator, or several, as threads or MPI ranks."""
    workers, *where = request.param
    if RANKS:
        yield Team(MpiLauncher(timeout_s=20), *where)
        return
    with ThreadLauncher(workers, timeout_s=20) as launcher:
        yield Team(launcher, *where)


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
    of_teams = [test for test in tests if {"team", "several"} & signature(test).parameters.keys()]
    assert re.findall(r"(\d+) passed", done.stdout) == [str(2 * (len(of_teams) + 1))] * ranks, (
        done.stdout
    )  # one test is parametrized with two cases


def test_all_gather_is_in_rank_order(team: Team) -> None:
    def task(c: Communicator) -> list[Any]:
        found = []
        for turn in range(5):
            time.sleep(0.002 * ((c.rank + turn) % 3))
            found.append(c.all_gather(np.array([turn, c.rank], np.int64)))
        return found

    for gathered in team.run(task):
        assert gathered[0][0].dtype == np.int64
        np.testing.assert_array_equal(gathered, [[[turn, rank] for rank in range(team.workers)] for turn in range(5)])


def test_gathered_arrays_are_copies(team: Team) -> None:
    def task(c: Communicator) -> tuple[Any, Any]:
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

    for kept, again in team.run(task):
        np.testing.assert_array_equal(kept, [[rank] * 3 for rank in range(team.workers)])
        np.testing.assert_array_equal(again, np.full((team.workers, 3), 7.0))


def test_broadcast_sends_the_roots_array_to_all(team: Team) -> None:
    root = team.workers - 1

    def task(c: Communicator) -> list[float]:
        array, text = there(c, [float(c.rank)] * 7), np.array([c.rank])
        c.broadcast(array, root)
        c.broadcast(text, root)  # every rank has `text` on the host
        return [*here(c, array), *text]

    assert team.run(task) == [[float(root)] * 8] * team.workers


def test_messages_arrive_in_order_and_may_cross(several: Team) -> None:
    def task(c: Communicator) -> list[float]:
        received = []
        for turn in range(4):
            c.send(there(c, [10.0 * c.rank + turn] * 3), (c.rank + 1) % c.size)  # all ranks send before any receives
        for _ in range(4):
            into = there(c, [np.nan] * 3)
            c.recv(into, (c.rank - 1) % c.size)
            received.append(float(here(c, into)[2]))
        return received

    for rank, received in enumerate(several.run(task)):
        source = (rank - 1) % several.workers
        assert received == [10 * source + turn for turn in range(4)]


def test_workers_of_one_colour_form_a_group_in_the_order_of_their_keys(team: Team) -> None:
    def task(c: Communicator) -> tuple[int, float, float, list[float]]:
        group = c.split(color=c.rank % 2, key=-c.rank)
        mean, first = there(c, [float(c.rank)]), there(c, [float(c.rank)])
        group.allreduce_mean([mean], 1)
        group.broadcast(first, 0)
        c.barrier()
        again = group.split(0, 0).gather_numbers(c.rank)[:, 0].tolist()
        return group.rank, here(c, mean)[0], here(c, first)[0], again

    for rank, found in enumerate(team.run(task)):
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
            lambda: group.allreduce_mean([there(c, np.zeros(1200, np.float32))], 1),
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
    for rank, (reduced, *counts) in enumerate(team.run(task)):
        assert counts == [4 * rank * others, 40 * others * (rank == others), 56 * (others > 0)]
        assert abs(reduced - 2 * others * 4800 // team.workers) <= 32 * others  # and weights, unless known


def test_mean_is_weighted_and_the_same_bits_everywhere(team: Team) -> None:
    rng = np.random.default_rng(5)
    vectors = [[rng.normal(size=length) for length in (1, 1000)] for _ in range(team.workers)]
    weights = rng.integers(1, 100, team.workers)

    def task(c: Communicator) -> list[Any]:
        arrays = [there(c, vector) for vector in vectors[c.rank]]
        c.allreduce_mean(arrays, int(weights[c.rank]))
        return [here(c, array) for array in arrays]

    results = team.run(task)
    for i in range(2):
        expected = np.average([mine[i] for mine in vectors], axis=0, weights=weights)
        np.testing.assert_allclose(results[0][i], expected, rtol=1e-13, atol=1e-15)
        assert {arrays[i].tobytes() for arrays in results} == {results[0][i].tobytes()}


@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_of_weight_zero_adds_nothing(several: Team, idle: bool) -> None:
    """If all weights are zero, nothing happens."""

    def task(c: Communicator) -> list[float]:
        array = there(c, [np.nan if c.rank == 1 else 2.0] * 10)
        c.allreduce_mean([array], 0 if idle or c.rank == 1 else 3)
        return list(here(c, array))

    expected = [[np.nan if idle and rank == 1 else 2.0] * 10 for rank in range(several.workers)]
    np.testing.assert_array_equal(several.run(task), expected)


def test_sums_do_not_depend_on_timing(team: Team) -> None:
    rng = np.random.default_rng(8)
    vectors = (rng.normal(size=(4, 999)) * 10.0 ** rng.integers(-6, 6, (4, 999))).astype(np.float32)

    def mean(c: Communicator, slowest: int = 0) -> bytes:
        time.sleep(0.01 if c.rank == slowest else 0)
        array = there(c, vectors[c.rank])
        c.allreduce_mean([array], 1 + c.rank)
        return bytes(here(c, array))

    found = {bits for rank in range(3) for bits in team.run(partial(mean, slowest=rank))}
    assert len(found) == 1
    if team.reduce == "host" or team.devices == 1:  # NCCL chooses the order of a sum over several devices
        with ThreadLauncher(team.workers, timeout_s=20) as threads:
            assert found == {threads.run(mean)}


def test_a_large_vector_arrives_whole(several: Team) -> None:
    """The vector is larger than the messages that MPI sends eagerly."""

    def task(c: Communicator) -> tuple[int, int, float, float]:
        message, into = np.arange(1_000_000) + c.rank, np.empty(1_000_000, np.int64)
        c.send(message, (c.rank + 1) % c.size)
        message[:] = -1  # the receiver does not see this change
        time.sleep(0.01)
        c.recv(into, (c.rank - 1) % c.size)
        mean = there(c, np.full(500_001, c.rank, np.float32))
        c.allreduce_mean([mean, there(c, np.zeros(7, np.float32))], 1)
        return int(into[0]), int(into[-1]), float(here(c, mean).min()), float(here(c, mean).max())

    middle = (several.workers - 1) / 2
    for rank, found in enumerate(several.run(task)):
        source = (rank - 1) % several.workers
        assert found == (source, 999_999 + source, middle, middle)
