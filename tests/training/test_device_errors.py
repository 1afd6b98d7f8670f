"""Devices that fail under workers, and workers that fail between devices, on the stand-in of CuPy and on GPUs.

Nothing hangs, the first failure is reported in one line, and CuPy is not misused on the way out.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cupynet.backend import create_backend, device_count
from cupynet.backend.cuda.gpus import limit_pools, trim_pools
from cupynet.core.errors import DeviceError
from cupynet.data import Loader
from cupynet.nn import Dense, Image, Layer, Model
from cupynet.optim import Nesterov
from cupynet.parallel import Placement, ThreadLauncher, WorkerTimeout
from cupynet.parallel.communicators.devices import DeviceMeans
from cupynet.parallel.communicators.nccl import NcclSum
from cupynet.training import Callback, Checkpoint, ParallelWrapper, Pools, Trainer
from cupynet.training.device_errors import translate_device_errors
from tests.standin.machine import active
from tests.support.backends import on_devices
from tests.support.training import At, small_dataset, small_model, stripes, stripes_network

on_standin = pytest.mark.standin
LOST = "device 1"  # of the message


def wrapper(workers: int = 2, **changes: Any) -> ParallelWrapper:
    model = Model(stripes_network(), Image(8, 8, 1), create_backend("cupy"), seed=3)
    usual = {"averaging_frequency": 1, "reduce": "nccl", "optimizer": Nesterov(0.02), "prefetch_buffer": 0}
    return ParallelWrapper(model, workers, timeout_s=20, **usual | changes)


def loader(count: int = 230) -> Loader:
    return Loader(stripes(count), 16, seed=1)


def notes(error: BaseException) -> str:
    return "; ".join(getattr(error, "__notes__", []))


def workers_have_ended() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("cupynet worker")]


def fill() -> None:
    """Take all memory that the current device's pool has left."""
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes())
    taken = []
    for size in (1 << power for power in (24, 18, 12, 9)):  # each that fails collects garbage
        while True:
            try:
                taken.append(cupy.cuda.alloc(size))
            except cupy.cuda.memory.OutOfMemoryError:
                break
    kept.append(taken)


kept: list[Any] = []


@pytest.fixture(autouse=True)
def forgotten(request: pytest.FixtureRequest) -> Any:
    yield
    kept.clear()
    if request.node.get_closest_marker("gpu"):  # later tests use the same pools
        unlimited()


def unlimited() -> None:
    limit_pools(list(range(device_count("cupy"))), 0)


# memory --------------------------------------------------------------------------------------------------------------


@on_standin
def test_no_memory_in_the_warm_up_names_what_to_lower() -> None:
    limit_pools([0, 1], 1 << 30)
    with wrapper(4) as made:
        limit_pools([1], 1 << 18)
        with pytest.raises(DeviceError) as caught:
            made.warm_up(512)
    assert all(part in str(caught.value) for part in ("device 1", "262.1 kB", "batch_size=512", "workers there: 2"))
    assert notes(caught.value) in ("worker 1", "worker 3") and caught.value.exit_code == 1


@pytest.mark.parametrize(("workers", "rank", "iteration"), [*on_devices((1, 0, 3)), *on_devices((3, 1, 1), count=2)])
def test_no_memory_in_a_round_ends_the_run_and_loses_nothing(
    workers: int, rank: int, iteration: int, tmp_path: Path
) -> None:
    callbacks = [Checkpoint(every_iterations=1), At(iteration, fill, rank)]
    text = f"device {rank % 2} .*batch_size=16"
    made = wrapper(workers, callbacks=callbacks, run=tmp_path, averaging_frequency=2)
    with made, pytest.raises(DeviceError, match=text) as caught:
        made.fit(loader(), 2)
    assert f"worker {rank} (cupy, device {rank % 2}), epoch 1, " in notes(caught.value)
    assert workers_have_ended()
    kept.clear()
    unlimited()
    with wrapper(workers, averaging_frequency=2) as again:
        again.restore(tmp_path / "checkpoints")
        assert again.trainer.iteration == iteration
        again.fit(loader(), 1)


@on_standin
def test_no_memory_in_an_evaluation_is_reported() -> None:
    import cupy

    with wrapper() as made:
        made.fit(loader(64), 1)
        with cupy.cuda.Device(1):
            limit_pools([1], cupy.get_default_memory_pool().used_bytes() + (1 << 14))
        with pytest.raises(DeviceError, match="device 1 .*batch_size=200") as caught:
            made.evaluate(stripes(600), batch_size=200)
    assert "worker 1" in notes(caught.value)


