"""The interface of launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from cupynet.parallel.communicators.base import Communicator

T = TypeVar("T")


class Launcher(Protocol):
    """Runs the same task on every worker, each with its communicator.

    Attributes:
        workers: the number of workers.
        first: the lowest rank in this process.
        sharing: the number of workers that share this process's cores.
    """

    workers: int
    first: int
    sharing: int

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """Run `task(communicator)` on every worker. Return rank 0's result in the process of rank 0, None elsewhere.

        The first worker that raises stops the others at their next exchange or check, and its exception is raised here.
        """

    def close(self) -> None:
        """End the workers. A second call has no effect."""
