"""The stand-in's pools: CuPy's block sizes and limits, and misuses of memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.standin import installed
from tests.standin.errors import BadLaunch, Overrun, Unordered
from tests.standin.machine import active
from tests.standin.memory import Chunk
from tests.standin.planted import caught, kept

pytestmark = pytest.mark.standin


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def test_a_pool_rounds_keeps_and_gives_back(cupy: Any) -> None:
    pool = cupy.get_default_memory_pool()
    x = cupy.empty(100, np.uint8)
    assert (pool.used_bytes(), pool.free_bytes(), pool.total_bytes(), pool.n_free_blocks()) == (512, 0, 512, 0)
    assert x.data.ptr % 512 == 0 and x[3:].data.ptr == x.data.ptr + 3 and x.data.mem.size == 512
    y = x[:10]
    del x
    assert pool.used_bytes() == 512  # a view keeps it
    del y
    assert (pool.used_bytes(), pool.free_bytes(), pool.n_free_blocks()) == (0, 512, 1)
    with cupy.cuda.Device(1):
        assert pool.total_bytes() == 0
        pool.free_all_blocks()
    assert pool.total_bytes() == 512
    pool.free_all_blocks()
    assert (pool.total_bytes(), pool.n_free_blocks()) == (0, 0)


@pytest.mark.parametrize("size", [4, 1 << 18, (1 << 18) + 3])
def test_unwritten_memory_is_nan_in_blocks_of_any_size(cupy: Any, size: int) -> None:
    """What one block was written with is in no other, and not in the next one at its place."""
    for _ in range(2):
        x, y = cupy.empty(size, np.float32), cupy.empty(size, np.float32)
        assert np.isnan(x._view).all()
        x[...] = 1
        assert np.isnan(y._view).all() and (x._view == 1).all()
        del x, y
        gc.collect()


def test_a_pool_has_a_limit_on_each_device(cupy: Any) -> None:
    pool = cupy.get_default_memory_pool()
    pool.set_limit(size=2048)
    assert pool.get_limit() == 2048
    x = cupy.empty(1024, np.uint8)
    out_of_memory = cupy.cuda.memory.OutOfMemoryError
    with pytest.raises(out_of_memory, match="2,048 bytes"):
        cupy.empty(2048, np.uint8)
    assert issubclass(out_of_memory, MemoryError)
    with cupy.cuda.Device(1):
        assert pool.get_limit() == 0
        cupy.empty(4096, np.uint8)
        pool.set_limit(fraction=0.5)
        assert pool.get_limit() == cupy.cuda.runtime.memGetInfo()[1] // 2
    del x
    cupy.empty(2048, np.uint8)  # what is kept is given back first
    for wrong in ({"size": 1, "fraction": 0.5}, {"fraction": 1.5}, {"size": -1}):
        with pytest.raises(ValueError):
            pool.set_limit(**wrong)


def test_a_device_has_so_much_memory() -> None:
    with installed(devices=1, memory=4096):
        import cupy

        x = cupy.empty(3000, np.uint8)
        assert cupy.cuda.Device(0).mem_info == (1024, 4096)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(1025, np.uint8)
        del x
        cupy.empty(4096, np.uint8)


def test_an_array_does_not_reach_behind_its_memory(cupy: Any) -> None:
    pointer = cupy.cuda.MemoryPool().malloc(16)
    assert cupy.ndarray((4,), np.float32, pointer).data.ptr == pointer.ptr
    with caught(Overrun):
        cupy.ndarray((5,), np.float32, pointer)


@pytest.mark.parametrize(("byte", "side"), [(-1, "before"), (24, "behind"), (511, "behind"), (530, "behind")])
def test_writes_outside_a_block_are_found_when_it_is_freed(byte: int, side: str, cupy: Any) -> None:
    import ctypes

    x = cupy.zeros(3)
    with kept(Overrun):
        ctypes.c_uint8.from_address(x.data.ptr + byte).value = 1
        del x
    y = cupy.zeros(3)
    ctypes.c_uint8.from_address(y.data.ptr + 23).value = 1  # its own
    del y
    assert active().misuses == []


def pinned_array(cupy: Any) -> Any:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(24), np.float64, 3)


def test_pinned_memory_is_not_changed_while_it_is_sent(cupy: Any) -> None:
    host, stream = pinned_array(cupy), cupy.cuda.Stream(non_blocking=True)
    host[...] = 1
    with stream:
        x = cupy.asarray(host)
        event = stream.record()
        host[0] = 2
        with caught(Unordered):
            stream.synchronize()
        x.set(host)
        event = stream.record()
        assert float(x.sum()) == 4
        x.set(host)
        event.synchronize()  # of the copy before
        x.set(host)
        stream.record().synchronize()
        host[0] = 3
        stream.synchronize()
    ordinary = np.ones(3)
    y = cupy.asarray(ordinary)
    ordinary[0] = 2  # CuPy has copied it before
    assert float(y.sum()) == 3


def test_a_fetch_into_pinned_memory_is_there_after_a_wait(cupy: Any) -> None:
    host, stream = pinned_array(cupy), cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray(np.arange(3.0))
        x.get(out=host, blocking=False)
        assert np.isnan(host).all()
        x[...] = 7  # after it
        stream.record().synchronize()
        assert host.tolist() == [0, 1, 2]


def test_a_copy_by_addresses_goes_from_pinned_memory_in_the_streams_order(cupy: Any) -> None:
    runtime, stream, host = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True), pinned_array(cupy)
    to_device = runtime.memcpyHostToDevice
    host[...] = 3, 4, 5
    with stream:
        x = cupy.empty(3)
        runtime.memcpyAsync(x.data.ptr + 8, host.ctypes.data, 16, to_device, stream.ptr)
        runtime.memcpyAsync(x.data.ptr, host.ctypes.data + 16, 8, to_device, stream.ptr)
        assert x.get().tolist() == [5, 3, 4]
        host[0] = 6
        runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 8, to_device, stream.ptr)
    with caught(Unordered):
        x.sum()
    stream.synchronize()
    assert float(x.sum()) == 13
    pageable = np.ones(3)
    for source, size, kind, error in (
        (pageable, 24, to_device, BadLaunch),
        (host, 24, 2, BadLaunch),
        (host, 32, to_device, Overrun),
    ):
        with caught(error):
            runtime.memcpyAsync(x.data.ptr, source.ctypes.data, size, kind, stream.ptr)


def test_pinned_memory_is_not_given_back_while_it_is_sent(cupy: Any) -> None:
    host, stream = pinned_array(cupy), cupy.cuda.Stream(non_blocking=True)
    host[...] = 1
    with stream:
        x = cupy.asarray(host)
        with kept(Unordered):
            del host
        host = pinned_array(cupy)
        host[...] = 2
        x.set(host)
        stream.synchronize()
        del host
        assert float(x.sum()) == 6 and active().misuses == []


def test_a_block_that_is_split_is_not_merged_by_the_garbage_collector(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays in a cycle are freed when Python collects; here, at the worst moment."""
    make = Chunk.__init__

    def make_and_collect(*arguments: Any) -> None:
        make(*arguments)
        if gc.isenabled():
            gc.collect()

    whole = cupy.zeros(3 * 64)
    del whole  # a free block of three units
    first, last = cupy.zeros(2 * 64), cupy.zeros(64)
    cycle: list[Any] = [last]
    cycle.append(cycle)
    del first, last, cycle  # two units are free; the third will be when Python collects
    monkeypatch.setattr(Chunk, "__init__", make_and_collect)
    arrays = [cupy.zeros(size) for size in (32, 32, 32)]
    assert [array.get().sum() for array in arrays] == [0] * 3
    del arrays
    gc.collect()
    pool = cupy.get_default_memory_pool()
    assert pool.used_bytes() == 0 and pool.free_bytes() == pool.total_bytes()
