from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from cupynet.parallel import Average, Communicator, Tally, Traffic
from cupynet.training.events import SPENT, EpochRecord, IterationRecord, Spent

FORMER = ("rounds_s", "timed_s", "timed_images")  # fields of checkpoints from earlier versions
UNTIMED_ROUNDS = 10  # iterations excluded from rates, because caches are cold and kernels are still being loaded


@dataclass
class Clock:
    """Timings and counts of one worker.

    Attributes:
        compute_s: seconds spent on gradients and updates.
        data_s: seconds spent waiting for batches.
        averaging_s: seconds spent averaging, including synchronization with other workers.
        waiting_s: seconds spent waiting for other pipeline stages.
        evaluate_s, callbacks_s, compile_s: seconds spent on evaluations, callbacks and compilation.
        images: number of images trained on by all replicas.
        samples, bytes_sent: samples and traffic of this worker, updated at reports, checkpoints and ends of epochs.
        warm_s, warm_images: `rounds_s` and `images` after the first 10 iterations.
        profiler: called with the name and part of each span; returns a context manager. None without a profiler.
    """

    compute_s: float = 0.0
    data_s: float = 0.0
    averaging_s: float = 0.0
    waiting_s: float = 0.0
    evaluate_s: float = 0.0
    callbacks_s: float = 0.0
    compile_s: float = 0.0
    images: int = 0
    samples: int = 0
    bytes_sent: int = 0
    warm_s: float = 0.0
    warm_images: int = 0

    def __post_init__(self) -> None:
        self.profiler: Callable[[str, str], AbstractContextManager[None]] | None = None
        self.inside: list[float] = []  # for each open span, the seconds of the spans inside it

    @property
    def rounds_s(self) -> float:
        """Seconds spent in iterations and averaging, excluding evaluations and callbacks."""
        return self.compute_s + self.data_s + self.averaging_s + self.waiting_s

    @property
    def images_per_s(self) -> float:
        """Training images per second over all replicas, excluding the first 10 iterations if there were more."""
        seconds = self.rounds_s
        if self.warm_images < self.images:
            return (self.images - self.warm_images) / (seconds - self.warm_s)
        return self.images / seconds if seconds else 0.0

    def measure(self, part: str, name: str) -> AbstractContextManager[None]:
        """Return a context manager that adds its time, excluding nested spans, to a part such as `compute`."""
        return _Span(self, part, name)

    def count(self, iteration: int, images: int) -> None:
        """Count the images of all replicas after iteration `iteration` (from 1)."""
        self.images += images
        if iteration <= UNTIMED_ROUNDS:
            self.warm_s, self.warm_images = self.rounds_s, self.images

    def since(self, start: Clock) -> Clock:
        return Clock(**{each.name: getattr(self, each.name) - getattr(start, each.name) for each in fields(self)})

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Clock:
        """Return the clock stored in a checkpoint, which may be from an earlier version."""
        clock = cls(**{name: value for name, value in stored.items() if name not in FORMER})
        if "timed_s" in stored:
            clock.warm_s, clock.warm_images = clock.rounds_s - stored["timed_s"], clock.images - stored["timed_images"]
        return clock


class _Span(AbstractContextManager[None]):
    """The context manager of `Clock.measure`; a class, because generators are slower."""

    __slots__ = ("_began", "_clock", "_part", "_timed")

    def __init__(self, clock: Clock, part: str, name: str) -> None:
        self._clock, self._part = clock, f"{part}_s"
        self._timed = nullcontext() if clock.profiler is None else clock.profiler(name, part)

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._timed.__enter__()
        self._clock.inside.append(0.0)

    def __exit__(self, *error: Any) -> None:
        clock = self._clock
        try:
            self._timed.__exit__(*error)
        finally:
            took = time.perf_counter() - self._began
            setattr(clock, self._part, getattr(clock, self._part) + took - clock.inside.pop())
            if clock.inside:
                clock.inside[-1] += took


@dataclass
class Interval:
    """Measurements since the clock read `start`; NaN or empty if there were none."""

    start: Clock
    samples: int = 0
    losses: float = 0.0
    hits: float = 0.0
    score: float = math.nan
    drift: float = math.nan
    drift_by_layer: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.losses / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        return self.hits / self.samples if self.samples else math.nan

    def add(self, samples: int, losses: float, hits: float) -> None:
        self.samples, self.losses, self.hits = self.samples + samples, self.losses + losses, self.hits + hits


