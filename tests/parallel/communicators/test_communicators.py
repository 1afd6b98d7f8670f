"""One suite for every communicator: serial, threads, threads with arrays on GPUs, and ranks of MPI.

Under mpiexec every rank runs this file, and its part of each task; `CUPYNET_TEST_RANKS` is set there.
"""

from __future__ import annotations

import os
import re
import threading
import time
from inspect import signature

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.parallel import MpiLauncher, PeerFailed, ThreadLauncher, WorkerTimeout
from cupynet.parallel.communicators.threads import ThreadCommunicator, ThreadGroup
from cupynet.parallel.launchers.base import Launcher
from tests.support.backends import works
from tests.support.mpi import needs_mpi, under_mpiexec

RANKS = int(os.environ.get("CUPYNET_TEST_RANKS", "0"))  # under mpiexec
of_threads = pytest.mark.skipif(bool(RANKS), reason="about threads alone")


def on_workers(launcher: Launcher, task) -> list:
    """Run `task(communicator)` on all workers and return their results in rank order."""
    results = [None] * launcher.workers

    def keep(communicator):
        results[communicator.rank] = task(communicator)

    launcher.run(keep)
    if RANKS:
        from mpi4py import MPI

        return MPI.COMM_WORLD.allgather(results[launcher.first])
    return results


class OnDevices:
    """A communicator that copies floating-point arrays to the worker's device for each call, and back."""

    def __init__(self, own, backend):
        self.own, self.backend = own, backend

    def __getattr__(self, name):
        return getattr(self.own, name)

    def split(self, color, key):
        return OnDevices(self.own.split(color, key), self.backend)

    def allreduce_mean(self, arrays, weight):
        there = [self._there(array) for array in arrays]
        self.own.allreduce_mean(there, weight)
        self._back(arrays, there)

    def broadcast(self, array, root=0):
        there = self._there(array)
        self.own.broadcast(there, root)
        self._back([array], [there])

    def send(self, array, to):
        self.own.send(self._there(array), to)

    def recv(self, array, source):
        there = self._there(array)
        self.own.recv(there, source)
        self._back([array], [there])

    def _there(self, array):
        return self.backend.asarray(array) if array.dtype.kind == "f" else array

    def _back(self, arrays, there):
        for array, found in zip(arrays, there, strict=True):
            array[...] = self.backend.to_host(found)


class DeviceLauncher:
    """Threads on devices, with averages over NCCL."""

    def __init__(self, threads, devices):
        self._threads, self.workers, self.first, self.devices = threads, threads.workers, 0, devices

    def run(self, task):
        def work(communicator):
            backend = create_backend("cupy", device=communicator.rank % self.devices)
            backend.activate()
            communicator.close()  # of the task before
            communicator.attach(backend, "nccl")
            result = task(OnDevices(communicator, backend))
            backend.synchronize()
            return result

        return self._threads.run(work)


HOSTS = [RANKS] if RANKS else [1, 2, 3]
ON_STANDIN = [  # workers, devices
    pytest.param((workers, devices), id=f"standin{workers}on{devices}", marks=pytest.mark.standin)
    for workers, devices in ((1, 1), (2, 2), (3, 2))
]
ON_GPUS = [
    pytest.param(
        (workers, devices),
        id=f"gpu{workers}on{devices}",
        marks=[pytest.mark.gpu, *([pytest.mark.multi_gpu] if devices > 1 else [])],
    )
    for workers, devices in ((1, 1), (2, 1), (2, 2), (4, 2))
    if works("cupy")
]


@pytest.fixture(params=HOSTS if RANKS else [*HOSTS, *ON_STANDIN, *ON_GPUS])
def team(request, made_up_devices):
    """One worker is the serial communicator, several are threads, with arrays on devices too, or ranks of mpiexec."""
    if RANKS:
        yield MpiLauncher(timeout_s=20)
        return
    workers, devices = request.param if isinstance(request.param, tuple) else (request.param, 0)
    with ThreadLauncher(workers, timeout_s=20) as team:
        yield DeviceLauncher(team, devices) if devices else team


