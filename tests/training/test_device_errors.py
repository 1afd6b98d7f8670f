"""Devices that fail while workers use them, and workers that fail, on CuPy's stand-in and on GPUs.

Nothing hangs, the first failure is reported in one line, and CuPy is not misused during shutdown.
"""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cupynet import Dense, DeviceError, Image, Loader, Model, Nesterov
from cupynet.backend import create_backend, device_count
from cupynet.backend import device as base
from cupynet.backend.cuda import gpus
from cupynet.backend.cuda.gpus import limit_pools, trim_pools
from cupynet.parallel import Placement
from cupynet.training import Checkpoint, ParallelWrapper, Pools
from cupynet.training.device_errors import translate_device_errors
from tests.standin.machine import active
from tests.support.backends import on_devices
from tests.support.training import At, small_dataset, small_model, stripes, stripes_network

on_standin = pytest.mark.standin


def wrapper(workers: int = 2, **changes: Any) -> ParallelWrapper:
    usual = {"averaging_frequency": 1, "reduce": "nccl", "optimizer": Nesterov(0.02), "prefetch_buffer": 0}
    options: dict[str, Any] = usual | changes
    first = options.get("devices", [0])[0]
    model = Model(stripes_network(), Image(8, 8, 1), create_backend("cupy", device=first), seed=3)
    return ParallelWrapper(model, workers, timeout_s=20, **options)


def loader(count: int = 230) -> Loader:
    return Loader(stripes(count), 16, seed=1)


def notes(error: BaseException) -> str:
    return "; ".join(getattr(error, "__notes__", []))


def failure(made: ParallelWrapper, kind: type[Exception] = DeviceError) -> Exception:
    """Return the error of a fit, after which all workers have ended."""
    with made, pytest.raises(kind) as caught:
        made.fit(loader(), epochs=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cupynet worker")]
    return caught.value


kept: list[Any] = []


@pytest.fixture(autouse=True)
def forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    kept.clear()
    if request.node.get_closest_marker("gpu"):  # later tests use the same pools
        unlimited()


def unlimited() -> None:
    limit_pools(list(range(device_count("cupy"))), 0)


def fill() -> None:
    """Allocate all memory that is left to the current device's pool."""
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes())
    for size in (1 << power for power in (24, 18, 12, 9)):  # each failed allocation collects garbage
        while True:
            try:
                kept.append(cupy.cuda.alloc(size))
            except cupy.cuda.memory.OutOfMemoryError:
                break


@on_standin
def test_out_of_memory_in_the_warm_up_names_the_device_and_what_to_lower() -> None:
    limit_pools([0, 1], 1 << 30)
    with wrapper(4) as made:
        limit_pools([1], 1 << 18)
        with pytest.raises(DeviceError) as caught:
            made.warm_up(512)
    for part in ("device 1", "262.1 kB", "batch_size=512", "workers on this device: 2"):
        assert part in str(caught.value)
    assert notes(caught.value) in ("worker 1", "worker 3") and caught.value.exit_code == 1


@pytest.mark.parametrize(("workers", "rank", "iteration"), [*on_devices((1, 0, 3)), *on_devices((3, 1, 1), count=2)])
def test_out_of_memory_ends_a_run_that_can_be_resumed(workers: int, rank: int, iteration: int, tmp_path: Path) -> None:
    callbacks = [Checkpoint(every_iterations=1), At(iteration, fill, rank)]
    error = failure(wrapper(workers, callbacks=callbacks, run=tmp_path, averaging_frequency=2))
    assert f"worker {rank} (cupy, device {rank % 2}), epoch 1, " in notes(error)
    kept.clear()
    unlimited()
    with wrapper(workers, averaging_frequency=2) as again:
        again.restore(tmp_path / "checkpoints")
        assert again.trainer.iteration == iteration
        again.fit(loader(), epochs=1)


def test_out_of_memory_on_a_cpu_names_the_batch_size_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*arguments: Any) -> Any:
        raise MemoryError("Unable to allocate 5.6 GiB")

    monkeypatch.setattr(base, "memory", lambda: (4 * 10**9, "this process may use"))
    monkeypatch.setattr(Dense, "forward", forward)
    with ParallelWrapper(small_model(), 2, 1) as one, pytest.raises(DeviceError) as caught:
        one.fit(small_dataset(12), batch_size=4)
    assert all(part in str(caught.value) for part in ("5.6 GiB", "4.0 GB", "batch_size=4"))


@pytest.mark.usefixtures("devices")
def test_arrays_of_a_call_that_ran_out_of_memory_are_freed() -> None:
    backend = create_backend("cupy")
    gone: list[weakref.ref[Any]] = []

    def allocate() -> None:
        array = backend.allocate((3,), np.float32)
        gone.append(weakref.ref(array))
        backend.allocate((1 << 40,), np.float32)

    with pytest.raises(DeviceError) as caught, translate_device_errors(backend, Placement(1, (0,)), 0, None):
        allocate()
    assert gone[0]() is None and caught.value.exit_code == 1