class Statistics:
    """Timing, losses and replica drift of one worker.

    Attributes:
        measured: the last averaging step that measured drift (over all pipeline stages), or None.
        loss: the training loss of the last complete epoch; NaN if there is none.
        spent: times and traffic of all workers up to the end of the last fit; None before the first fit ends.
        skipped_steps: steps that replicas skipped because a gradient overflowed, up to the end of the last fit.
    """

    def __init__(self, tally: Tally | None = None, traffic: Traffic | None = None) -> None:
        self.clock = Clock()
        self.measured: Average | None = None
        self.loss = math.nan
        self.spent: Spent | None = None
        self.skipped_steps = 0
        self._tally = Tally() if tally is None else tally  # samples and losses not yet read from the device
        self._traffic = Traffic() if traffic is None else traffic
        self._since, self._epoch = Interval(Clock()), Interval(Clock())  # since the last report, and in this epoch

    def begin_epoch(self) -> None:
        self.read_losses()  # discard an interrupted epoch
        self._epoch = Interval(replace(self.clock))

    def count(self) -> None:
        """Update the clock's samples and bytes. Do not read losses, as splitting their sum would change the result."""
        self.clock.samples, self._tally.samples = self.clock.samples + self._tally.samples, 0
        self.clock.bytes_sent = self._traffic.bytes_sent

    def read_losses(self) -> None:
        self.count()
        losses, hits = float(self._tally.losses), float(self._tally.hits)
        for interval in (self._since, self._epoch):
            interval.add(self._tally.scored, losses, hits)
        self._tally.clear()

    def averaged(self, average: Average, *, additional: bool = False) -> None:
        """Record an averaging step. The drift of an `additional` step counts only if the epoch has no drift yet."""
        self._since.score = average.score
        counts = not additional or math.isnan(self._epoch.drift)  # an additional step may follow a short interval
        if counts and not math.isnan(average.drift):
            self.measured = average
            for interval in (self._since, self._epoch):
                interval.drift, interval.drift_by_layer = average.drift, dict(average.drift_by_layer)

    def report(self, **known: Any) -> IterationRecord:
        """Return the measurements since the last report and reset them. `known` has the other fields of the record."""
        self.read_losses()
        since, spent = self._since, self.clock.since(self._since.start)
        self._since = Interval(replace(self.clock))
        return IterationRecord(
            loss=since.loss,
            accuracy=since.accuracy,
            score_after_averaging=since.score,
            images_per_s=spent.images / spent.rounds_s if spent.rounds_s else 0.0,
            compute_s=spent.compute_s,
            data_s=spent.data_s,
            averaging_s=spent.averaging_s,
            waiting_s=spent.waiting_s,
            drift=since.drift,
            drift_by_layer=since.drift_by_layer,
            **known,
        )

    def epoch_record(self, world: Communicator, stages: int, **known: Any) -> EpochRecord:
        """Gather this epoch's figures from all workers and return its record. `known` has the other fields."""
        self.count()
        spent, epoch = self.clock.since(self._epoch.start), self._epoch
        own = epoch.samples, epoch.losses, epoch.hits, self.clock.bytes_sent
        table = world.gather_numbers(*figures(spent), *own)  # (W, len(SPENT) + 4)
        last = np.arange(len(table)) % stages == stages - 1  # stages that compute the loss
        counts, sums, hits = (np.where(last, each, 0) for each in table.T[-4:-1])
        losses = [float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)]
        self.loss = float(sums.sum() / counts.sum()) if counts.any() else math.nan
        return EpochRecord(
            samples=spent.images,
            train_s=spent.rounds_s,
            spent=Spent.of(table[:, :-4]),
            bytes_sent=int(table[:, -1].sum()),
            loss=self.loss,
            losses=losses,
            accuracy=float(hits.sum() / counts.sum()) if counts.any() else math.nan,
            drift=epoch.drift,
            drift_by_layer=epoch.drift_by_layer,
            **known,
        )

    def state(self) -> dict[str, Any]:
        self.count()
        losses = {
            "samples": self._tally.scored,
            "unread": float(self._tally.losses),
            "epoch_samples": self._epoch.samples,
            "epoch_losses": self._epoch.losses,
            "hits": float(self._tally.hits),
            "epoch_hits": self._epoch.hits,
            "mean": self.loss,
        }
        return {
            "clock": asdict(self.clock),
            "epoch_start": asdict(self._epoch.start),
            "epoch_drift": {"drift": self._epoch.drift, "drift_by_layer": self._epoch.drift_by_layer},
            "since": asdict(self._since),
            "losses": losses,
            "measured": {} if self.measured is None else asdict(self.measured),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for each in fields(Clock):  # in place, because the replica shares this clock
            setattr(self.clock, each.name, getattr(Clock.of(state["clock"]), each.name))
        since, losses = state["since"], state["losses"]
        self._since = Interval(**{**since, "start": Clock.of(since["start"])})
        self._tally.clear()
        self._tally.scored, self._tally.losses, self._tally.hits = losses["samples"], losses["unread"], losses["hits"]
        sums = losses["epoch_samples"], losses["epoch_losses"], losses["epoch_hits"]
        self._epoch = Interval(Clock.of(state["epoch_start"]), *sums, **state["epoch_drift"])
        self.loss = losses["mean"]
        self.measured = Average(**state["measured"]) if state["measured"] else None
        self._traffic.bytes_sent = self.clock.bytes_sent


def figures(clock: Clock) -> list[float]:
    return [getattr(clock, name) for name in SPENT]
