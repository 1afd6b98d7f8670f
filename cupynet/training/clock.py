"""Where a worker's time goes, and what happens between two reports."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend.array import Array
from cupynet.parallel import Average
from cupynet.training.events import SPENT, EpochRecord, Report, Spent

UNTIMED_ROUNDS = 10  # at the start of training: caches are cold, kernels are still being loaded


@dataclass
class Clock:
    """Where this worker's time goes.

    Attributes:
        rounds_s: seconds in rounds and in the averages that end epochs, evaluation excluded.
        compute_s, data_s, averaging_s, waiting_s: their parts: gradients and updates, waiting for batches, the
            synchronizer, waiting for other stages of a pipeline.
        images: of all replicas; samples: of this worker.
        bytes_sent: to other workers, as of the last report or epoch.
        evaluate_s: seconds in evaluations.
        compile_s: seconds before training until the kernels were ready.
        timed_s, timed_images: seconds and images in the rounds after the first 10.
    """

    rounds_s: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0
    averaging_s: float = 0.0
    waiting_s: float = 0.0
    evaluate_s: float = 0.0
    compile_s: float = 0.0
    images: int = 0
    timed_s: float = 0.0
    timed_images: int = 0
    samples: int = 0
    bytes_sent: int = 0

    @property
    def images_per_s(self) -> float:
        """Training images of all replicas per second, after the first 10 rounds if there were more."""
        if self.timed_images:
            return self.timed_images / self.timed_s
        return self.images / self.rounds_s if self.rounds_s else 0.0

    def count(self, iteration: int, images: int, seconds: float) -> None:
        """Count round `iteration` (from 1): the images of all replicas in it, and its seconds."""
        self.rounds_s, self.images = self.rounds_s + seconds, self.images + images
        if iteration > UNTIMED_ROUNDS:
            self.timed_s, self.timed_images = self.timed_s + seconds, self.timed_images + images

    def lap(self, part: str, began: float) -> float:
        """Add the seconds since `began` to a part of the round, such as `compute_s`; return the time now."""
        now = time.perf_counter()
        setattr(self, part, getattr(self, part) + (now - began))
        return now

    def extend(self, part: str, began: float) -> None:
        """Add the seconds since `began` to a part of the last round, and to the round itself."""
        seconds = self.lap(part, began) - began
        self.rounds_s += seconds
        if self.timed_images:
            self.timed_s += seconds

    def since(self, start: Clock) -> Clock:
        """Return the counts since `start`, an earlier copy of this clock."""
        return Clock(**{each.name: getattr(self, each.name) - getattr(start, each.name) for each in fields(self)})

    def spent(self) -> list[float]:
        """Return the attributes of `Spent`, in its order."""
        return [getattr(self, name) for name in SPENT]


@dataclass
class Losses:
    """The losses of this replica's samples, summed on the device and read only when needed.

    Attributes:
        samples, unread: samples since the last reading, and the sum of their losses, on the device.
        epoch_samples, epoch_losses: those read in this epoch.
        mean: of all workers in the last complete epoch; NaN if there was none.
    """

    samples: int = 0
    unread: Array = 0.0
    epoch_samples: int = 0
    epoch_losses: float = 0.0
    mean: float = math.nan

    def read(self) -> tuple[int, float]:
        """Return the number of samples since the last reading, and the sum of their losses."""
        samples, losses = self.samples, float(self.unread)
        self.epoch_samples, self.epoch_losses = self.epoch_samples + samples, self.epoch_losses + losses
        self.samples, self.unread = 0, 0.0
        return samples, losses

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint. It does not `read`: partial sums would change the last bits of the sum."""
        return {**vars(self), "unread": float(self.unread)}


@dataclass
class Since:
    """The state between two reports.

    Attributes:
        start: the clock at the last report.
        samples, losses: samples of this replica since, and the sum of their losses, as far as they were read.
        score: of the last average since, see `Average`; NaN if there was none.
        divergence, divergence_by_layer: as last measured since; NaN and empty if it was not.
    """

    start: Clock
    samples: int = 0
    losses: float = 0.0
    score: float = math.nan
    divergence: float = math.nan
    divergence_by_layer: dict[str, float] = field(default_factory=dict)