# a device that is lost ------------------------------------------------------------------------------------------------


@on_standin
@pytest.mark.parametrize("after", [0, 13, 33, 39, 41])
def test_a_lost_device_ends_the_run(after: int) -> None:
    """`after` counts the device's operations: the loss comes in a kernel, in a copy or just before a collective."""
    made = wrapper(2, callbacks=[At(1, lambda: active().lose(1, after), rank=1)])
    with made, pytest.raises(DeviceError, match=LOST) as caught:
        made.fit(loader(), 2)
    assert "worker 1 (cupy, device 1), epoch 1, " in notes(caught.value)
    assert workers_have_ended()


@on_standin
@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_a_device_lost_before_a_collective_ends_all_workers(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device never joins the collective: each rank of it is aborted, and the others stop waiting.

    late_s: lets the other hosts run ahead.
    """
    really = DeviceMeans._sum_here

    def lost(self: DeviceMeans, *arguments: Any) -> None:
        if self.rank == 1 and made.trainer.iteration == 2:
            active().lose(1)
            time.sleep(late_s)
        really(self, *arguments)

    monkeypatch.setattr(DeviceMeans, "_sum_here", lost)
    made = wrapper(2)
    with made, pytest.raises(DeviceError, match=LOST):
        made.fit(loader(), 2)
    assert not any(line.stuck for line in active().lines) and workers_have_ended()


@on_standin
@pytest.mark.parametrize("sums", [0, 1])
def test_a_worker_that_waits_for_its_device_is_aborted(sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker fails before a sum, and the other synchronizes after it: in the first sum, and on its way out."""
    made, really, done = [], NcclSum.sum, [0, 0]

    def failing(self: NcclSum, arrays: Any) -> None:
        rank = self._backend.device
        done[rank] += 1
        if rank == 1 and done[rank] > sums:
            raise ValueError("on purpose")
        really(self, arrays)

    def task(communicator: Any) -> None:
        backend = create_backend("cupy", "double", communicator.rank)
        backend.activate()
        communicator.attach(backend, "nccl")
        try:
            communicator.allreduce_mean([backend.asarray(np.full(9, 1.0))], 1.0)
        finally:
            if communicator.rank == 0:
                backend.synchronize()
                made.append(communicator.rank)

    monkeypatch.setattr(NcclSum, "sum", failing)
    with ThreadLauncher(2, 20) as launcher, pytest.raises(ValueError):
        launcher.run(task)
    assert made == [0] and workers_have_ended()


@on_standin
@pytest.mark.parametrize(
    ("workers", "devices", "reduce"),
    [(1, [1], "auto"), (3, [0, 1], "device"), (4, [0, 1], "host")],
)
def test_a_lost_device_ends_the_run_with_every_way_to_reduce(workers: int, devices: list[int], reduce: str) -> None:
    model = Model(stripes_network(), Image(8, 8, 1), create_backend("cupy", device=devices[0]), seed=3)
    callbacks = [At(2, lambda: active().lose(1, 7), rank=int(workers > 1))]
    with (
        ParallelWrapper(
            model, workers, 1, 4, devices=devices, reduce=reduce, callbacks=callbacks, timeout_s=20
        ) as made,
        pytest.raises(DeviceError, match=LOST) as caught,
    ):
        made.fit(loader(), 2)
    assert workers_have_ended()
    assert "(cupy, device 1), epoch 1, " in notes(caught.value)


@on_standin
def test_an_illegal_address_keeps_its_traceback() -> None:
    """A wrong address is a bug in a kernel, not a failing device."""
    wrong = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    made = wrapper(2, callbacks=[At(2, lambda: active().lose(1, 3, wrong), rank=1)])
    with made, pytest.raises(RuntimeError, match="cudaErrorIllegalAddress") as caught:
        made.fit(loader(), 2)
    assert not isinstance(caught.value, DeviceError) and "worker 1 (cupy, device 1)" in notes(caught.value)


# workers that are late, dead, or have less to do ----------------------------------------------------------------------


def averaged(devices: int, task: Any, timeout_s: float = 20.0) -> list[Any]:
    """Means over NCCL, one worker for each device, each from `task(communicator, backend, mean)`."""
    found: list[Any] = [None] * devices

    def work(communicator: Any) -> None:
        backend = create_backend("cupy", "double", communicator.rank)
        backend.activate()
        communicator.attach(backend, "nccl")

        def mean(value: float, weight: float = 1.0) -> float:
            vector = backend.asarray(np.full(9, value))
            communicator.allreduce_mean([vector], weight)
            return float(backend.to_host(vector)[0])

        found[communicator.rank] = task(communicator, mean)
        backend.synchronize()

    with ThreadLauncher(devices, timeout_s) as launcher:
        launcher.run(work)
    return found


@on_standin
@pytest.mark.parametrize(("dead", "means"), [(0, 2), (1, 0)])
def test_a_collective_does_not_wait_for_a_dead_worker(dead: int, means: int) -> None:
    def task(communicator: Any, mean: Any) -> None:
        for _ in range(means):
            mean(1.0)
        if communicator.rank == dead:
            raise ValueError("the worker is dead")
        mean(1.0)

    with pytest.raises(ValueError):
        averaged(2, task)
    assert workers_have_ended()


@on_standin
def test_a_worker_that_never_arrives_is_named_in_the_timeout() -> None:
    def task(communicator: Any, mean: Any) -> None:
        mean(1.0)
        if communicator.rank == 1:
            time.sleep(2)
        mean(1.0)

    with pytest.raises(WorkerTimeout, match="worker 0"):
        averaged(2, task, timeout_s=0.5)


@on_standin
def test_workers_with_different_numbers_of_batches_equal_the_host() -> None:
    """Nine batches for two workers: in the last round one of them has none."""
    found = {}
    for name in ("cupy", "numpy"):
        model = Model(stripes_network(), Image(8, 8, 1), create_backend(name, "double"), seed=3)
        with ParallelWrapper(model, 2, 1, 0, timeout_s=20, reduce="nccl" if name == "cupy" else "auto") as made:
            made.fit(Loader(stripes(8 * 16 + 5), 16, seed=1), 2)
        found[name] = model.weights()
    for name, weight in found["numpy"].items():
        np.testing.assert_allclose(found["cupy"][name], weight, rtol=0, atol=1e-10)


# pools ----------------------------------------------------------------------------------------------------------------


@on_standin
@pytest.mark.parametrize("late", [0, 2])
def test_one_worker_per_device_trims_its_pool_between_two_barriers(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker on each device trims; no worker continues before all pools are trimmed."""
    from cupynet.backend.cuda import gpus

    events: list[tuple[str, Any]] = []

    def trim(devices: list[int], device_above: int | None, pinned_above: int | None) -> None:
        time.sleep(0.1 * devices[0])
        events.append(("trims", (devices, device_above, pinned_above)))

    def work(communicator: Any) -> None:
        backend = create_backend("cupy", "float", communicator.rank % 2)
        backend.activate()
        pools = Pools([0, 1, 0], device_above=0, pinned_above=1)
        view: Any = SimpleNamespace(rank=communicator.rank, world=communicator)
        pools.start(view, None)
        time.sleep(0.1 * (communicator.rank == late))
        events.append(("comes", communicator.rank))
        pools.on_epoch_end(view, cast(Any, None))
        events.append(("goes on", communicator.rank))

    monkeypatch.setattr(gpus, "trim_pools", trim)
    with ThreadLauncher(3, 20) as launcher:
        launcher.run(work)
    assert [name for name, _ in events] == ["comes"] * 3 + ["trims"] * 2 + ["goes on"] * 3
    assert events[3:5] == [("trims", ([0], 0, 1)), ("trims", ([1], 0, None))]


@on_standin
def test_pools_are_trimmed_after_every_epoch() -> None:
    """Memory above the bound is freed on every device; without a bound it is kept."""
    kept_then: dict[bool, list[int]] = {True: [], False: []}

    class Look(Callback):
        every_rank = True

        def __init__(self, trims: bool) -> None:
            self.trims = trims

        def on_epoch_end(self, trainer: Trainer, record: Any) -> None:
            import cupy

            kept_then[self.trims].append(cupy.get_default_memory_pool().free_bytes())

    for trims in (True, False):
        pools = Pools([0, 1], device_above=1 << 16 if trims else None)
        spare = [At(8, lambda: active().pools[0].malloc(1 << 20), rank) for rank in (0, 1)]
        with wrapper(2, callbacks=[*spare, pools, Look(trims)]) as made:
            made.callbacks.sort(key=lambda each: isinstance(each, Look))
            made.fit(loader(), 1)
    assert max(kept_then[True]) <= 1 << 16 and min(kept_then[False]) >= 1 << 20


@pytest.mark.usefixtures("devices")
def test_arrays_of_a_failed_call_are_freed() -> None:
    """Memory is freed even while the error is referenced."""
    backend, gone = create_backend("cupy"), []

    def allocates() -> None:
        array = backend.allocate((3,), np.float32)
        gone.append(weakref.ref(array))
        backend.allocate((1 << 40,), np.float32)

    with pytest.raises(DeviceError, match="4,398,046,511,104 bytes") as caught:  # noqa: SIM117
        with translate_device_errors(backend, Placement(1, (0,)), 0, None):
            allocates()
    assert gone[0]() is None and caught.value.exit_code == 1


@on_standin
def test_pool_statistics_after_a_fit() -> None:
    import cupy

    limit_pools([0, 1], None)
    limit_pools([1], 1 << 28)
    kept = [cupy.cuda.alloc_pinned_memory(1 << 20) for _ in range(3)]
    kept.clear()
    pools = Pools([0, 1, 0])
    with wrapper(3, callbacks=[pools]) as made:
        made.warm_up(16)
        made.fit(loader(), 2)
    first, second = pools.found
    assert (first["device"], first["rank"], first["limit_bytes"]) == ("cuda:0", 0, None)
    assert (second["device"], second["rank"], second["limit_bytes"]) == ("cuda:1", 1, 1 << 28)
    weights = 4 * made.model.params.count
    for found, workers in ((first, 2), (second, 1)):
        assert 3 * workers * weights < found["used_bytes"] <= found["held_bytes"] < 1 << 28
        assert found["pinned_blocks"] >= 3


@pytest.mark.usefixtures("devices")
def test_pool_statistics_include_memory_held_before_trimming() -> None:
    """A large array is allocated and freed in the last round of an epoch, and the pools are emptied after it."""
    import cupy

    gc.collect()  # backends of tests before this one
    trim_pools([0], 0, None)
    before = cupy.get_default_memory_pool().used_bytes()
    pools = Pools([0], device_above=0)
    with wrapper(1, devices=[0], callbacks=[At(3, lambda: cupy.zeros(1 << 23)), pools]) as made:
        made.fit(loader(48), 3)
    assert pools.found[0]["held_bytes"] - before > 64 << 20 > pools.found[0]["used_bytes"] - before
    assert cupy.get_default_memory_pool().total_bytes() - before < 64 << 20


def test_every_process_manages_its_own_pools() -> None:
    pools = Pools([0, 0], processes=True)
    assert [pools._manages(rank) for rank in (0, 1)] == [True, True]
    assert [Pools([0, 0, 1])._manages(rank) for rank in (0, 1, 2)] == [True, False, True]


@on_standin
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_nccl_connection_ends_all_workers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers are connected and wait in their first sum on the device, which no error reaches."""
    from cupy.cuda import nccl

    original = nccl.NcclCommunicator

    def connected(size: int, identifier: Any, place: int) -> Any:
        made = original(size, identifier, place)
        if place == rank:
            kept.append(made)  # its end is never signalled
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: on purpose")
        return made

    monkeypatch.setattr(nccl, "NcclCommunicator", connected)
    began = time.monotonic()
    with pytest.raises(RuntimeError), wrapper(devices=[0, 1]) as made:
        made.fit(loader(), 1)
    assert time.monotonic() - began < 15 and workers_have_ended()
    kept.pop().abort()


def test_an_allocation_that_fails_names_batch_size_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynet.backend import device as base

    def forward(self: Layer, x: Any, context: Any) -> Any:
        raise MemoryError("Unable to allocate 5.6 GiB")

    monkeypatch.setattr(base, "memory", lambda: (4 * 10**9, "this process may use"))
    monkeypatch.setattr(Dense, "forward", forward)
    with (
        ParallelWrapper(small_model(), 2, 1) as one,
        pytest.raises(DeviceError, match="5.6 GiB.* 4.0 GB.* batch_size=4"),
    ):
        one.fit(small_dataset(12), batch_size=4)
