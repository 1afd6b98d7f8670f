"""Where the time of a round goes, piece by piece: a trace to look at, and the pieces that take longest as a table."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.checks import integer, one_line
from cupynet.errors import OutputError
from cupynet.files import write_json, write_whole
from cupynet.runs import Run
from cupynet.training.callbacks import Callback
from cupynet.training.console import profile_table
from cupynet.training.records import EpochRecord, TrainerView
from cupynet.training.spans import Span, Spans, own_times

log = logging.getLogger(__name__)

MOST = 40_000  # pieces of all workers that are kept: the trace has some 100 bytes for each
LONGEST = 10  # pieces in the table


class Profile(Callback):
    """Times the pieces of some rounds of the first fit, and of the evaluation that follows, on every worker.

    Written are `trace.json`, for ui.perfetto.dev or chrome://tracing, with a track for each worker; and
    `profile.json`, all pieces by what they take themselves, without the pieces inside them: these add up to the time of
    the rounds and of that evaluation. The table at the end has the longest.

    Times are those of work done as it stands: a GPU is waited for before and after each piece, and what is otherwise
    launched as one recorded step is launched operation by operation. So rounds are slower while they are timed, on a
    GPU much slower, and there the sum says nothing about their speed outside; shares of kernels do. Results
    stay what they are. After a fit that failed nothing is written.

    Args:
        rounds: how many are timed; fewer, where pieces come to be too many for a trace of some megabytes.
        after: rounds of the fit before them, in which caches are cold; in a short fit at most a quarter of its rounds.
        path: of the folder for both files; that of the run by default. Without any there is the table alone.

    Attributes:
        pieces: after the rounds, on rank 0, the content of `profile.json`; see `table`.
    """

    every_rank = True
    last = True

    def __init__(self, rounds: int = 50, after: int = 10, path: str | Path | None = None) -> None:
        self.rounds, self.after = integer("rounds", rounds, 1), integer("after", after, 0)
        self._folder = None if path is None else Path(path)
        self.pieces: dict[str, Any] = {}
        self._spans: Spans | None = None
        self._phase = "before"  # the rounds | rounds | evaluation, which is waited for | done
        self._first = self._zero = self._timed = 0
        self._evaluated = self._ended = False

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        if self._folder is None and run is not None:
            self._folder = run.folder

    def on_fit_start(self, trainer: TrainerView) -> None:
        if self._phase == "before":
            self._first = trainer.iteration + min(self.after, (trainer.total_iterations - trainer.iteration) // 4)
            self.on_iteration_end(trainer)

    def on_iteration_end(self, trainer: TrainerView) -> None:
        if self._phase == "before" and trainer.iteration >= self._first:
            self._open(trainer)
        elif self._phase == "rounds" and trainer.iteration >= self._first + self.rounds:
            self._shut(trainer)
            self._tell(trainer)
        elif self._phase == "rounds" and self._spans is not None and self._spans.full:
            self._spans.end()

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        if record.evaluation is None:
            return
        if self._phase == "rounds":
            self._evaluated = True
        elif self._phase == "evaluation":
            self._phase = "done"
            self._tell(trainer)

    def on_fit_end(self, trainer: TrainerView) -> None:
        if self._phase == "rounds":
            self._shut(trainer)
        if self._phase == "before" or self._ended:
            return
        self._ended = True
        self.close()
        self._tell(trainer)
        if trainer.rank == 0:
            profile_table(self.pieces, LONGEST, self._folder)

    def close(self) -> None:
        if self._spans is not None:
            self._spans.end()
            self._phase = "done"

    def _open(self, trainer: TrainerView) -> None:
        self._phase, self._spans = "rounds", Spans(trainer.backend, max(MOST // trainer.workers, 100))
        trainer.launch_singly(True)
        trainer.world.barrier()  # here the clocks of all workers begin
        self._zero = time.perf_counter_ns()
        self._spans.begin(trainer.pieces(), trainer.model)

    def _shut(self, trainer: TrainerView) -> None:
        """The rounds are over; where no evaluation was among what was timed, the next one is."""
        assert self._spans is not None
        self._spans.end()
        trainer.launch_singly(False)
        self._timed = trainer.iteration - self._first
        self._phase = "done" if self._evaluated else "evaluation"
        if not self._evaluated:
            evaluating = [piece for piece in trainer.pieces() if piece.kind == "evaluation"]
            whole = next(piece for piece in evaluating if piece.owner is trainer)
            self._spans.once(whole, [piece for piece in evaluating if piece is not whole], trainer.model)

    # what comes of it -----------------------------------------------------------------------------------------------

    def _tell(self, trainer: TrainerView) -> None:
        """Let rank 0 know what all have timed so far, and write it. Every worker calls it."""
        assert self._spans is not None
        place = f"worker {trainer.rank}: {trainer.backend.name}, device {trainer.backend.device}"
        own = [
            place,
            [(span.name, span.kind, span.began - self._zero, span.ended - span.began) for span in self._spans.kept],
        ]
        traffic, sent = trainer.world.traffic, trainer.world.traffic.bytes_sent
        texts = trainer.world.all_gather_ragged(np.frombuffer(json.dumps(own).encode(), np.uint8))
        traffic.bytes_sent = sent  # what is not part of training is not counted with it
        if trainer.rank == 0:
            workers = [json.loads(text.tobytes()) for text in texts]
            self.pieces = table(workers, self._first + 1, self._timed)
            self._write(workers)

    def _write(self, workers: list[Any]) -> None:
        """Both files; where that fails, it is told."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / "trace.json", json.dumps(trace(workers)).encode())
            write_json(self._folder / "profile.json", self.pieces)
        except (OSError, OutputError) as error:
            log.warning("the profile is not kept: %s", one_line(error))
            self._folder = None


