"""Where a worker's time goes, and what happens between two reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cupynet.backend.array import Array
from cupynet.parallel import Average
from cupynet.training.records import Report

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
    """

    samples: int = 0
    unread: Array = 0.0
    epoch_samples: int = 0
    epoch_losses: float = 0.0

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
