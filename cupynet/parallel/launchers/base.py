"""The interface of launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from cupynet.parallel.communicators.base import Communicator

T = TypeVar("T")


class Launcher(Protocol):
    """Runs the same task on every worker, each with its communicator.

    Attributes:
        workers: how many there are.
        first: the rank of the first of them in this process.
        sharing: how many of them share the cores that this process may use.
    """

    workers: int
    first: int
    sharing: int

    def run(self, task: Callable[[Communicator], T]) -> T | None:
        """Run `task(communicator)` on every worker: rank 0's result in the process of rank 0, None elsewhere.

        The first worker that raises stops the others at their next meeting or check, and its own exception is raised
        here.
        """

    def close(self) -> None:
        """Let the workers go; harmless a second time."""