@on_standin
@pytest.mark.parametrize("workers", [1, 2])
def test_the_memory_of_a_failed_fit_is_freed_after_its_last_step(workers: int) -> None:
    """Otherwise, the stand-in reports that another array could get memory that a kernel may still use."""

    def fail() -> None:
        raise ZeroDivisionError

    failure(wrapper(workers, averaging_frequency=2, callbacks=[At(3, fail)]), ZeroDivisionError)
    gc.collect()


@on_standin
def test_a_wrapper_may_be_garbage_collected_during_a_capture() -> None:
    """Python may collect garbage at any time, and waiting for a stream during its capture is an error."""
    import cupy

    made = wrapper(2)
    made.fit(loader(64))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        del made
        gc.collect()
        stream.end_capture()


@on_standin
@pytest.mark.parametrize(
    ("workers", "devices", "reduce", "after"),
    [
        (2, [0, 1], "nccl", 0),  # in a kernel
        (2, [0, 1], "nccl", 33),  # in a copy
        (2, [0, 1], "nccl", 41),  # just before a collective
        (1, [1], "auto", 7),
        (3, [0, 1], "device", 7),
        (4, [0, 1], "host", 7),
    ],
)
def test_a_lost_device_ends_the_run_and_is_named(workers: int, devices: list[int], reduce: str, after: int) -> None:
    """The device is lost after `after` operations."""
    callbacks = [At(1, lambda: active().lose(1, after), rank=int(workers > 1))]
    error = failure(wrapper(workers, devices=devices, reduce=reduce, callbacks=callbacks))
    assert "device 1" in str(error) and "(cupy, device 1), epoch 1, " in notes(error)


@on_standin
def test_an_illegal_address_is_a_bug_and_not_a_failing_device() -> None:
    wrong = "cudaErrorIllegalAddress: an illegal memory access was encountered"
    error = failure(wrapper(callbacks=[At(2, lambda: active().lose(1, 3, wrong), rank=1)]), RuntimeError)
    assert "cudaErrorIllegalAddress" in str(error) and "worker 1 (cupy, device 1)" in notes(error)
    assert not isinstance(error, DeviceError)


@on_standin
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_nccl_connection_ends_all_workers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are connected and wait on the device in their first sum, where no error can reach them."""
    from cupy.cuda import nccl

    connect = nccl.NcclCommunicator

    def connected(size: int, identifier: Any, place: int) -> Any:
        made = connect(size, identifier, place)
        if place == rank:
            kept.append(made)  # its completion is never signalled
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: on purpose")
        return made

    monkeypatch.setattr(nccl, "NcclCommunicator", connected)
    began = time.monotonic()
    failure(wrapper(devices=[0, 1]), RuntimeError)
    assert time.monotonic() - began < 15
    kept.pop().abort()


@pytest.mark.parametrize(
    ("rank", "processes", "trimmed"),
    [(0, False, [([0], 0, 1)]), (1, False, [([1], 0, None)]), (2, False, []), (2, True, [([0], 0, 1)])],
)
def test_one_worker_trims_each_memory_pool_between_two_barriers(
    rank: int, processes: bool, trimmed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(gpus, "trim_pools", lambda *given: events.append(given))
    monkeypatch.setattr(Pools, "_measure", lambda self: None)
    pools = Pools([0, 1, 0], processes=processes, device_above=0, pinned_above=1)
    world = SimpleNamespace(barrier=lambda: events.append("barrier"))
    trainer: Any = SimpleNamespace(rank=rank, world=world)
    pools.start(trainer, None)
    pools.on_epoch_end(trainer, cast(Any, None))
    assert events == ["barrier", *trimmed, "barrier"]


@pytest.mark.usefixtures("devices")
def test_statistics_of_memory_pools_include_memory_held_before_trimming() -> None:
    """A large array is allocated and freed in an epoch's last round, after which the pools are emptied."""
    import cupy

    gc.collect()  # frees backends of earlier tests
    trim_pools([0], 0, None)
    before = cupy.get_default_memory_pool().used_bytes()
    pools = Pools([0], device_above=0)
    with wrapper(1, devices=[0], callbacks=[At(3, lambda: cupy.zeros(1 << 23)), pools]) as made:
        made.fit(loader(48), epochs=3)
    assert pools.found[0]["held_bytes"] - before > 64 << 20 > pools.found[0]["used_bytes"] - before
    assert cupy.get_default_memory_pool().total_bytes() - before < 64 << 20