class Statistics:
    """The statistics of one worker: time, losses, and measurements of averages.

    Attributes:
        clock: this worker's times and counts.
        measured: the last average with a divergence, of all stages of a pipeline; None if there is none.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.measured: Average | None = None
        self._since, self._epoch_start, self._losses = Since(Clock()), Clock(), Losses()

    @property
    def loss(self) -> float:
        """The training loss of the last complete epoch, see `EpochRecord`; NaN if there was none."""
        return self._losses.mean

    def count(self, samples: int, losses: Array | None) -> None:
        """Count a step. losses: the sum over its samples, on the device; None if another worker has it."""
        self.clock.samples += samples
        if samples and losses is not None:
            self._losses.samples, self._losses.unread = self._losses.samples + samples, self._losses.unread + losses

    def begin_epoch(self) -> None:
        """Begin an epoch at its first round."""
        self._epoch_start = replace(self.clock)
        self.read_losses()  # of an interrupted epoch that is not continued
        self._losses.epoch_samples, self._losses.epoch_losses = 0, 0.0

    def read_losses(self) -> None:
        """Read the losses from the device."""
        samples, losses = self._losses.read()
        self._since.samples, self._since.losses = self._since.samples + samples, self._since.losses + losses

    def averaged(self, average: Average) -> None:
        """Record an average for the next report."""
        self._since.score = average.score
        if not math.isnan(average.divergence):
            self.measured = average
            self._since.divergence, self._since.divergence_by_layer = average.divergence, dict(average.by_layer)

    def report(self, **known: Any) -> Report:
        """Return what happened since the last report, and begin the next. known: its other fields."""
        self.read_losses()
        since, spent = self._since, self.clock.since(self._since.start)
        self._since = Since(replace(self.clock))
        return Report(
            loss=since.losses / since.samples if since.samples else math.nan,
            score_after_averaging=since.score,
            images_per_s=spent.images / spent.rounds_s if spent.rounds_s else 0.0,
            compute_s=spent.compute_s,
            data_s=spent.data_s,
            averaging_s=spent.averaging_s,
            waiting_s=spent.waiting_s,
            divergence=since.divergence,
            divergence_by_layer=since.divergence_by_layer,
            **known,
        )

    def epoch(self) -> list[float]:
        """Return the figures of this epoch that workers exchange: those of `SPENT`, samples, losses, all bytes sent."""
        spent = self.clock.since(self._epoch_start).spent()
        return [*spent, self._losses.epoch_samples, self._losses.epoch_losses, self.clock.bytes_sent]

    def epoch_record(self, table: NDArray[Any], stages: int, **known: Any) -> EpochRecord:
        """Return the record of an epoch. table: `epoch` of all workers, (W, figures + 3); known: its other fields."""
        last = np.arange(len(table)) % stages == stages - 1  # the stages that compute the loss
        counts, sums = (np.where(last, each, 0) for each in table.T[-3:-1])
        losses = [float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)]
        self._losses.mean = float(sums.sum() / counts.sum()) if counts.any() else math.nan
        epoch = self.clock.since(self._epoch_start)
        return EpochRecord(
            samples=epoch.images,
            train_s=epoch.rounds_s,
            spent=Spent.of(table[:, :-3]),
            bytes_sent=int(table[:, -1].sum()),
            loss=self._losses.mean,
            losses=losses,
            divergence=self._since.divergence,
            divergence_by_layer=self._since.divergence_by_layer,
            **known,
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "clock": asdict(self.clock),
            "epoch_start": asdict(self._epoch_start),
            "since": asdict(self._since),
            "losses": self._losses.state(),
            "measured": {} if self.measured is None else asdict(self.measured),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.clock, self._epoch_start = Clock(**state["clock"]), Clock(**state["epoch_start"])
        self._since = Since(**{**state["since"], "start": Clock(**state["since"]["start"])})
        self._losses = Losses(**state["losses"])
        self.measured = Average(**state["measured"]) if state["measured"] else None
