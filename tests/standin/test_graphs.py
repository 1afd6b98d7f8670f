"""The stand-in's graphs: captured work runs at each launch; what cannot be captured is refused."""

from __future__ import annotations

from typing import Any

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
    "a copy to the host": lambda cupy, x, y, stream: x.get(blocking=False),
    "a synchronisation": lambda cupy, x, y, stream: stream.synchronize(),
    "a wait": lambda cupy, x, y, stream: stream.wait_event(cupy.cuda.Event()),
    "an allocation": lambda cupy, x, y, stream: cupy.empty(3),
}


@pytest.mark.parametrize("what", REFUSED.values(), ids=REFUSED)
def test_calls_that_cannot_be_captured_are_refused(what: Any, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones((2, 2)), cupy.ones((2, 2))
        stream.begin_capture()
        with caught(InCapture):
            what(cupy, x, y, stream)
        stream.end_capture()
        what(cupy, x, y, stream)


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
            with caught(InCapture):
                wait()
        graph = stream.end_capture()
        graph.launch()
        with caught(InCapture):
            event.synchronize()
        event.record()
        event.synchronize()
        assert y.get().tolist() == [2] * 3


def test_memory_in_a_graph_must_live_as_long_as_it(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.ones(3), cupy.zeros(3)
        stream.begin_capture()
        y += x
        graph = stream.end_capture()
        graph.launch()
        del x
        with caught(Freed):
            graph.launch()


def test_a_launch_is_ordered_and_reads_what_was_written(cupy: Any) -> None:
    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with a:
        x, y = cupy.empty(3), cupy.empty(3)
        a.begin_capture()
        cupy.exp(x, out=y)
        graph = a.end_capture()
        with caught(Unwritten):
            graph.launch()
        x[...] = 0
    with caught(Unordered):
        graph.launch(b)
    b.wait_event(a.record())
    graph.launch(b)
    with caught(Unordered), a:
        y.sum()
    b.synchronize()
    assert y.get().tolist() == [1] * 3
