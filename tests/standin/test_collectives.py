"""The stand-in's NCCL: ranks wait for each other and compute; deadlocks and misuses are found."""

from __future__ import annotations

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
        made.misuses.clear()  # each test looks at its own


def ranks(work: Callable[[Any, Any, int], Any], count: int = 2, devices: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    """`work(nccl, communicator, rank)` in a thread for each rank, on its device and a stream of its own.

    `communicator.meet()` is a barrier of the host: before it memory is allocated, after it nothing.
    """
    import cupy
    from cupy.cuda import nccl

    name, barrier = nccl.get_unique_id(), threading.Barrier(count)

    def task(rank: int) -> Any:
        with cupy.cuda.Device(devices[rank]), cupy.cuda.Stream(non_blocking=True):
            communicator = nccl.NcclCommunicator(count, name, rank)
            communicator.meet = lambda: barrier.wait(10)
            try:
                return work(nccl, communicator, rank)
            finally:
                communicator.destroy()

    return together(*(lambda rank=rank: task(rank) for rank in range(count)))


def here() -> int:
    import cupy

    return cupy.cuda.get_current_stream().ptr  # type: ignore[no-any-return]


def synchronize() -> None:
    import cupy

    cupy.cuda.get_current_stream().synchronize()


def vector(*values: float, dtype: Any = np.float32) -> Any:
    import cupy

    return cupy.asarray(np.array(values, dtype))


@pytest.mark.smoke
def test_an_all_reduce_adds_up(machine: Machine) -> None:
    def work(nccl: Any, communicator: Any, rank: int) -> Any:
        x, y = vector(1 + rank, 10), vector(0, 0)
        communicator.meet()
        communicator.allReduce(x.data.ptr, y.data.ptr, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
        communicator.allReduce(y.data.ptr, y.data.ptr, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
        return [*x.get().tolist(), *y.get().tolist()]

    assert ranks(work, 3) == [[1 + rank, 10, 18, 90] for rank in range(3)]
    assert machine.misuses == []


def test_ranks_that_do_not_make_the_same_call_all_fail(machine: Machine) -> None:
    def work(nccl: Any, communicator: Any, rank: int) -> None:
        x = vector(1, 2)
        communicator.meet()
        communicator.allReduce(x.data.ptr, x.data.ptr, 1 + rank, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
        synchronize()

    assert all(isinstance(each, Disagreement) for each in ranks(work))


def test_one_collective_too_many_is_a_deadlock(machine: Machine) -> None:
    def work(nccl: Any, communicator: Any, rank: int) -> Any:
        x = vector(1)
        communicator.meet()
        for _ in range(1 + rank):
            communicator.allReduce(x.data.ptr, x.data.ptr, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
        synchronize()

    fine, stuck = ranks(work)
    assert fine is None and isinstance(stuck, Deadlock)
    assert isinstance(machine.misuses[0], Deadlock)


def test_memory_is_not_allocated_while_a_collective_waits(machine: Machine) -> None:
    """The first deadlock of NCCL in threads: cudaMalloc waits for a device that waits for the one that allocates."""
    import cupy

    def grow() -> None:
        cupy.zeros(100_000)

    def from_the_pool() -> None:
        kept = cupy.zeros(10)  # there was a free block of that size
        assert kept.size == 10

    waits = {
        "cudaMalloc": grow,
        "cudaFree": lambda: cupy.get_default_memory_pool().free_all_blocks(),
        "cudaHostAlloc": lambda: cupy.cuda.alloc_pinned_memory(1 << 20),
        "cudaFreeHost": lambda: cupy.get_default_pinned_memory_pool().free_all_blocks(),
        "cuBLAS handle": lambda: cupy.matmul(matrix, matrix, out=product),
        "": from_the_pool,
    }
    for text, act in waits.items():

        def work(nccl: Any, communicator: Any, rank: int, act: Any = act) -> Any:
            nonlocal matrix, product
            if rank == 0:
                matrix, product = cupy.ones((2, 2)), cupy.zeros((2, 2))
            x = vector(1)
            if rank == 0:
                cupy.zeros(10)
            communicator.meet()
            if rank == 0:
                with machine.lock:
                    machine.changed.wait_for(lambda: any("allReduce" in each for each in machine.waiting.values()), 10)
                act()
            communicator.allReduce(x.data.ptr, x.data.ptr, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
            return float(x[0])

        matrix = product = None
        found = ranks(work)
        if text:
            assert all(isinstance(each, Deadlock) and text in str(each) for each in found), (text, found)
        else:
            assert found == [2.0, 2.0]
        machine.stuck = None


def test_one_communicator_is_for_one_thread_at_a_time(machine: Machine) -> None:
    def work(nccl: Any, communicator: Any, rank: int) -> Any:
        x = vector(1)
        if rank == 1:
            return None

        def call() -> None:
            communicator.allReduce(x.data.ptr, x.data.ptr, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

        stream = here()
        return together(call, call)

    found, _ = ranks(work)
    assert isinstance(next(filter(None, found)), Misuse)


def test_a_collective_is_ordered_on_the_stream_it_was_given(machine: Machine) -> None:
    import cupy

    def work(nccl: Any, communicator: Any, rank: int, wait: bool) -> Any:
        x, side = vector(1, 2), cupy.cuda.Stream(non_blocking=True)
        communicator.meet()
        if wait:
            side.wait_event(cupy.cuda.get_current_stream().record())
        communicator.allReduce(x.data.ptr, x.data.ptr, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, side.ptr)
        side.record()
        communicator.meet()
        before = None
        try:
            x.sum()
        except Unordered as error:
            before = error
        cupy.cuda.get_current_stream().wait_event(side.record())
        return type(before).__name__, float(x.sum())

    assert ranks(lambda *given: work(*given, True)) == [("Unordered", 6.0)] * 2
    machine.misuses.clear()
    found = ranks(lambda *given: work(*given, False))
    assert all(isinstance(each, Unordered) and "nccl.allReduce" in str(each) for each in found)


@pytest.mark.parametrize("both", [False, True])
def test_each_rank_ends_only_its_own_part(both: bool, machine: Machine) -> None:
    """A rank that waits for one that has aborted is stuck until it is aborted too, by whatever thread."""
    import cupy

    def work(nccl: Any, communicator: Any, rank: int) -> Any:
        x, event, side = vector(1), cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
        communicator.meet()
        if rank == 1:
            communicator.abort()
            communicator.meet()
            return
        communicator.meet()
        communicator.allReduce(x.data.ptr, x.data.ptr, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
        event.record()
        side.wait_event(event)
        if both:
            threading.Timer(0.1, communicator.abort).start()
        for wait in (synchronize, event.synchronize, side.synchronize):
            wait()

    stuck, _ = ranks(work)
    if both:
        assert stuck is None and machine.misuses == []
    else:
        assert isinstance(stuck, Deadlock)


def test_the_first_operation_of_a_communicator_is_a_small_one(machine: Machine) -> None:
    """It connects the ranks, and may allocate memory for that."""

    def work(nccl: Any, communicator: Any, rank: int, warm: bool) -> Any:
        x = vector(*range(100))
        communicator.meet()
        for count in (1, 100) if warm else (100,):
            communicator.allReduce(x.data.ptr, x.data.ptr, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
        return float(x[99])

    assert ranks(lambda *given: work(*given, True)) == [198.0, 198.0] and machine.misuses == []
    found = ranks(lambda *given: work(*given, False))
    assert all(isinstance(each, Misuse) for each in found)


@pytest.mark.parametrize("end", ["destroy", None])
def test_every_communicator_is_ended(end: str | None) -> None:
    """Its destructor would end it at some later time, in any thread."""

    def use() -> None:
        from cupy.cuda import nccl

        made = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        if end is not None:
            getattr(made, end)()

    if end is not None:
        with installed():
            use()
        return
    with pytest.raises(Misuse), installed():
        use()


def test_a_device_that_is_lost_leaves_the_others_standing(machine: Machine) -> None:
    """Their hosts continue, as with NCCL; a wait for the device never ends."""

    def work(nccl: Any, communicator: Any, rank: int) -> Any:
        import cupy

        x = vector(rank)
        communicator.meet()
        if rank == 1:
            machine.lose(1)
        else:
            with machine.lock:
                machine.wait(lambda: machine.is_lost(1), lambda: "the device is not lost")
        try:
            communicator.allReduce(x.data.ptr, x.data.ptr, 1, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, here())
        except nccl.NcclError as error:
            return str(error)
        assert machine.misuses == []
        with pytest.raises(Deadlock):
            cupy.cuda.get_current_stream().synchronize()
        with pytest.raises(Deadlock):
            cupy.zeros(1 << 20)
        return "goes on"

    found = ranks(work)
    assert found[0] == "goes on" and found[1].startswith("NCCL_ERROR_UNHANDLED_CUDA_ERROR")
    assert len(machine.misuses) == 2
