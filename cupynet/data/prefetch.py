"""Prefetching: a thread makes items at most `capacity` ahead, while the consumer uses earlier ones.

There are two queues: `items` from the producer to the consumer, and `room` back to the producer, with a permit for each
further item. The producer's last item is always an end mark, with its error if it had one, so that the consumer never
waits forever. The consumer may be the main thread, which wakes up often: the system may deliver a signal to any thread,
but Python runs signal handlers only in the main thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from cupynet.core.checks import integer

T = TypeVar("T")

WAKE_S = 0.2  # how often a waiting consumer lets Python run signal handlers


@dataclass(frozen=True)
class _End:
    """The producer's last item: it is done, or it failed with `error`."""

    error: BaseException | None = None


class Prefetcher(Generic[T]):
    """Iterates over `iterable` in a daemon thread, up to `capacity` items ahead of the consumer, in order.

    An exception of the producer is raised once in the consumer, with its traceback, after the preceding items. Supports
    one consumer, which closes it: `close`, or the end of a `with` block, stops and joins the thread. With `capacity` 0
    there is no thread.
    """

    def __init__(self, iterable: Iterable[T], capacity: int) -> None:
        self.capacity = integer("capacity", capacity, 0, "; 0 makes nothing ahead")
        self._items: SimpleQueue[T | _End] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._iterator = iter(iterable)
        if self.capacity:
            for _ in range(self.capacity):
                self._room.put(None)
            self._thread = threading.Thread(target=self._produce, name="cupynet-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise StopIteration
        if self._thread is None:
            return next(self._iterator)
        item = self._received()
        if not isinstance(item, _End):
            self._room.put(None)
            return item
        self.close()
        try:
            raise item.error or StopIteration
        finally:
            del item  # the error's traceback holds this frame: avoid a reference cycle

    def _received(self) -> T | _End:
        """Wait for the next item of the thread."""
        while True:
            with suppress(Empty):
                return self._items.get(timeout=WAKE_S)

    def _produce(self) -> None:
        """Make items in the thread while there is room, then the end mark."""
        try:
            while True:
                self._room.get()
                if self._closed:
                    return
                self._items.put(next(self._iterator))
        except StopIteration:
            self._items.put(_End())
        except BaseException as error:
            self._items.put(_End(error))

    def close(self) -> None:
        """Stop the producer after its current item, wait for its thread, and end the iteration."""
        self._closed = True
        self._room.put(None)  # wakes a producer that waits for room
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(WAKE_S)
        self._items = SimpleQueue()  # drops unused items and their memory

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
