"""One suite for every communicator: what a worker may rely on, whatever connects it to the others."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.parallel import SerialCommunicator, ThreadCommunicator, ThreadGroup, WorkerTeam
from cupynet.parallel.communicator import PeerFailed, WorkerTimeout

MEAN = create_backend("numpy").mean_in_place


@pytest.fixture(params=[1, 2, 3, 4])
def team(request):
    """One worker is the serial communicator, several are threads."""
    with WorkerTeam(request.param, timeout_s=20, limit_blas=False) as team:
        yield team


def test_ranks_count_from_zero(team):
    assert team.run(lambda c: (c.rank, c.size)) == [(rank, team.workers) for rank in range(team.workers)]


def test_one_worker_is_serial_and_several_are_threads(team):
    kinds = set(team.run(lambda c: type(c)))
    assert kinds == ({SerialCommunicator} if team.workers == 1 else {ThreadCommunicator})


def test_all_gather_is_in_rank_order_whoever_comes_first(team):
    def task(c):
        gathered = []
        for turn in range(5):
            time.sleep(0.002 * ((c.rank + turn) % 3))
            gathered.append(c.all_gather((turn, c.rank)))
        return gathered

    expected = [[(turn, rank) for rank in range(team.workers)] for turn in range(5)]
    assert team.run(task) == [expected] * team.workers


def test_broadcast_gives_everybody_the_roots_array(team):
    root = team.workers - 1

    def task(c):
        array = np.full(7, float(c.rank))
        c.broadcast(array, root)
        return array

    for array in team.run(task):
        np.testing.assert_array_equal(array, np.full(7, float(root)))


@pytest.mark.parametrize("length", [1, 3, 1000])
def test_mean_is_weighted_and_the_same_bits_everywhere(team, length):
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(team.workers, 2, length))
    weights = rng.integers(1, 100, team.workers)

    def task(c):
        arrays = [v.copy() for v in vectors[c.rank]]
        c.allreduce_mean(arrays, int(weights[c.rank]), MEAN)
        return arrays

    expected = np.average(vectors, axis=0, weights=weights)  # (2, length)
    results = team.run(task)
    for arrays in results:
        np.testing.assert_allclose(arrays, expected, rtol=1e-13, atol=1e-15)
        assert [a.tobytes() for a in arrays] == [a.tobytes() for a in results[0]]


@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_of_weight_zero_adds_nothing_not_even_nan(workers):
    def task(c):
        array = np.full(10, np.nan if c.rank == 1 else 2.0, np.float32)
        c.allreduce_mean([array], 0 if c.rank == 1 else 3, MEAN)
        return array

    with WorkerTeam(workers, timeout_s=20, limit_blas=False) as team:
        for array in team.run(task):
            np.testing.assert_array_equal(array, np.full(10, 2.0, np.float32))


def test_all_weights_zero_changes_nothing(team):
    def task(c):
        array = np.full(4, float(c.rank))
        c.allreduce_mean([array], 0, MEAN)
        return array.tolist()

    assert team.run(task) == [[float(rank)] * 4 for rank in range(team.workers)]


def test_sums_are_in_rank_order_whatever_the_timing():
    vectors = [np.array([1e8, 1.0], np.float32), np.array([1.0, 1e8], np.float32), np.array([-1e8, 3.0], np.float32)]

    def mean(slowest):
        def task(c):
            time.sleep(0.01 if c.rank == slowest else 0)
            array = vectors[c.rank].copy()
            c.allreduce_mean([array], 1, MEAN)
            return array.tobytes()

        with WorkerTeam(3, timeout_s=20, limit_blas=False) as team:
            return set(team.run(task))

    assert mean(0) == mean(1) == mean(2)
    assert len(mean(0)) == 1


def test_a_worker_that_never_comes_is_named():
    group = ThreadGroup(3, timeout_s=0.05)
    threading.Thread(target=lambda: pytest.raises(WorkerTimeout, ThreadCommunicator(group, 2).barrier)).start()
    with pytest.raises(WorkerTimeout, match=r"worker 1(, 2)? has not arrived where worker 0 waited"):
        ThreadCommunicator(group, 0).barrier()


def test_a_failure_wakes_those_who_wait():
    group = ThreadGroup(2, timeout_s=60)
    woken = []

    def wait():
        try:
            ThreadCommunicator(group, 0).barrier()
        except PeerFailed as error:
            woken.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    group.fail(1, ValueError("broken"))
    thread.join(10)
    assert woken == ["worker 0 stops because worker 1 failed"]
    with pytest.raises(PeerFailed):
        ThreadCommunicator(group, 0).check()
