"""Prefetching: a thread makes items at most `capacity` ahead, while the consumer uses earlier ones.

There are two queues: `items` from the producer to the consumer, and `room` back to the producer, with a permit for each
further item. No put blocks. (A bounded queue.Queue has a lock that is not reentrant, and the finalizer below may run at
any moment; a SimpleQueue is made for that.) The producer's last item is always an end mark, with its error if it had
one, so that the consumer never waits forever. The consumer may be the main thread, which wakes up often: the system may
deliver a signal to any thread, but Python runs signal handlers only in the main thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

from cupynet.core.checks import integer

T = TypeVar("T")

WAKE_S = 0.2  # how often a waiting consumer lets Python run signal handlers


@dataclass(frozen=True)
class _End:
    """The producer's last item: it is done, or it failed with `error`."""

    error: BaseException | None = None


_Items: TypeAlias = "SimpleQueue[T | _End]"
_Room: TypeAlias = "SimpleQueue[None]"


class Prefetcher(Generic[T]):
    """Iterates over `iterable` in a daemon thread, up to `capacity` items ahead of the consumer, in order.

    An exception of the producer is raised once in the consumer, with its traceback, after the preceding items. Supports
    one consumer; `close` may be called from any thread. As a context manager it stops and joins the thread on exit.
    With `capacity` 0 there is no thread.

    Args:
        iterable: makes the items.
        capacity: the most items ahead.
    """

    def __init__(self, iterable: Iterable[T], capacity: int) -> None:
        self.capacity = integer("capacity", capacity, 0, "; 0 makes nothing ahead")
        self._items: _Items[T] = SimpleQueue()
        self._room: _Room = SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._iterator = iter(iterable)
        if self.capacity:
            for _ in range(self.capacity):
                self._room.put(None)
            # The thread holds the queues but not this object: if it is dropped unclosed, this ends the thread.
            weakref.finalize(self, _stop, self._room, self._closed)
            arguments = (self._iterator, self._items, self._room, self._closed)
            self._thread = threading.Thread(target=_produce, args=arguments, name="cupynet-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        item = self._received() if self._thread else next(self._iterator)
        if not isinstance(item, _End):
            if self._thread:
                self._room.put(None)
            return item
        self.close()
        if item.error is None:
            raise StopIteration
        try:
            raise item.error
        finally:
            del item  # the error's traceback holds this frame: avoid a reference cycle

    def _received(self) -> T | _End:
        """Wait for the next item of the thread."""
        while True:
            with suppress(Empty):
                return self._items.get(timeout=WAKE_S)

    def close(self) -> None:
        """Stop the producer after its current item, wait for its thread, and end the iteration."""
        _stop(self._room, self._closed)
        if self._thread:
            while self._thread.is_alive():
                self._thread.join(WAKE_S)
            with suppress(Empty):  # drop unused items and their memory
                while True:
                    self._items.get_nowait()
            self._items.put(_End())  # wakes a consumer that waits while another thread closes

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _produce(iterator: Iterator[T], items: _Items[T], room: _Room, closed: threading.Event) -> None:
    """Make items in the thread while there is room, then the end mark; nothing more once `closed`."""
    try:
        while True:
            room.get()
            if closed.is_set():
                return
            items.put(next(iterator))
    except StopIteration:
        items.put(_End())
    except BaseException as error:
        items.put(_End(error))


def _stop(room: _Room, closed: threading.Event) -> None:
    """Stop the producer, and wake it if it waits for room."""
    closed.set()
    room.put(None)
