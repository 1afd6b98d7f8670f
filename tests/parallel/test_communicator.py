"""One suite for every communicator: what a worker may rely on, whatever connects it to the others."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.parallel import (
    PeerFailed,
    SerialCommunicator,
    ThreadCommunicator,
    ThreadGroup,
    ThreadLauncher,
    WorkerTimeout,
)


def on_workers(launcher: ThreadLauncher, task) -> list:
    """What `task(communicator)` returned on each of the workers."""
    results = [None] * launcher.workers

    def keep(communicator):
        results[communicator.rank] = task(communicator)

    launcher.run(keep)
    return results


@pytest.fixture(params=[1, 2, 3, 4])
def team(request):
    """One worker is the serial communicator, several are threads."""
    with ThreadLauncher(request.param, timeout_s=20) as team:
        yield team


def test_ranks_count_from_zero(team):
    assert on_workers(team, lambda c: (c.rank, c.size)) == [(rank, team.workers) for rank in range(team.workers)]


def test_one_worker_is_serial_and_several_are_threads(team):
    kinds = set(on_workers(team, lambda c: type(c)))
    assert kinds == ({SerialCommunicator} if team.workers == 1 else {ThreadCommunicator})


def test_all_gather_is_in_rank_order_whoever_comes_first(team):
    def task(c):
        gathered = []
        for turn in range(5):
            time.sleep(0.002 * ((c.rank + turn) % 3))
            gathered.append(c.all_gather(np.array([[turn, c.rank]], np.int64)))
        return np.stack(gathered)  # (5, W, 1, 2)

    expected = np.array([[[[turn, rank]] for rank in range(team.workers)] for turn in range(5)])
    for gathered in on_workers(team, task):
        assert gathered.dtype == np.int64
        np.testing.assert_array_equal(gathered, expected)


def test_what_was_gathered_is_nobody_elses(team):
    """A worker that goes on changes neither what the others got nor what it sent."""

    def task(c):
        own = np.full(3, float(c.rank))
        gathered = c.all_gather(own)
        gathered[:] = -1.0
        own[:] = 7.0
        c.barrier()
        return c.all_gather(own)

    for gathered in on_workers(team, task):
        np.testing.assert_array_equal(gathered, np.full((team.workers, 3), 7.0))


def test_numbers_are_gathered_as_rows(team):
    for gathered in on_workers(team, lambda c: c.gather_numbers(c.rank, True, 0.5)):
        np.testing.assert_array_equal(gathered, [[rank, 1.0, 0.5] for rank in range(team.workers)])


def test_broadcast_gives_everybody_the_roots_array(team):
    root = team.workers - 1

    def task(c):
        array = np.full(7, float(c.rank))
        c.broadcast(array, root)
        return array

    for array in on_workers(team, task):
        np.testing.assert_array_equal(array, np.full(7, float(root)))


@pytest.mark.parametrize("length", [1, 3, 1000])
def test_mean_is_weighted_and_the_same_bits_everywhere(team, length):
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(team.workers, 2, length))
    weights = rng.integers(1, 100, team.workers)

    def task(c):
        arrays = [v.copy() for v in vectors[c.rank]]
        c.allreduce_mean(arrays, int(weights[c.rank]))
        return arrays

    expected = np.average(vectors, axis=0, weights=weights)  # (2, length)
    results = on_workers(team, task)
    for arrays in results:
        np.testing.assert_allclose(arrays, expected, rtol=1e-13, atol=1e-15)
        assert [a.tobytes() for a in arrays] == [a.tobytes() for a in results[0]]


@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_of_weight_zero_adds_nothing_not_even_nan(workers):
    def task(c):
        array = np.full(10, np.nan if c.rank == 1 else 2.0, np.float32)
        c.allreduce_mean([array], 0 if c.rank == 1 else 3)
        return array

    with ThreadLauncher(workers, timeout_s=20) as team:
        for array in on_workers(team, task):
            np.testing.assert_array_equal(array, np.full(10, 2.0, np.float32))


def test_all_weights_zero_changes_nothing(team):
    def task(c):
        array = np.full(4, float(c.rank))
        c.allreduce_mean([array], 0)
        return array.tolist()

    assert on_workers(team, task) == [[float(rank)] * 4 for rank in range(team.workers)]


def test_sums_are_in_rank_order_whatever_the_timing():
    vectors = [np.array([1e8, 1.0], np.float32), np.array([1.0, 1e8], np.float32), np.array([-1e8, 3.0], np.float32)]

    def mean(slowest):
        def task(c):
            time.sleep(0.01 if c.rank == slowest else 0)
            array = vectors[c.rank].copy()
            c.allreduce_mean([array], 1)
            return array.tobytes()

        with ThreadLauncher(3, timeout_s=20) as team:
            return set(on_workers(team, task))

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


class DeviceArray:
    """An array that the host cannot touch by itself, as CuPy's are."""

    def __init__(self, values):
        self.values = np.array(values)

    def __array__(self, *arguments, **options):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __setitem__(self, where, other):
        assert isinstance(other, DeviceArray), "the device takes arrays of its own"
        self.values[where] = other.values


class Device(type(create_backend("numpy", "double"))):
    """A backend of such arrays: every way between the two is a copy."""

    def to_host(self, array):
        return array.values.copy() if isinstance(array, DeviceArray) else array

    def asarray(self, array, dtype=None):
        return array if isinstance(array, DeviceArray) else DeviceArray(array)


def test_arrays_of_a_device_travel_through_the_host(team):
    def task(c):
        c.attach(Device("double"))
        mean, first, host = DeviceArray([float(c.rank)] * 4), DeviceArray([float(c.rank)] * 4), np.full(4, c.rank)
        c.allreduce_mean([mean], 1)
        c.broadcast(first, team.workers - 1)
        c.broadcast(host, team.workers - 1)  # a text, say
        return mean.values.tolist(), first.values.tolist(), host.tolist()

    last = team.workers - 1
    assert on_workers(team, task) == [([last / 2] * 4, [float(last)] * 4, [last] * 4)] * team.workers
