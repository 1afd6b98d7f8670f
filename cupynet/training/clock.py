"""Where a worker's time goes, and what happens between two reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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
        bytes_sent: to other workers, as last counted.
        evaluate_s: seconds in evaluations.
        timed_s, timed_images: seconds and images in the rounds after the first 10.
    """

    rounds_s: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0
    averaging_s: float = 0.0
    waiting_s: float = 0.0
    evaluate_s: float = 0.0
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

    def spent(self) -> list[float]:
        """Return what this worker has spent so far, in the order of `SPENT`."""
        return [getattr(self, name) for name in SPENT]

    def count(self, iteration: int, images: int, seconds: float) -> None:
        """Round `iteration` (from 1) has ended: the images of all replicas in it, and the seconds it took."""
        self.rounds_s, self.images = self.rounds_s + seconds, self.images + images
        if iteration > UNTIMED_ROUNDS:
            self.timed_s, self.timed_images = self.timed_s + seconds, self.timed_images + images

    def worked(self, seconds: float, waited_s: float) -> None:
        """The gradients and the update of a round took `seconds`, of which this worker waited for other stages."""
        self.compute_s, self.waiting_s = self.compute_s + seconds - waited_s, self.waiting_s + waited_s

    def caught_up(self, seconds: float) -> None:
        """The host has waited after a round for steps that had run ahead of it."""
        self.compute_s, self.rounds_s = self.compute_s + seconds, self.rounds_s + seconds
        if self.timed_images:
            self.timed_s += seconds

    def meeting(self, seconds: float) -> None:
        """Workers have met after a round, to average or to agree: it belongs to the rounds that made it necessary."""
        self.averaging_s, self.rounds_s = self.averaging_s + seconds, self.rounds_s + seconds
        if self.timed_images:
            self.timed_s += seconds


@dataclass
class Losses:
    """The losses of this replica's samples: added up where they are computed, and read when somebody has to know.

    Attributes:
        samples, unread: how many samples since they were last read, and the sum of their losses, on the device.
        epoch_samples, epoch_losses: of this epoch, as far as they were read.
        mean: of all workers in the last complete epoch; NaN where there was none.
    """

    samples: int = 0
    unread: Array = 0.0
    epoch_samples: int = 0
    epoch_losses: float = 0.0
    mean: float = math.nan

    def add(self, samples: int, losses: Array | None) -> None:
        """A round of this replica; losses: None where another worker has them."""
        if samples and losses is not None:
            self.samples, self.unread = self.samples + samples, self.unread + losses

    def read(self) -> tuple[int, float]:
        """How many samples there were since the last time, and the sum of their losses: all of them are known then."""
        samples, losses = self.samples, float(self.unread)
        self.epoch_samples, self.epoch_losses = self.epoch_samples + samples, self.epoch_losses + losses
        self.samples, self.unread = 0, 0.0
        return samples, losses

    def begin_epoch(self) -> None:
        """Those of the epoch before, or of one that was broken off, are no more of interest; all were read."""
        self.epoch_samples, self.epoch_losses = 0, 0.0

    def state(self) -> dict[str, float]:
        """What goes on exactly: nothing is read that was not, as then it would be added up otherwise."""
        return {**vars(self), "unread": float(self.unread)}


@dataclass
class Since:
    """What has to be remembered between two reports.

    Attributes:
        start: the clock at the last report.
        samples, losses: how many samples this replica has seen since, and the sum of their losses, as far as they were
            read, see `Losses`.
        score: of the last average since, see `Average`; NaN if there was none.
        divergence, divergence_by_layer: as last measured since; NaN and empty if it was not.
    """

    start: Clock
    samples: int = 0
    losses: float = 0.0
    score: float = math.nan
    divergence: float = math.nan
    divergence_by_layer: dict[str, float] = field(default_factory=dict)

    def add(self, samples: int, losses: float) -> None:
        """The losses of some rounds of this replica were read."""
        self.samples, self.losses = self.samples + samples, self.losses + losses

    def averaged(self, average: Average) -> None:
        """An average has been made."""
        self.score = average.score

    def measured(self, average: Average) -> None:
        """It is known how far the replicas were apart at an average."""
        self.divergence, self.divergence_by_layer = average.divergence, dict(average.by_layer)

    def report(self, now: Clock, *, iteration: int, epoch: int, learning_rate: float, bytes_sent: int = 0) -> Report:
        """What happened since the last report."""
        start, seconds = self.start, now.rounds_s - self.start.rounds_s
        return Report(
            iteration=iteration,
            epoch=epoch,
            learning_rate=learning_rate,
            loss=self.losses / self.samples if self.samples else math.nan,
            score_after_averaging=self.score,
            images_per_s=(now.images - start.images) / seconds if seconds else 0.0,
            compute_s=now.compute_s - start.compute_s,
            data_s=now.data_s - start.data_s,
            averaging_s=now.averaging_s - start.averaging_s,
            waiting_s=now.waiting_s - start.waiting_s,
            divergence=self.divergence,
            divergence_by_layer=self.divergence_by_layer,
            bytes_sent=bytes_sent,
        )


