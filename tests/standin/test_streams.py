"""The stand-in's streams: missing order is found, and every way to order is accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.standin.errors import Unordered
from tests.standin.machine import active
from tests.standin.planted import caught, kept, together

pytestmark = pytest.mark.standin


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def streams(cupy: Any, count: int = 2) -> list[Any]:
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


@pytest.mark.smoke
def test_a_read_of_what_another_stream_writes_must_come_after_it(cupy: Any) -> None:
    a, b = streams(cupy)
    with a:
        x = cupy.zeros(3)
        x += 1
    with b, caught(Unordered, r"add\.reduce \(.*test_streams.py:\d+.* and add \(.*24 bytes"):
        x.sum()
    a.synchronize()


def test_a_write_over_what_another_stream_reads_must_come_after_it(cupy: Any) -> None:
    a, b = streams(cupy)
    with a:
        x = cupy.zeros(3)
        a.synchronize()
        y = x + 1
    with b, caught(Unordered):
        x[...] = 2
    with b:
        z = x + 1  # two that read need no order
    cupy.cuda.Device().synchronize()
    assert float((y + z).sum()) == 6


def test_a_write_over_what_another_stream_writes_must_come_after_it(cupy: Any) -> None:
    a, b = streams(cupy)
    with a:
        x = cupy.zeros(3)
    with b, caught(Unordered):
        x[...] = 1
    a.synchronize()


def by_event(a: Any, b: Any) -> None:
    b.wait_event(a.record())


def by_stream(a: Any, b: Any) -> None:
    a.synchronize()


def by_event_on_the_host(a: Any, b: Any) -> None:
    a.record().synchronize()


def by_device(a: Any, b: Any) -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def by_another_thread(a: Any, b: Any) -> None:
    together(a.synchronize)


def by_a_third_stream(a: Any, b: Any) -> None:
    import cupy

    c = cupy.cuda.Stream(non_blocking=True)
    c.wait_event(a.record())
    b.wait_event(c.record())


@pytest.mark.parametrize(
    "order", [by_event, by_stream, by_event_on_the_host, by_device, by_another_thread, by_a_third_stream]
)
def test_every_way_to_order_two_streams_is_enough(order: Any, cupy: Any) -> None:
    a, b = streams(cupy)
    with a:
        x = cupy.zeros(3)
        x += 1
    order(a, b)
    with b:
        assert float(x.sum()) == 3
        x[...] = 2
    order(b, a)
    with a:
        assert float((x * x).sum()) == 12
    b.synchronize()


def test_an_event_that_was_recorded_too_soon_orders_nothing(cupy: Any) -> None:
    a, b = streams(cupy)
    event = a.record()
    with a:
        x = cupy.zeros(3)
    b.wait_event(event)
    with b, caught(Unordered):
        x.sum()
    b.wait_event(cupy.cuda.Event())  # never recorded
    with b, caught(Unordered):
        x.sum()
    a.synchronize()


def test_other_parts_of_a_block_need_no_order(cupy: Any) -> None:
    a, b = streams(cupy)
    with a:
        x = cupy.zeros(100)
        a.synchronize()
        x[:50] = 1
    with b:
        x[50:] = 2
        with caught(Unordered):
            x[49:51].sum()
        with caught(Unordered):
            x[:50] = 1
    a.synchronize()
    b.synchronize()
    assert float(x.sum()) == 150


def test_the_null_stream_waits_for_blocking_streams_and_they_for_it(cupy: Any) -> None:
    blocking, free = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(3)
    with blocking:
        x += 1
    x += 1
    with blocking:
        assert float(x.sum()) == 6
    blocking.synchronize()
    x += 1
    with free, caught(Unordered):
        x.sum()
    cupy.cuda.Stream.null.synchronize()
    with free:
        x += 1
    with caught(Unordered):
        x.sum()
    free.synchronize()


def test_memory_in_use_by_another_stream_is_not_freed(cupy: Any) -> None:
    a, b = streams(cupy)
    with a:
        x = cupy.zeros(3)
    b.wait_event(a.record())
    with b:
        y = x + 1
    with kept(Unordered):
        del x
    with a:
        x = cupy.zeros(3)
    b.wait_event(a.record())
    with b:
        y += x
    a.wait_event(b.record())
    del x
    b.synchronize()
    assert active().misuses == []


def test_freed_memory_is_reused_on_the_same_stream_only(cupy: Any) -> None:
    a, b = streams(cupy)
    pool = cupy.get_default_memory_pool()
    with a:
        x = cupy.zeros(1000)
        del x
    assert pool.n_free_blocks() == 1
    with b:
        y = cupy.zeros(1000)
    assert pool.n_free_blocks() == 1 and pool.total_bytes() == 2 * pool.used_bytes() == 2 * 8192
    with a:
        x = cupy.zeros(1000)
    assert pool.n_free_blocks() == 0
    del x, y


def test_copies_to_the_host_block_by_default(cupy: Any) -> None:
    a, b = streams(cupy)
    with a:
        x = cupy.zeros(3)
        a.synchronize()
        x.get(blocking=False)
    with b, caught(Unordered):
        x[...] = 1
    with a:
        x.get()
    with b:
        x[...] = 1
    b.synchronize()
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(24), np.float64, 3)
    assert x.get(out=pinned) is pinned and pinned.tolist() == [1, 1, 1]


# a device that fails -------------------------------------------------------------------------------------------------


def test_a_device_that_is_lost_does_nothing_any_more(cupy: Any) -> None:
    machine, runtime = active(), cupy.cuda.runtime
    x = cupy.zeros(3)
    machine.lose(0, after=1)
    x += 1  # the last it does
    asked = [
        lambda: x.sum(), lambda: x.get(), lambda: cupy.zeros(1 << 20), lambda: cupy.cuda.Event().record(),
        lambda: cupy.cuda.Stream(non_blocking=True), runtime.deviceSynchronize, runtime.memGetInfo,
        cupy.cuda.get_current_stream().synchronize,
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(runtime.CUDARuntimeError):
            ask()
    with cupy.cuda.Device(1):
        assert float(cupy.zeros(3).sum()) == 0
    assert machine.misuses == []  # it is no mistake of the program's
