"""The prefetcher: items arrive in order, every failure reaches the consumer, and no thread is left behind."""

import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.data import Prefetcher


def producers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cupynet-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not producers()


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.integers(), max_size=30), st.integers(0, 8))
def test_prefetched_items_arrive_in_order(items: list[int], capacity: int) -> None:
    prefetcher = Prefetcher(items, capacity)
    assert list(prefetcher) == items
    assert list(prefetcher) == []  # the prefetcher stays exhausted
    assert not producers()  # threads have ended without `close`


@pytest.mark.parametrize(
    ("kind", "capacity"), [(ZeroDivisionError, 1), (SystemExit, 1), (KeyboardInterrupt, 0), (GeneratorExit, 3)]
)
def test_an_error_of_a_prefetcher_arrives_once_after_the_items_before_it_and_is_freed(
    kind: type[BaseException], capacity: int
) -> None:
    class Mine(kind):  # type: ignore[misc, valid-type]
        """An error that can be referred to weakly."""

    def failing() -> Iterator[int]:
        yield 1
        yield 2
        raise Mine

    prefetcher = Prefetcher(failing(), capacity)
    assert [next(prefetcher), next(prefetcher)] == [1, 2]
    try:
        next(prefetcher)
    except Mine as error:
        assert "failing" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        kept = weakref.ref(error)
    assert list(prefetcher) == []
    if sys.implementation.name == "cpython":
        assert kept() is None  # freed by reference counting alone


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_no_more_than_capacity_is_prefetched(capacity: int) -> None:
    made, full = [], threading.Event()

    def counted() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            if len(made) == capacity:
                full.set()
            yield i

    with Prefetcher(counted(), capacity) as prefetcher:
        assert not capacity or full.wait(10)
        time.sleep(0.05)  # enough time to produce one too many
        assert len(made) == capacity and len(producers()) == min(capacity, 1)
        assert next(prefetcher) == 0


@pytest.mark.parametrize("capacity", [0, 3])
def test_a_prefetcher_is_closed_while_its_producer_waits_for_room(capacity: int) -> None:
    prefetcher = Prefetcher(iter(int, 1), capacity)  # endless zeros
    assert next(prefetcher) == 0
    prefetcher.close()
    assert not producers()
    prefetcher.close()  # may be called again
    assert list(prefetcher) == []


def test_a_prefetcher_is_closed_while_an_item_is_made() -> None:
    started, released = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        started.set()
        assert released.wait(10)
        yield 1
        raise AssertionError("nothing more was to be made")

    prefetcher = Prefetcher(slow(), 3)
    assert started.wait(10)
    closer = threading.Thread(target=prefetcher.close)
    closer.start()
    released.set()
    closer.join(10)
    assert not closer.is_alive() and list(prefetcher) == []


@pytest.mark.parametrize("waits_in", ["next", "close"])
def test_a_signal_that_the_producer_takes_is_handled_while_the_main_thread_waits_for_it(waits_in: str) -> None:
    """The system may deliver a signal to any thread, but Python's handler needs the main thread."""
    begun, handled, found = threading.Event(), threading.Event(), []

    def items() -> Iterator[bool]:
        if waits_in == "close":
            yield True
        begun.set()
        time.sleep(0.1)  # the main thread is already waiting
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        found.append(handled.wait(20))
        yield found[0]

    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.set())
    try:
        with Prefetcher(items(), 1) as prefetcher:
            assert next(prefetcher)
            assert begun.wait(10)
        assert found == [True]
    finally:
        signal.signal(signal.SIGUSR1, before)