def trace(workers: list[Any]) -> dict[str, Any]:
    """Trace events as chrome://tracing and Perfetto read them: a thread for each worker, microseconds.

    workers: of each, in rank order, what it is called and its spans (name, kind, began, took), in nanoseconds.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "cupynet"}}]
    for rank, (place, spans) in enumerate(workers):
        row = {"pid": 0, "tid": rank}
        events.append({"ph": "M", "name": "thread_name", **row, "args": {"name": place}})
        events.append({"ph": "M", "name": "thread_sort_index", **row, "args": {"sort_index": rank}})
        for name, kind, began, took in spans:
            shown = f"{name} {kind}" if kind in ("forward", "backward") else name
            events.append({"ph": "X", "name": shown, "cat": kind, "ts": began / 1000, "dur": took / 1000, **row})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def table(workers: list[Any], first: int, rounds: int) -> dict[str, Any]:
    """All pieces of all workers, the longest first: milliseconds of their own, without the pieces inside them.

    workers: see `trace`. first, rounds: the first iteration that was timed, and how many.

    Returns `first`, `rounds`, `workers`; `total_ms`, what all pieces take together; and `pieces`, of each its `name`,
    `kind`, `calls`, `total_ms`, `mean_ms`, `share` of all, and `inclusive_ms`, with the pieces inside it.
    """
    sums: dict[tuple[str, str], tuple[int, int, int]] = {}
    for _, spans in workers:
        own = own_times(Span(name, kind, began, began + took) for name, kind, began, took in spans)
        for key, counts in own.items():
            before = sums.get(key, (0, 0, 0))
            sums[key] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
    whole = sum(own for _, _, own in sums.values())
    pieces = [
        {
            "name": name,
            "kind": kind,
            "calls": calls,
            "total_ms": own / 1e6,
            "mean_ms": own / 1e6 / calls,
            "share": own / whole if whole else 0.0,
            "inclusive_ms": total / 1e6,
        }
        for (name, kind), (calls, total, own) in sorted(sums.items(), key=lambda item: -item[1][2])
    ]
    return {"first": first, "rounds": rounds, "workers": len(workers), "total_ms": whole / 1e6, "pieces": pieces}
