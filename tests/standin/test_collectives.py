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


@pytest.fixture
def machine() -> Iterator[Machine]:
    with installed(devices=3, patience_s=1.0) as made:
        yield made
        made.misuses.clear()  # each test checks its own misuses


class Rank:
    """One rank, with its own device and stream. Memory is allocated before `meet`, the barrier on the host."""

    def __init__(self, communicator: Any, number: int, meet: Callable[[], object]) -> None:
        self.communicator, self.number, self.meet = communicator, number, meet

    @property
    def stream(self) -> Any:
        import cupy

        return cupy.cuda.get_current_stream()

    def vector(self, *values: float) -> Any:
        import cupy

        return cupy.asarray(np.array(values, np.float32))

    def add_up(self, x: Any, count: int | None = None, stream: Any = None) -> None:
        """All-reduce `x` in place, by default on the rank's stream."""
        from cupy.cuda import nccl

        self.communicator.allReduce(
            x.data.ptr,
            x.data.ptr,
            x.size if count is None else count,
            nccl.NCCL_FLOAT32,
            nccl.NCCL_SUM,
            (self.stream if stream is None else stream).ptr,
        )


def ranks(work: Callable[[Rank], Any]) -> list[Any]:
    """Run `work` in a thread for each of two ranks, and return the results, or the exceptions that ended them."""
    import cupy
    from cupy.cuda import nccl

    name, barrier = nccl.get_unique_id(), threading.Barrier(2)

    def task(number: int) -> Any:
        with cupy.cuda.Device(number), cupy.cuda.Stream(non_blocking=True):
            communicator = nccl.NcclCommunicator(2, name, number)
            try:
                return work(Rank(communicator, number, lambda: barrier.wait(10)))
            finally:
                communicator.destroy()

    return together(lambda: task(0), lambda: task(1))


def test_ranks_that_do_not_make_the_same_call_all_fail(machine: Machine) -> None:
    def work(rank: Rank) -> None:
        x = rank.vector(1, 2)
        rank.meet()
        rank.add_up(x, count=1 + rank.number)
        rank.stream.synchronize()

    assert all(isinstance(each, Disagreement) for each in ranks(work))


def test_one_collective_too_many_is_a_deadlock(machine: Machine) -> None:
    def work(rank: Rank) -> None:
        x = rank.vector(1)
        rank.meet()
        for _ in range(1 + rank.number):
            rank.add_up(x)
        rank.stream.synchronize()

    fine, stuck = ranks(work)
    assert fine is None and isinstance(stuck, Deadlock)
    assert isinstance(machine.misuses[0], Deadlock)


WAITS: dict[str, Callable[[Any], Any]] = {
    "cudaMalloc": lambda cupy: cupy.zeros(100_000),
    "a block of the pool": lambda cupy: cupy.zeros(10),
}


@pytest.mark.parametrize("what", WAITS)
def test_memory_is_not_allocated_while_a_collective_waits(what: str, machine: Machine) -> None:
    """cudaMalloc waits for the device, which waits for the rank that allocates."""
    import cupy

    def work(rank: Rank) -> float:
        x = rank.vector(1)
        cupy.zeros(10)  # leaves a free block
        rank.meet()
        if rank.number == 0:
            with machine.lock:
                machine.changed.wait_for(lambda: machine.waiting, 10)
            WAITS[what](cupy)
        rank.add_up(x)
        return float(x[0])

    found = ranks(work)
    if what == "a block of the pool":
        assert found == [2.0, 2.0]
    else:
        assert all(isinstance(each, Deadlock) for each in found)


def test_the_result_is_ordered_on_the_stream_of_the_call(machine: Machine) -> None:
    import cupy

    def work(rank: Rank) -> float:
        x, side = rank.vector(1, 2), cupy.cuda.Stream(non_blocking=True)
        side.wait_event(rank.stream.record())
        rank.meet()
        rank.add_up(x, stream=side)
        side.record()
        rank.meet()
        with pytest.raises(Unordered):
            x.sum()
        rank.stream.wait_event(side.record())
        return float(x.sum())

    assert ranks(work) == [6.0, 6.0]


@pytest.mark.parametrize("both", [False, True])
def test_each_rank_ends_only_its_own_part(both: bool, machine: Machine) -> None:
    """A rank that waits for an aborted one is stuck until a thread aborts it too."""

    def work(rank: Rank) -> None:
        x = rank.vector(1)
        rank.meet()
        if rank.number == 1:
            rank.communicator.abort()
        rank.meet()
        if rank.number == 0:
            rank.add_up(x)
            if both:
                threading.Timer(0.1, rank.communicator.abort).start()
            rank.stream.record().synchronize()

    stuck, _ = ranks(work)
    if both:
        assert stuck is None and machine.misuses == []
    else:
        assert isinstance(stuck, Deadlock)


@pytest.mark.parametrize("warm", [True, False])
def test_the_first_operation_of_a_communicator_is_a_small_one(warm: bool, machine: Machine) -> None:
    """The first operation connects the ranks, which may allocate memory."""

    def work(rank: Rank) -> float:
        x = rank.vector(*range(100))
        rank.meet()
        if warm:
            rank.add_up(x, count=1)
        rank.add_up(x)
        return float(x[99])

    found = ranks(work)
    assert found == [198.0, 198.0] if warm else all(isinstance(each, Misuse) for each in found)


def test_every_communicator_is_ended() -> None:
    """Otherwise its destructor would end it at some later time, in any thread."""
    with pytest.raises(Misuse), installed():
        from cupy.cuda import nccl

        nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)


def test_the_host_of_a_rank_continues_when_another_device_is_lost(machine: Machine) -> None:
    """NCCL does this too. Waiting for the device would never end."""

    def work(rank: Rank) -> None:
        x = rank.vector(rank.number)
        rank.meet()
        if rank.number == 1:
            machine.lose(1)
        rank.meet()
        rank.add_up(x)
        assert machine.misuses == []
        with pytest.raises(Deadlock):
            rank.stream.synchronize()

    first, second = ranks(work)
    assert first is None and type(second).__name__ == "NcclError"
