"""The stand-in's streams: missing order is found, and every way to order is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.standin.errors import Unordered
from tests.standin.machine import active
from tests.standin.planted import caught, kept

pytestmark = pytest.mark.standin


@pytest.fixture
def streams(cupy: Any) -> list[Any]:
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


@pytest.mark.smoke
def test_what_one_stream_writes_is_not_used_by_another(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    with a:
        x = cupy.zeros(3)
    with b:
        with caught(Unordered):
            x.sum()
        with caught(Unordered):
            x[...] = 1
    a.synchronize()


def test_what_one_stream_reads_is_only_read_by_another(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    with a:
        x = cupy.zeros(3)
        a.synchronize()
        y = x + 1
    with b:
        z = x + 1
        with caught(Unordered):
            x[...] = 2
    cupy.cuda.Device().synchronize()
    assert float((y + z).sum()) == 6


def test_an_event_that_was_recorded_too_soon_orders_nothing(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    event = a.record()
    with a:
        x = cupy.zeros(3)
    b.wait_event(event)
    b.wait_event(cupy.cuda.Event())  # never recorded
    with b, caught(Unordered):
        x.sum()
    a.synchronize()


def test_the_null_stream_and_blocking_streams_wait_for_each_other(cupy: Any, streams: list[Any]) -> None:
    blocking, free = cupy.cuda.Stream(), streams[0]
    x = cupy.zeros(3)
    with blocking:
        x += 1
    x += 1
    with free, caught(Unordered):
        x.sum()
    with blocking:
        assert float(x.sum()) == 6


def test_memory_in_use_by_another_stream_is_not_freed(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    for waits in (False, True):
        with a:
            arrays = [cupy.zeros(3)]
        b.wait_event(a.record())
        with b:
            y = arrays[0] + 1
        if waits:
            a.wait_event(b.record())
            arrays.clear()
        else:
            with kept(Unordered):
                arrays.clear()
        b.synchronize()
        del y
    assert active().misuses == []


def test_freed_memory_is_reused_on_the_same_stream_only(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    pool = cupy.get_default_memory_pool()
    with a:
        cupy.zeros(1000)
    with b:
        y = cupy.zeros(1000)
    assert pool.n_free_blocks() == 1 and pool.total_bytes() == 2 * 8192
    with a:
        x = cupy.zeros(1000)
    assert pool.n_free_blocks() == 0
    del x, y


def test_a_lost_device_refuses_all_calls(cupy: Any) -> None:
    """No misuse of the program."""
    machine, runtime = active(), cupy.cuda.runtime
    x = cupy.zeros(3)
    machine.lose(0, after=1)
    x += 1  # the last operation of the device
    calls: list[Callable[[], Any]] = [x.sum, x.get, lambda: cupy.zeros(1 << 20), cupy.cuda.Event().record]
    calls += [cupy.cuda.Stream, runtime.memGetInfo, cupy.cuda.Stream.null.synchronize]
    for call in calls:
        with pytest.raises(runtime.CUDARuntimeError):
            call()
    with cupy.cuda.Device(1):
        assert float(cupy.zeros(3).sum()) == 0
    assert machine.misuses == []
