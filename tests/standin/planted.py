"""Tasks in other threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """Run tasks in other threads, and return their results."""
    with ThreadPoolExecutor(len(tasks)) as threads:
        return [each.result() for each in [threads.submit(task) for task in tasks]]
