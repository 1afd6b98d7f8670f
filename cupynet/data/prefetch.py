"""Making the next items while the last one is used: one thread, at most `capacity` items ahead.

Two queues go round: `items` carries what was made to the consumer, `room` carries permission to make one more back to
the producer. Neither put can block and nobody polls. (One bounded queue.Queue would do, but its lock is not reentrant,
and the finalizer below may run at any moment; a SimpleQueue is made for that.) The producer's last word is always an
end mark, with its error if it had one, so that a waiting consumer is woken whatever happened: in Deeplearning4j's
AsyncDataSetIterator it waits for ever.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Generic, TypeAlias, TypeVar

from cupynet.core.checks import integer

T = TypeVar("T")


@dataclass(frozen=True)
class _End:
    """The producer's last word: it is done, or it failed with `error`."""

    error: BaseException | None = None


_Items: TypeAlias = "SimpleQueue[T | _End]"
_Room: TypeAlias = "SimpleQueue[None]"


class Prefetcher(Generic[T]):
    """Iterates over `iterable` in a daemon thread, up to `capacity` items ahead of the consumer, in order.

    An exception of the producer arrives at the consumer once, with its own traceback, after the items made before it.
    For one consumer; `close` may come from any thread. A context manager: leaving it stops and joins the thread.
    With `capacity` 0 there is no thread and `iterable` is passed through.

    Args:
        iterable: what is made.
        capacity: items ahead, at most.
        take: called in the consumer's thread for each item before it has it.
    """

    def __init__(self, iterable: Iterable[T], capacity: int, take: Callable[[], None] | None = None) -> None:
        self.capacity = integer("capacity", capacity, 0, "; 0 makes nothing ahead")
        self.waited_s = 0.0  # seconds the consumer has waited for items
        self._items: _Items[T] = SimpleQueue()
        self._room: _Room = SimpleQueue()
        self._closed = threading.Event()
        self._take = take
        self._thread: threading.Thread | None = None
        self._iterator = iter(iterable)
        if self.capacity:
            for _ in range(self.capacity):
                self._room.put(None)
            # The thread holds the queues but not this object: one that is dropped unclosed is collected, and lets go of
            # its producer, which would wait for room for ever.
            weakref.finalize(self, _stop, self._room, self._closed)
            arguments = (self._iterator, self._items, self._room, self._closed)
            self._thread = threading.Thread(target=_produce, args=arguments, name="cupynet-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._items.get() if self._thread else _make(self._iterator)
        self.waited_s += time.perf_counter() - start
        if not isinstance(item, _End):
            if self._thread:
                self._room.put(None)
            if self._take is not None:
                self._take()
            return item
        self.close()
        if item.error is None:
            raise StopIteration
        try:
            raise item.error
        finally:
            del item  # the error's traceback holds this frame: without this the two would keep each other alive

    def close(self) -> None:
        """Stops the producer after the item it is making, waits for its thread, and ends the iteration."""
        _stop(self._room, self._closed)
        if self._thread:
            self._thread.join()
            _empty(self._items)
            self._items.put(_End())  # wakes a consumer that waits while another thread closes

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _make(iterator: Iterator[T]) -> T | _End:
    """The next item, or the end mark. Whatever is raised is caught, SystemExit too: a consumer waits for it."""
    try:
        return next(iterator)
    except StopIteration:
        return _End()
    except BaseException as error:
        return _End(error)


def _produce(iterator: Iterator[T], items: _Items[T], room: _Room, closed: threading.Event) -> None:
    """The thread: waits for room, makes an item, hands it over, forgets it; ends with the end mark or when closed."""
    ended = False
    while not ended:
        room.get()
        if closed.is_set():
            return
        item = _make(iterator)
        ended = isinstance(item, _End)
        items.put(item)
        del item


def _stop(room: _Room, closed: threading.Event) -> None:
    """Tells the producer to make nothing more, and wakes it if it waits for room."""
    closed.set()
    room.put(None)


def _empty(items: _Items[T]) -> None:
    """Drops what was made and not used, and the memory it holds."""
    try:
        while True:
            items.get_nowait()
    except Empty:
        return