@pytest.fixture
def several(team):
    if team.workers == 1:
        pytest.skip("a single worker cannot send")
    return team


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(3, marks=needs_mpi),
        *(pytest.param(ranks, marks=[*needs_mpi, pytest.mark.slow]) for ranks in (2, 4)),
    ],
)
@of_threads
def test_the_suite_under_mpiexec(ranks):
    """What every communicator does, between processes; all of it, on every rank."""
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = under_mpiexec(ranks, *command, CUPYNET_TEST_RANKS=str(ranks), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shared = [
        test
        for name, test in globals().items()
        if name.startswith("test_") and {"team", "several"} & signature(test).parameters.keys()
    ]
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert passed == [str(len(shared) + 1)] * ranks, done.stdout  # one of them has two cases


def test_ranks_count_from_zero(team):
    assert on_workers(team, lambda c: (c.rank, c.size)) == [(rank, team.workers) for rank in range(team.workers)]


def test_all_gather_is_in_rank_order(team):
    def task(c):
        gathered = []
        for turn in range(5):
            time.sleep(0.002 * ((c.rank + turn) % 3))
            gathered.append(c.all_gather(np.array([turn, c.rank], np.int64)))
        return np.stack(gathered)  # (5, W, 2)

    expected = np.array([[[turn, rank] for rank in range(team.workers)] for turn in range(5)])
    for gathered in on_workers(team, task):
        assert gathered.dtype == np.int64
        np.testing.assert_array_equal(gathered, expected)


def test_gathered_arrays_are_copies(team):
    """A worker may change its array, or the gathered arrays, without affecting the others."""

    def task(c):
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

    ranks = np.arange(team.workers)[:, None] * np.ones(3)
    for kept, again in on_workers(team, task):
        np.testing.assert_array_equal(kept, ranks)
        np.testing.assert_array_equal(again, np.full((team.workers, 3), 7.0))


def test_numbers_are_gathered_as_rows(team):
    for gathered in on_workers(team, lambda c: c.gather_numbers(c.rank, True, 0.5)):
        np.testing.assert_array_equal(gathered, [[rank, 1.0, 0.5] for rank in range(team.workers)])


def test_broadcast_sends_the_roots_array_to_all(team):
    root = team.workers - 1

    def task(c):
        array = np.full(7, float(c.rank))
        c.broadcast(array, root)
        return array

    for array in on_workers(team, task):
        np.testing.assert_array_equal(array, np.full(7, float(root)))


def test_messages_arrive_in_order_and_may_cross(several):
    def task(c):
        ahead, behind = (c.rank + 1) % c.size, (c.rank - 1) % c.size
        message, received = np.zeros((2, 3), np.float32), []
        for turn in range(4):
            message[...] = 10 * c.rank + turn
            c.send(message, ahead)  # all send before anybody receives
        for _ in range(4):
            into = np.full((2, 3), np.nan, np.float32)
            c.recv(into, behind)
            received.append(into)
        return received

    for rank, received in enumerate(on_workers(several, task)):
        behind = (rank - 1) % several.workers
        np.testing.assert_array_equal(received, [np.full((2, 3), 10 * behind + turn) for turn in range(4)])


def test_workers_of_one_colour_form_a_group_in_the_order_of_their_keys(team):
    def task(c):
        odd = c.split(color=c.rank % 2, key=-c.rank)
        mean = np.array([float(c.rank)])
        odd.allreduce_mean([mean], 1)
        last = np.array([c.rank])
        odd.broadcast(last, 0)
        c.barrier()
        return odd.rank, odd.size, mean[0], int(last[0]), odd.split(0, 0).gather_numbers(c.rank)[:, 0].tolist()

    for rank, (new, size, mean, first, again) in enumerate(on_workers(team, task)):
        members = [r for r in range(team.workers) if r % 2 == rank % 2][::-1]
        assert (new, size) == (members.index(rank), len(members))
        assert (mean, first, again) == (sum(members) / len(members), members[0], members)


def test_traffic_is_counted(team):
    def task(c):
        others, group = c.size - 1, c.split(0, c.rank)
        counts = [c.traffic.bytes_sent]
        group.allreduce_mean([np.zeros(1200, np.float32)], 1)
        counts.append(c.traffic.bytes_sent)
        c.all_gather(np.zeros(c.rank, np.int32))
        counts.append(c.traffic.bytes_sent)
        c.all_gather(np.zeros(10))
        counts.append(c.traffic.bytes_sent)
        c.broadcast(np.zeros(5), others)
        counts.append(c.traffic.bytes_sent)
        if others:
            c.send(np.zeros(7), (c.rank + 1) % c.size)
            c.recv(np.zeros(7), (c.rank - 1) % c.size)
        counts.append(c.traffic.bytes_sent)
        return others, np.diff(counts).tolist()

    for rank, (others, counts) in enumerate(on_workers(team, task)):
        size = others + 1
        reduced = 2 * others * 4800 // size
        expected = [4 * rank * others, 80 * others, 40 * others * (rank == others), 56 * (others > 0)]
        assert counts[1:] == expected
        assert abs(counts[0] - reduced) <= 32 * others  # the weights are sent too if they are not known


@pytest.mark.parametrize("length", [1, 1000])
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


def test_a_worker_of_weight_zero_adds_nothing(team):
    idle = 1 if team.workers > 1 else -1

    def task(c):
        array = np.full(10, np.nan if c.rank == idle else 2.0, np.float32)
        c.allreduce_mean([array], 0 if c.rank == idle else 3)
        return array

    for array in on_workers(team, task):
        np.testing.assert_array_equal(array, np.full(10, 2.0, np.float32))


def test_all_weights_zero_changes_nothing(team):
    def task(c):
        array = np.full(4, float(c.rank))
        c.allreduce_mean([array], 0)
        return array.tolist()

    assert on_workers(team, task) == [[float(rank)] * 4 for rank in range(team.workers)]


def test_sums_do_not_depend_on_timing(team):
    rng = np.random.default_rng(8)
    vectors = (rng.normal(size=(4, 999)) * 10.0 ** rng.integers(-6, 6, (4, 999))).astype(np.float32)

    def mean(slowest):
        def task(c):
            time.sleep(0.01 if c.rank == slowest else 0)
            array = vectors[c.rank].copy()
            c.allreduce_mean([array], 1 + c.rank)
            return array.tobytes()

        return task

    found = {bits for slowest in range(3) for bits in on_workers(team, mean(slowest))}
    assert len(found) == 1
    if getattr(team, "devices", 1) > 1:
        return  # sums of devices meet over NCCL, in an order of its own
    with ThreadLauncher(team.workers, timeout_s=20) as threads:
        assert found == {threads.run(mean(0))}  # the same bits, whatever connects the workers


def test_a_large_vector_arrives_whole(several):
    """Larger than the messages that MPI sends eagerly."""

    def task(c):
        message, into = np.arange(1_000_000) + c.rank, np.empty(1_000_000, np.int64)
        c.send(message, (c.rank + 1) % c.size)
        message[:] = -1
        time.sleep(0.01)  # the receiver does not depend on what the sender does meanwhile
        c.recv(into, (c.rank - 1) % c.size)
        mean = np.full(500_001, float(c.rank), np.float32)
        c.allreduce_mean([mean, mean[:7].copy()], 1)
        return int(into[0]), int(into[-1]), float(mean.min()), float(mean.max())

    middle = (several.workers - 1) / 2
    for rank, found in enumerate(on_workers(several, task)):
        behind = (rank - 1) % several.workers
        assert found == (behind, 999_999 + behind, middle, middle)


@of_threads
def test_a_worker_that_never_comes_ends_the_wait():
    group = ThreadGroup.of(3, timeout_s=0.05)
    threading.Thread(target=lambda: pytest.raises(WorkerTimeout, ThreadCommunicator(group, 2).barrier)).start()
    with pytest.raises(WorkerTimeout, match="worker 0 "):
        ThreadCommunicator(group, 0).barrier()


@of_threads
def test_a_failure_wakes_waiting_workers():
    group = ThreadGroup.of(2, timeout_s=60)
    woken = []

    def wait():
        try:
            ThreadCommunicator(group, 0).barrier()
        except PeerFailed as error:
            woken.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    group.team.fail(1, ValueError("broken"))
    thread.join(10)
    assert woken == ["worker 0 stops because worker 1 failed"]
    with pytest.raises(PeerFailed):
        ThreadCommunicator(group, 0).check()


class DeviceArray:
    """An array that the host cannot touch by itself, as CuPy's are."""

    def __init__(self, values):
        self.values = np.array(values)
        self.shape, self.dtype = self.values.shape, self.values.dtype

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
        c = getattr(c, "own", c)
        c.attach(Device("double"))
        mean, first, host = DeviceArray([float(c.rank)] * 4), DeviceArray([float(c.rank)] * 4), np.full(4, c.rank)
        c.allreduce_mean([mean], 1)
        c.broadcast(first, team.workers - 1)
        c.broadcast(host, team.workers - 1)  # a text, say
        return mean.values.tolist(), first.values.tolist(), host.tolist()

    last = team.workers - 1
    assert on_workers(team, task) == [([last / 2] * 4, [float(last)] * 4, [last] * 4)] * team.workers
