"""Which piece of a worker's work took how long: calls are put aside while they are timed, and put back afterwards.

Nothing is asked in a hot path: an object whose call is timed has another one of the same name meanwhile. Where a
device works behind the host's back, each piece waits for it, so that what a piece has asked for is counted as its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cupynet.backend import Backend
from cupynet.nn import Context, Loss, Model
from cupynet.training.records import Piece


class Span(NamedTuple):
    """A call: what it is, and when it began and ended, in nanoseconds of the worker's clock."""

    name: str
    kind: str
    began: int
    ended: int


class Spans:
    """Times the calls of one worker.

    Args:
        backend: what is waited for before and after each.
        most: spans that are kept; what comes after them is not timed any more.

    Attributes:
        kept: in the order in which they ended.
    """

    def __init__(self, backend: Backend, most: int) -> None:
        self._wait, self._most, self.kept = backend.synchronize, most, list[Span]()
        self._timed: list[tuple[object, str]] = []
        self._passing = "forward"  # or "evaluation": whose loss comes next
        self._stretch = 0  # how often `begin` was called
        self._loss: tuple[Model, Loss] | None = None

    @property
    def full(self) -> bool:
        """Whether nothing more is kept."""
        return len(self.kept) >= self._most

    def begin(self, pieces: Iterable[Piece], model: Model) -> None:
        """Time these calls from now on, and the layers and the loss of a model."""
        self._stretch += 1
        for piece in pieces:
            self._put(piece.owner, piece.method, functools.partial(self._piece, piece.name, piece.kind))
        layers = list(model.network.computed()) or [("network", model.network)]
        for path, layer in layers:
            self._put(layer, "forward", functools.partial(self._layer, path))
        self._loss = model, model.loss
        model.loss = _TimedLoss(self, model.loss)

    def once(self, piece: Piece, inside: Iterable[Piece], model: Model) -> None:
        """Time the next such call and, in it, those `inside` and the layers of a model; then nothing more."""

        def timed(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
            self.end()
            self.begin(inside, model)
            try:
                return self.measure(piece.name, piece.kind, lambda: call(*given, **named))
            finally:
                self.end()

        self._put(piece.owner, piece.method, timed)

    def end(self) -> None:
        """Put everything back; harmless a second time. A call that goes on is not kept."""
        self._stretch += 1
        for owner, name in self._timed:
            delattr(owner, name)
        self._timed = []
        if self._loss is not None:
            model, loss = self._loss
            model.loss, self._loss = loss, None

    def _put(self, owner: object, name: str, timed: Callable[..., Any]) -> None:
        """Let an object's method be another one, which is given it first."""
        call = getattr(owner, name)
        setattr(owner, name, functools.partial(timed, call))
        self._timed.append((owner, name))

    def measure(self, name: str, kind: str, work: Callable[[], Any]) -> Any:
        """Do it and note how long it took."""
        self._wait()
        stretch, full, began = self._stretch, self.full, time.perf_counter_ns()
        result = work()
        self._wait()
        if stretch == self._stretch and not full:
            self.kept.append(Span(name, kind, began, time.perf_counter_ns()))
        return result

    def _piece(self, name: str, kind: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        return self.measure(name, kind, lambda: call(*given, **named))

    def _layer(self, path: str, call: Callable[..., Any], x: Any, context: Context) -> Any:
        """A layer's pass, and its derivative when that is called."""
        self._passing = "forward" if context.train else "evaluation"
        if not context.train:
            return self.measure(path, "evaluation", lambda: call(x, context))
        y, derivative = self.measure(path, "forward", lambda: call(x, context))
        return y, lambda dy: self.measure(path, "backward", lambda: derivative(dy))

    def loss(self, work: Callable[[], Any]) -> Any:
        """The losses of what was passed forward last, and their derivative."""
        return self.measure("loss", self._passing, work)


class _TimedLoss(Loss):
    """A loss whose calls are timed; all else is that of the one behind it."""

    def __init__(self, spans: Spans, loss: Loss) -> None:
        self._spans, self._behind = spans, loss

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._spans.loss(lambda: self._behind(*given, **named))

    def __getattribute__(self, name: str) -> Any:
        own = name in ("_spans", "_behind") or name.startswith("__")
        return super().__getattribute__(name) if own else getattr(self._behind, name)


def own_times(spans: Iterable[Span]) -> dict[tuple[str, str], tuple[int, int, int]]:
    """(name, kind) -> calls, nanoseconds, and those of them that no piece inside has: these add up to all that passed.

    spans: of one worker; of two that overlap one lies within the other.
    """
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    open_: list[list[Any]] = []  # those that the current one lies in: span, nanoseconds of the pieces inside

    def close() -> None:
        span, inside = open_.pop()
        whole = span.ended - span.began
        calls, total, own = found.get((span.name, span.kind), (0, 0, 0))
        found[span.name, span.kind] = calls + 1, total + whole, own + whole - inside
        if open_:
            open_[-1][1] += whole

    for span in sorted(spans, key=lambda each: (each.began, -each.ended)):
        while open_ and open_[-1][0].ended <= span.began:
            close()
        open_.append([span, 0])
    while open_:
        close()
    return found