class Statistics:
    """What one worker counts during training: time, losses, what averages found.

    Attributes:
        clock: where its time went.
        measured: the last average that measured the divergence, of all stages of a pipeline; None if none did.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.measured: Average | None = None
        self._since, self._epoch_start, self._losses = Since(Clock()), Clock(), Losses()
        self._bytes_sent = 0  # by all workers, when they last agreed

    @property
    def loss(self) -> float:
        """The training loss of the last complete epoch, see `EpochRecord`; NaN if there was none."""
        return self._losses.mean

    def count(self, samples: int, losses: Array | None) -> None:
        """Count a step of so many samples; losses: their sum, on the device; None if another worker has it."""
        self.clock.samples += samples
        self._losses.add(samples, losses)

    def begin_epoch(self) -> None:
        """Begin an epoch at its first round."""
        self._epoch_start = replace(self.clock)
        self.read_losses()  # of an epoch that was broken off, and is not continued
        self._losses.begin_epoch()

    def read_losses(self) -> None:
        """Read the losses from the device."""
        self._since.add(*self._losses.read())

    def averaged(self, average: Average) -> None:
        """Take note of an average."""
        self._since.averaged(average)
        self._measured(average)

    def agreed(self, bytes_sent: int, measured: Average | None) -> None:
        """Take note of what all workers know: bytes sent, and how far the replicas of all stages were apart."""
        self._bytes_sent = bytes_sent
        if measured is not None:
            self._measured(measured)

    def _measured(self, average: Average) -> None:
        if not math.isnan(average.divergence):
            self.measured = average
            self._since.measured(average)

    def report(self, iteration: int, epoch: int, learning_rate: float) -> Report:
        """Return what happened since the last report, and begin the next."""
        self.read_losses()
        report = self._since.report(
            self.clock, iteration=iteration, epoch=epoch, learning_rate=learning_rate, bytes_sent=self._bytes_sent
        )
        self._since = Since(replace(self.clock))
        return report

    def epoch(self) -> list[float]:
        """Return what this worker counted in this epoch: the figures of `SPENT`, samples, losses, all bytes sent."""
        spent = [now - then for now, then in zip(self.clock.spent(), self._epoch_start.spent(), strict=True)]
        return [*spent, self._losses.epoch_samples, self._losses.epoch_losses, self.clock.bytes_sent]

    def epoch_record(self, table: NDArray[Any], stages: int, **known: Any) -> EpochRecord:
        """Return the record of an epoch. table: `epoch` of all workers, (W, figures + 3); known: its other fields."""
        last = (
            np.arange(len(table)) % stages == stages - 1
        )  # these stages have the losses; the first stages receive them
        counts, sums = (np.where(last, each, 0) for each in table.T[-3:-1])
        losses = [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
        self._losses.mean = float(sums.sum() / counts.sum()) if counts.any() else math.nan
        return EpochRecord(
            samples=self.clock.images - self._epoch_start.images,
            train_s=self.clock.rounds_s - self._epoch_start.rounds_s,
            spent=Spent.of(table[:, :-3]),
            bytes_sent=int(table[:, -1].sum()),
            loss=self._losses.mean,
            losses=[float(loss) for loss in losses],
            **known,
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {
            "clock": asdict(self.clock),
            "epoch_start": asdict(self._epoch_start),
            "since": asdict(self._since),
            "losses": self._losses.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.clock, self._epoch_start = Clock(**state["clock"]), Clock(**state["epoch_start"])
        self._since = Since(**{**state["since"], "start": Clock(**state["since"]["start"])})
        self._losses = Losses(**state["losses"])
