"""The stand-in's memory: pools and their limits, canaries, copies from and to pinned memory."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from tests.standin.errors import BadLaunch, Overrun, Unordered
from tests.standin.planted import caught, kept

pytestmark = pytest.mark.standin


@pytest.mark.parametrize("size", [4, (1 << 18) + 3])
def test_unwritten_memory_is_nan_in_blocks_of_any_size(size: int, cupy: Any) -> None:
    """Also in the next block at the same place."""
    for _ in range(2):
        x, y = cupy.empty(size, np.float32), cupy.empty(size, np.float32)
        x[...] = 1
        assert np.isnan(y.host_view).all() and (x.host_view == 1).all()
        del x, y
        gc.collect()


def test_a_pool_has_a_limit_on_each_device(cupy: Any) -> None:
    pool = cupy.get_default_memory_pool()
    pool.set_limit(size=2048)
    arrays = [cupy.empty(1024, np.uint8)]
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(2048, np.uint8)
    with cupy.cuda.Device(1):
        cupy.empty(4096, np.uint8)
        pool.set_limit(fraction=0.5)
        assert pool.get_limit() == cupy.cuda.runtime.memGetInfo()[1] // 2
    arrays.clear()
    cupy.empty(2048, np.uint8)  # the free block is given back first


def test_an_array_does_not_reach_behind_its_memory(cupy: Any) -> None:
    with caught(Overrun):
        cupy.ndarray((5,), np.float32, cupy.cuda.MemoryPool().malloc(16))


@pytest.mark.parametrize("byte", [-1, 24, 530])
def test_writes_outside_a_block_are_found_when_it_is_freed(byte: int, cupy: Any) -> None:
    x = cupy.zeros(3)
    with kept(Overrun):
        ctypes.c_uint8.from_address(x.data.ptr + byte).value = 1
        del x


# pinned memory --------------------------------------------------------------------------------------------------------


def pinned(cupy: Any, *values: float) -> Any:
    """Numbers in pinned memory."""
    array = np.frombuffer(cupy.cuda.alloc_pinned_memory(8 * len(values)), np.float64, len(values))
    array[...] = values
    return array


def send(cupy: Any, x: Any, host: Any, kind: int = 1) -> None:
    cupy.cuda.runtime.memcpyAsync(x.data.ptr, host.ctypes.data, host.nbytes, kind, cupy.cuda.get_current_stream().ptr)


def test_a_copy_from_pinned_memory_goes_in_the_order_of_its_stream(cupy: Any) -> None:
    host, x = pinned(cupy, 3, 4), cupy.empty(3)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        send(cupy, x[1:], host)
        send(cupy, x, host)
    with caught(Unordered):
        x.sum()
    stream.synchronize()
    assert x.get().tolist() == [3, 4, 4]


def test_pinned_memory_is_not_changed_while_it_is_sent(cupy: Any) -> None:
    host, x = pinned(cupy, 1, 2), cupy.empty(2)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        send(cupy, x, host)
        stream.record().synchronize()
        host[0] = 2
        send(cupy, x, host)
        host[0] = 3
        with caught(Unordered):
            stream.synchronize()


def test_pinned_memory_is_not_given_back_while_it_is_sent(cupy: Any) -> None:
    hosts = [pinned(cupy, 1, 2)]
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.empty(2)
        send(cupy, x, hosts[0])
        with kept(Unordered):
            hosts.clear()


def test_ordinary_memory_is_not_sent_by_address(cupy: Any) -> None:
    with caught(BadLaunch):
        send(cupy, cupy.empty(3), np.ones(3))
