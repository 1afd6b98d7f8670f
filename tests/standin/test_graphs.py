"""The stand-in's graphs: captured work runs at each launch; what cannot be captured is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.standin.errors import Freed, InCapture, Unordered, Unwritten
from tests.standin.planted import caught

pytestmark = pytest.mark.standin


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.smoke
def test_captured_work_runs_when_the_graph_is_launched(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones(3), cupy.zeros(3)
        stream.begin_capture()
        y += x
        cupy.multiply(x, 2, out=x)
        graph = stream.end_capture()
        assert y.get().tolist() == [0] * 3
        graph.launch()
        graph.launch(stream)
        assert y.get().tolist() == [3] * 3 and x.get().tolist() == [4] * 3


REFUSED = {
    "a number": lambda cupy, x, y, stream: float(x[0, 0]),
    "a truth": lambda cupy, x, y, stream: bool(x[0, 0]),
    "a copy to the host": lambda cupy, x, y, stream: x.get(blocking=False),
    "a copy from the host": lambda cupy, x, y, stream: x.set(np.ones((2, 2))),
    "asarray": lambda cupy, x, y, stream: cupy.asarray(np.ones(3)),
    "a synchronisation": lambda cupy, x, y, stream: stream.synchronize(),
    "of the device": lambda cupy, x, y, stream: cupy.cuda.Device().synchronize(),
    "done": lambda cupy, x, y, stream: stream.done,
    "a wait": lambda cupy, x, y, stream: stream.wait_event(cupy.cuda.Event()),
    "an allocation": lambda cupy, x, y, stream: cupy.empty(3),
    "a result": lambda cupy, x, y, stream: x + 1,
    "a product": lambda cupy, x, y, stream: cupy.matmul(x, x, out=y),
    "a mask": lambda cupy, x, y, stream: x[x > 0],
    "another capture": lambda cupy, x, y, stream: stream.begin_capture(),
}


@pytest.mark.parametrize("what", REFUSED.values(), ids=REFUSED)
def test_calls_that_cannot_be_captured_are_refused(what: Any, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones((2, 2)), cupy.ones((2, 2))
        stream.begin_capture()
        with caught(InCapture, "while stream .* captures"):
            what(cupy, x, y, stream)
        stream.end_capture()
        what(cupy, x, y, stream)
        if what is REFUSED["another capture"]:
            stream.end_capture()


def test_events_of_a_capture_order_its_own_stream_and_nothing_else(cupy: Any) -> None:
    stream, side = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones(3), cupy.zeros(3)
        stream.begin_capture()
        y += x
        event = stream.record()
        stream.wait_event(event)
        y += x
        for wait in (event.synchronize, lambda: side.wait_event(event)):
            with caught(InCapture, "captur"):
                wait()
        graph = stream.end_capture()
        graph.launch()
        with caught(InCapture, "it was recorded in a capture"):
            event.synchronize()
        event.record()
        event.synchronize()
        assert y.get().tolist() == [2] * 3


def test_cublas_refuses_with_the_error_that_cupy_raises(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones((2, 2)), cupy.ones((2, 2))
        stream.begin_capture()
        with caught(NotImplementedError, "matmul"):
            cupy.matmul(x, x, out=y)
        stream.end_capture()


def test_the_null_stream_cannot_be_captured(cupy: Any) -> None:
    with pytest.raises(RuntimeError, match="cannot capture on the default"):
        cupy.cuda.Stream.null.begin_capture()
    x = cupy.ones(3)
    stream = cupy.cuda.Stream()
    stream.begin_capture()
    with caught(InCapture, "the null stream of device 0 is used while"):
        x += 1
    stream.end_capture()
    x += 1
    with pytest.raises(RuntimeError, match="does not capture"):
        stream.end_capture()


def test_memory_in_a_graph_must_live_as_long_as_it(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones(3), cupy.zeros(3)
        stream.begin_capture()
        y += x
        graph = stream.end_capture()
        graph.launch()
        del x
        with caught(Freed, "add .* uses .*which was freed by"):
            graph.launch()


def test_another_pool_may_be_used_and_its_memory_lives_as_long_as_the_arrays(cupy: Any) -> None:
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    with stream:
        x, y = cupy.ones(3), cupy.zeros(3)
        with cupy.cuda.using_allocator(pool.malloc):
            stream.begin_capture()
            z = x + 1
            y[...] = z * 2
            graph = stream.end_capture()
        with caught(Freed, "uses"):
            graph.launch()  # z * 2 is gone, and the graph still writes there
        del z


def test_a_launch_is_ordered_and_reads_what_was_written(cupy: Any) -> None:
    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with a:
        x, y = cupy.empty(3), cupy.empty(3)
        a.begin_capture()
        cupy.exp(x, out=y)
        graph = a.end_capture()
        with caught(Unwritten, "exp"):
            graph.launch()
        x[...] = 0
    with caught(Unordered, "exp .* not ordered"):
        graph.launch(b)
    b.wait_event(a.record())
    graph.launch(b)
    with caught(Unordered, "not ordered"), a:
        y.sum()
    b.synchronize()
    assert y.get().tolist() == [1] * 3
