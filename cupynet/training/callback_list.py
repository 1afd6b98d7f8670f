from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

from cupynet.core.described import PLAIN
from cupynet.runs.run import Run

T = TypeVar("T")


class CallbackList(list[Any]):
    """The `Callback` objects of one worker, in order.

    Attributes:
        resuming: the callbacks whose state was restored for the current fit.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        super().__init__(callbacks)
        self.resuming: list[Any] = []
        self._closing = ExitStack()

    def start(self, trainer: Any, run: Run | None) -> None:
        """Start all callbacks. If one fails, close every callback started so far."""
        with ExitStack() as started:
            for callback in self:
                started.callback(callback.close)
                callback.start(trainer, run)
            self._closing = started.pop_all()

    def emit(self, event: str, *arguments: Any) -> list[Any]:
        return [getattr(callback, event)(*arguments) for callback in self]

    def adopt(self, originals: Iterable[Any]) -> None:
        """Copy the arguments of the originals, which the user may have changed between fits.

        Only arguments of classes in cupynet are set, because other classes may use such attributes as state.
        """
        copies, originals = ([each for each in some if each.every_rank] for some in (self, originals))
        for copy, original in zip(copies, originals, strict=True):
            known = [base for base in type(original).__mro__ if base.__module__.startswith("cupynet.")]
            for argument in {each for base in known for each in inspect.signature(base).parameters}:
                if isinstance(value := vars(original).get(argument, ...), PLAIN):
                    setattr(copy, argument, value)

    def close(self) -> None:
        """Close all callbacks, even if one fails. A second call does nothing."""
        self._closing.close()

    def state(self) -> dict[str, Any]:
        return {name: callback.state() for name, callback in by_class_name(self).items()}

    def restore(self, states: dict[str, Any]) -> None:
        self.resuming = []
        for name, callback in by_class_name(self).items():
            if name in states:
                callback.restore(states[name])
                self.resuming.append(callback)


def by_class_name(callbacks: Iterable[T]) -> dict[str, T]:
    """Return callbacks by class name, with a number appended to duplicates."""
    named: dict[str, T] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        number = sum(type(each).__name__ == kind for each in named.values()) + 1
        named[kind if number == 1 else f"{kind}{number}"] = callback
    return named
