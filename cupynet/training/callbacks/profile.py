"""A profiler that records a trace of some iterations and prints the slowest calls."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cupynet.backend import Backend
from cupynet.core.checks import integer
from cupynet.core.errors import OutputError
from cupynet.core.files import write_json, write_whole
from cupynet.core.terminal import near
from cupynet.core.wording import counted, one_line, percent
from cupynet.nn import Context, Model
from cupynet.runs.layout import PROFILE, TRACE
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.clock import Clock
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)

ROWS = 10  # maximum number of rows in the printed table


class Profile(Callback):
    """Times all calls on every worker in some iterations of a wrapper's first fit and the evaluations between them.

    After the fit, it prints the slowest calls and writes two files. `trace.json` has a track for each worker and can be
    opened in ui.perfetto.dev or chrome://tracing. `profile.json` has the time of each call, excluding nested calls. If
    the fit fails, nothing is written.

    Timed iterations are slower (on a GPU, much slower), because each call is synchronized and the operations of
    captured graphs are launched one by one. Results do not change.

    Args:
        iterations: number of timed iterations. Each recorded call takes about 100 bytes of memory.
        after: number of iterations to skip before them, reduced to a quarter of the fit if it is larger.
        path: folder for both files; by default the run folder. Without a folder, only the table is printed.

    Attributes:
        pieces: the content of `profile.json` (see `table`), set on rank 0 after the fit.
    """

    every_rank = True
    last = True

    def __init__(self, iterations: int = 50, after: int = 10, path: str | Path | None = None) -> None:
        self.iterations, self.after = integer("iterations", iterations, 1), integer("after", after, 0)
        self._path = None if path is None else Path(path)
        self.pieces: dict[str, Any] = {}
        self._timer: Timer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy, without the timer, which belongs to the trainer."""
        return vars(self) | {"_timer": None}

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._folder = run.folder if self._path is None and run is not None else self._path
        self._timer = None
        self._first = self._timed = 0
        self._written = False

    def on_fit_start(self, trainer: Trainer) -> None:
        if self._timer is None:
            self._first = trainer.iteration + min(self.after, (trainer.plan.iterations - trainer.iteration) // 4)
            self.on_iteration_end(trainer)

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self._timer is None and trainer.iteration >= self._first:
            trainer.replica.launch_singly(True)
            trainer.world.barrier()  # start the timers of all workers together
            self._timer = Timer(trainer.backend, trainer.statistics.clock, trainer.model)
        elif self._timer is not None and not self._timed and trainer.iteration >= self._first + self.iterations:
            self._end(trainer, self._timer)

    def _end(self, trainer: Trainer, timer: Timer) -> None:
        timer.end()
        trainer.replica.launch_singly(False)
        self._timed = trainer.iteration - self._first

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._timer is None or self._written:
            return
        self._written = True
        if not self._timed:
            self._end(trainer, self._timer)
        own = [f"worker {trainer.rank}: {trainer.backend.name}, device {trainer.backend.device}", self._timer.spans]
        workers = trainer.world.gather_json(own)
        if trainer.rank == 0:
            self.pieces = table(workers, self._first + 1, self._timed)
            self._write(workers)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.end()

    def _write(self, workers: list[Any]) -> None:
        files = ""
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(self._folder / TRACE, json.dumps(trace(workers)).encode())
                write_json(self._folder / PROFILE, self.pieces)
                files = f"details: {PROFILE} and {TRACE} in {near(self._folder)}"
            except (OSError, OutputError) as error:
                log.warning("cannot write the profile: %s", one_line(error))
        with contextlib.suppress(OSError, ValueError):  # stdout is full or closed
            print("\n".join(filter(None, [*lines(self.pieces), files])))


class Span(NamedTuple):
    """A timed call. Times are in nanoseconds, and `began` counts from the start of the profile."""

    name: str
    kind: str
    began: int
    took: int
    own: int  # excluding nested spans


class Timer:
    """Records the spans of a worker's clock and layers until `end`, synchronizing the device around each span."""

    def __init__(self, backend: Backend, clock: Clock, model: Model) -> None:
        self.spans: list[Span] = []
        self._wait, self._zero = backend.synchronize, time.perf_counter_ns()
        self._inside: list[int] = []  # nanoseconds of nested spans, for each open span
        self._clock = clock
        self._layers = [step for layer in model.network.walk() for step in (layer, *layer.fused)]
        for step in self._layers:
            forward = functools.partial(self._forward, step.path or "network", step.forward)
            setattr(step, "forward", forward)  # noqa: B010 - shadows the method until `end`
        clock.profiler = self.span

    def end(self) -> None:
        self._inside, self._clock.profiler = [], None
        while self._layers:
            del self._layers.pop().forward

    @contextlib.contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        self._wait()
        inside, began = self._inside, time.perf_counter_ns()
        inside.append(0)
        try:
            yield
            self._wait()
        finally:
            took = time.perf_counter_ns() - began
            if inside is self._inside:  # otherwise `end` was called in between
                own = took - inside.pop()
                if inside:
                    inside[-1] += took
                self.spans.append(Span(name, kind, began - self._zero, took, own))

    def _forward(self, path: str, forward: Callable[..., Any], x: Any, context: Context) -> Any:
        with self.span(path, "forward" if context.train else "evaluation"):
            result = forward(x, context)
        if not context.train:
            return result
        y, backward = result
        return y, functools.partial(self._backward, path, backward)

    def _backward(self, path: str, backward: Callable[..., Any], dy: Any) -> Any:
        with self.span(path, "backward"):
            return backward(dy)


def trace(workers: list[Any]) -> dict[str, Any]:
    """Return the trace in Chrome's trace event format. `workers` has the name and the spans of each, in rank order."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "cupynet"}}]
    for rank, (place, spans) in enumerate(workers):
        row = {"pid": 0, "tid": rank}
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": place}})
        for name, kind, began, took, _ in spans:
            shown = f"{name} {kind}" if kind in ("forward", "backward") else name
            events.append({"ph": "X", "name": shown, "cat": kind, "ts": began / 1000, "dur": took / 1000, **row})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def table(workers: list[Any], first: int, iterations: int) -> dict[str, Any]:
    """Return the content of `profile.json`. For `workers`, see `trace`. `first` is the first timed iteration."""
    sums: dict[tuple[str, str], list[int]] = {}
    for _, spans in workers:
        for name, kind, _, took, own in spans:
            row = sums.setdefault((name, kind), [0, 0, 0])
            row[:] = row[0] + 1, row[1] + took, row[2] + own
    whole = sum(own for _, _, own in sums.values())
    pieces = [
        {
            "name": name,
            "kind": kind,
            "calls": calls,
            "total_ms": own / 1e6,
            "mean_ms": own / 1e6 / calls,
            "share": own / whole if whole else 0.0,
            "inclusive_ms": took / 1e6,
        }
        for (name, kind), (calls, took, own) in sorted(sums.items(), key=lambda item: -item[1][2])
    ]
    return {"first": first, "rounds": iterations, "workers": len(workers), "total_ms": whole / 1e6, "pieces": pieces}


def lines(profile: dict[str, Any]) -> list[str]:
    found = [
        f"profile of {counted(profile['rounds'], 'iteration')}, starting at iteration {profile['first']}",
        f"{'':<36}{'calls':>8}{'total ms':>12}{'mean ms':>12}{'share':>9}",
    ]
    for piece in profile["pieces"][:ROWS]:
        name = piece["name"]
        if piece["kind"] in ("forward", "backward", "evaluation") and piece["kind"] not in name:
            name += f" {piece['kind']}"
        name = name if len(name) < 36 else f"{name[:16]}...{name[-16:]}"
        times = f"{piece['calls']:>8,}{piece['total_ms']:>12,.1f}{piece['mean_ms']:>12.3f}"
        found.append(f"{name:<36}{times}{percent(piece['share'], 1):>9}")
    return found
