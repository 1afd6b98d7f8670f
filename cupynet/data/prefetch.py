from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from cupynet.core.checks import integer

T = TypeVar("T")

WAKE_S = 0.2  # interval at which a waiting consumer lets Python run signal handlers


@dataclass(frozen=True)
class _End:
    error: BaseException | None = None


class Prefetcher(Generic[T]):
    """Iterates over `iterable` in a daemon thread, up to `capacity` items ahead of the consumer.

    The order is preserved. An exception in the producer is raised in the consumer, after the preceding items. The
    consumer must call `close` or use a `with` block. With `capacity` 0 there is no thread.
    """

    def __init__(self, iterable: Iterable[T], capacity: int) -> None:
        self.capacity = integer("capacity", capacity, 0, "; 0 disables prefetching")
        self._items: SimpleQueue[T | _End] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # a permit for each item that may be produced
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
            del item  # avoid a reference cycle through the traceback

    def _received(self) -> T | _End:
        while True:
            with suppress(Empty):
                return self._items.get(timeout=WAKE_S)

    def _produce(self) -> None:
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
        """Stop the producer after its current item and join its thread."""
        self._closed = True
        self._room.put(None)  # wakes a waiting producer
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(WAKE_S)
        self._items = SimpleQueue()  # release unused items

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
