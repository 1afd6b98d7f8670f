"""The stand-in's graphs: captured work runs at each launch; what cannot be captured is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.standin.errors import Freed, InCapture, Unordered, Unwritten
from tests.standin.planted import caught

pytestmark = pytest.mark.standin


def captured(stream: Any, work: Callable[[], Any]) -> Any:
    """The graph of `work`, which runs on the current stream."""
    stream.begin_capture()
    work()
    return stream.end_capture()


REFUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a copy to the host": lambda cupy, x, stream: x.get(),
    "a synchronization": lambda cupy, x, stream: stream.synchronize(),
    "a wait": lambda cupy, x, stream: stream.wait_event(cupy.cuda.Event()),
    "an allocation": lambda cupy, x, stream: cupy.empty(3),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_calls_that_cannot_be_captured_are_refused(call: Callable[[Any, Any, Any], Any], cupy: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.ones((2, 2))
        stream.begin_capture()
        with caught(InCapture):
            call(cupy, x, stream)
        stream.end_capture()
        call(cupy, x, stream)


def test_an_event_of_a_capture_orders_nothing_outside_it(cupy: Any) -> None:
    side = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        event = stream.record()
        stream.wait_event(event)
        for wait in (event.synchronize, lambda: side.wait_event(event)):
            with caught(InCapture):
                wait()
        stream.end_capture()
        event.record()
        event.synchronize()


def test_memory_in_a_graph_must_live_as_long_as_it(cupy: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        arrays = [cupy.ones(3)]
        graph = captured(stream, lambda: cupy.add(arrays[0], 1, out=arrays[0]))
        graph.launch()
        arrays.clear()
        with caught(Freed):
            graph.launch()


def test_a_launch_is_ordered_and_reads_what_was_written(cupy: Any) -> None:
    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with a:
        x, y = cupy.empty(3), cupy.empty(3)
        graph = captured(a, lambda: cupy.exp(x, out=y))
        with caught(Unwritten):
            graph.launch()
        x[...] = 0
    with caught(Unordered):
        graph.launch(b)
    b.wait_event(a.record())
    graph.launch(b)
    b.synchronize()
    assert y.get().tolist() == [1] * 3
