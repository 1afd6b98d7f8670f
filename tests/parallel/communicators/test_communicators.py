"""One suite for every communicator: serial, threads, threads with arrays on GPUs, and MPI ranks.

Under mpiexec, where `CUPYNET_TEST_RANKS` is set, every rank runs this file and its own part of each task.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
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
    *[on("standin", 3, devices, "device", pytest.mark.standin, pytest.mark.smoke) for devices in (1, 2)],
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


@pytest.mark.skipif(bool(RANKS), reason="it starts them")
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(3, marks=needs_mpi),
        *(pytest.param(ranks, marks=[*needs_mpi, pytest.mark.slow]) for ranks in (2, 4)),
    ],
)
def test_mpi_ranks_pass_the_tests_of_this_file(ranks: int) -> None:
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = under_mpiexec(ranks, *command, CUPYNET_TEST_RANKS=str(ranks), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    of_teams = [test for test in tests if "team" in signature(test).parameters]
    assert re.findall(r"(\d+) passed", done.stdout) == [str(2 * len(of_teams))] * ranks, done.stdout


def test_gathered_arrays_are_copies_in_rank_order(team: Team) -> None:
    def task(c: Communicator) -> tuple[list[Any], list[Any]]:
        own = np.full(1 + c.rank, c.rank)
        gathered = c.all_gather(own)
        c.barrier()
        own[:] = 7
        c.barrier()
        kept = [each.tolist() for each in gathered]
        for each in gathered:
            each[:] = -1
        c.barrier()
        return kept, [(each.dtype, *each) for each in c.all_gather(own)]

    for kept, again in team.run(task):
        assert kept == [[rank] * (1 + rank) for rank in range(team.workers)]
        assert again == [(np.int64, *[7] * (1 + rank)) for rank in range(team.workers)]


def test_json_values_are_gathered_in_rank_order(team: Team) -> None:
    found = team.run(lambda c: c.gather_json([c.rank, {"ä": "\udcff" * c.rank}]))
    assert found == [[[rank, {"ä": "\udcff" * rank}] for rank in range(team.workers)]] * len(found)


def test_broadcast_sends_the_array_of_the_root_to_all_workers(team: Team) -> None:
    root = team.workers - 1

    def task(c: Communicator) -> list[float]:
        array, text = there(c, [float(c.rank)] * 7), np.array([c.rank])
        c.broadcast(array, root)
        c.broadcast(text, root)  # every rank has `text` on the host
        return [*here(c, array), *text]

    assert team.run(task) == [[float(root)] * 8] * team.workers


def test_sends_do_not_block_and_messages_arrive_in_order(team: Team) -> None:
    """They are larger than the messages that MPI sends eagerly. All ranks send before any receives."""
    if team.workers == 1:
        pytest.skip("a single worker cannot send")

    def task(c: Communicator) -> list[tuple[float, float]]:
        received = []
        for turn in range(4):
            message = there(c, np.full(100_000, 10.0 * c.rank + turn))
            c.send(message, (c.rank + 1) % c.size)
            message[:] = -1  # the receiver does not see this change
        for _ in range(4):
            into = there(c, np.full(100_000, np.nan))
            c.recv(into, (c.rank - 1) % c.size)
            received.append((float(here(c, into).min()), float(here(c, into).max())))
        return received

    for rank, received in enumerate(team.run(task)):
        source = (rank - 1) % team.workers
        assert received == [(10 * source + turn, 10 * source + turn) for turn in range(4)]


def test_workers_of_one_color_form_a_group_in_the_order_of_their_keys(team: Team) -> None:
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


def test_bytes_sent_are_counted_for_means_gathered_arrays_broadcasts_and_messages(team: Team) -> None:
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


def test_means_are_weighted_bit_identical_on_all_workers_and_in_rank_order_on_a_cpu(team: Team) -> None:
    """On the host and on a single device, the sum is in rank order, even if rank 0 arrives last."""
    rng, lengths = np.random.default_rng(5), (1, 1000, 500_001)
    vectors = [[rng.normal(size=length) for length in lengths] for _ in range(team.workers)]
    weights = rng.integers(1, 100, team.workers)

    def task(c: Communicator) -> list[Any]:
        time.sleep(0.01 if c.rank == 0 else 0)
        arrays = [there(c, vector) for vector in vectors[c.rank]]
        c.allreduce_mean(arrays, int(weights[c.rank]))
        return [here(c, array) for array in arrays]

    results = team.run(task)
    for i in range(len(lengths)):
        expected, *others = [mine[i].copy() for mine in vectors]
        create_backend("numpy", "double").mean_in_place([expected, *others], list(weights / weights.sum()))
        np.testing.assert_allclose(results[0][i], expected, rtol=1e-13, atol=1e-15)
        in_rank_order = team.reduce == "host" or team.devices == 1
        bits = (expected if in_rank_order else results[0][i]).tobytes()
        assert {arrays[i].tobytes() for arrays in results} == {bits}


def test_a_worker_of_weight_zero_adds_nothing_and_without_any_weight_nothing_changes(team: Team) -> None:
    def task(c: Communicator) -> list[Any]:
        found = []
        for weight in (0 if c.rank == 1 else 3, 0):
            array = there(c, [np.nan if c.rank == 1 else 2.0] * 10)
            c.allreduce_mean([array], weight)
            found.append(here(c, array))
        return found

    for rank, (mean, idle) in enumerate(team.run(task)):
        np.testing.assert_array_equal(mean, [2.0] * 10)
        np.testing.assert_array_equal(idle, [np.nan if rank == 1 else 2.0] * 10)
