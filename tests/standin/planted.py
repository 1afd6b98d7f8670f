"""Helpers for deliberate misuses of CuPy, and threads that act as ranks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.standin.machine import active


@contextmanager
def caught(kind: type[BaseException]) -> Iterator[None]:
    """Expect a misuse, and clear its record."""
    with pytest.raises(kind):
        yield
    active().misuses.clear()


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """Run each task in a thread, and return the results, or the exceptions that ended them."""
    results: list[Any] = [None] * len(tasks)

    def run(i: int) -> None:
        try:
            results[i] = tasks[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), name=f"rank{i}", daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results
