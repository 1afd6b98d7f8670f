"""The stand-in's NCCL: ranks wait for each other and compute; deadlocks and misuses are found."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.standin import installed
from tests.standin.errors import Deadlock, Disagreement, Misuse, Unordered
from tests.standin.machine import Machine
from tests.standin.planted import together


@pytest.fixture(autouse=True)
def machine() -> Iterator[Machine]:
    with installed(patience_s=1.0) as made:
        yield made
        made.misuses.clear()  # each test checks its own misuses


class Rank:
    """One rank, with its own device and stream. `meet` is a barrier of both hosts."""

    def __init__(self, communicator: Any, number: int, stream: Any, meet: Callable[[], object]) -> None:
        self.communicator, self.number, self.stream, self.meet = communicator, number, stream, meet

    def vector(self, *values: float) -> Any:
        import cupy

        x = cupy.asarray(np.array(values, np.float32))
        self.meet()  # nothing may be allocated during a collective
        return x

    def add_up(self, x: Any, count: int | None = None, stream: Any = None) -> None:
        """All-reduce `x` in place, by default on the rank's stream."""
        address, size = x.data.ptr, x.size if count is None else count
        self.communicator.allReduce(address, address, size, 7, 0, (stream or self.stream).ptr)


def ranks(work: Callable[[Rank], Any]) -> list[Any]:
    """Run `work` in a thread for each of two ranks, and return the results, or the exceptions that ended them."""
    import cupy
    from cupy.cuda import nccl

    name, barrier = nccl.get_unique_id(), threading.Barrier(2)

    def task(number: int) -> Any:
        with cupy.cuda.Device(number), cupy.cuda.Stream(non_blocking=True) as stream:
            communicator = nccl.NcclCommunicator(2, name, number)
            try:
                return work(Rank(communicator, number, stream, lambda: barrier.wait(10)))
            finally:
                communicator.destroy()

    return together(lambda: task(0), lambda: task(1))


def test_ranks_that_do_not_make_the_same_call_all_fail() -> None:
    def work(rank: Rank) -> None:
        rank.add_up(rank.vector(1, 2), count=1 + rank.number)
        rank.stream.synchronize()

    assert all(isinstance(each, Disagreement) for each in ranks(work))


def test_one_collective_too_many_is_a_deadlock() -> None:
    def work(rank: Rank) -> None:
        x = rank.vector(1)
        for _ in range(1 + rank.number):
            rank.add_up(x)
        rank.stream.synchronize()

    fine, stuck = ranks(work)
    assert fine is None and isinstance(stuck, Deadlock)


@pytest.mark.parametrize(("size", "is_new"), [(100_000, True), (10, False)])
def test_no_new_memory_is_allocated_while_a_collective_waits(size: int, is_new: bool, machine: Machine) -> None:
    """cudaMalloc waits for the device, which waits for the rank that allocates. A free block of the pool is no wait."""
    import cupy

    def work(rank: Rank) -> float:
        _ = cupy.zeros(10), cupy.zeros(10)
        del _  # leaves two free blocks
        x = rank.vector(1)
        if rank.number == 0:
            with machine.lock:
                machine.changed.wait_for(lambda: machine.waiting, 10)
            cupy.zeros(size)
        rank.add_up(x)
        return float(x[0])

    found = ranks(work)
    assert all(isinstance(each, Deadlock) for each in found) if is_new else found == [2.0, 2.0]


def test_the_result_is_ordered_on_the_stream_of_the_call() -> None:
    import cupy

    def work(rank: Rank) -> float:
        side = cupy.cuda.Stream(non_blocking=True)
        x = rank.vector(1, 2)
        side.wait_event(rank.stream.record())
        rank.add_up(x, stream=side)
        side.record()
        rank.meet()
        with pytest.raises(Unordered):
            x.sum()
        rank.stream.wait_event(side.record())
        return float(x.sum())

    assert ranks(work) == [6.0, 6.0]


@pytest.mark.parametrize("both", [False, True])
def test_a_rank_that_waits_for_an_aborted_one_is_stuck_until_it_is_aborted_too(both: bool, machine: Machine) -> None:
    def work(rank: Rank) -> None:
        x = rank.vector(1)
        if rank.number == 1:
            rank.communicator.abort()
        rank.meet()
        if rank.number == 0:
            rank.add_up(x)
            if both:
                threading.Timer(0.1, rank.communicator.abort).start()
            rank.stream.record().synchronize()

    stuck, _ = ranks(work)
    assert (stuck is None and machine.misuses == []) if both else isinstance(stuck, Deadlock)


def test_the_first_operation_of_a_communicator_is_a_small_one() -> None:
    """The first operation connects the ranks, which may allocate memory."""
    found = ranks(lambda rank: rank.add_up(rank.vector(*range(100))))
    assert all(isinstance(each, Misuse) for each in found)


def test_every_communicator_is_ended() -> None:
    """Otherwise its destructor would end it at some later time, in any thread."""
    with pytest.raises(Misuse), installed():
        from cupy.cuda import nccl

        nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
