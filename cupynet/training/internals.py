"""A trainer as the other files of its loop see it."""

from __future__ import annotations

from typing import Any, Protocol

from cupynet.data import Batches
from cupynet.optim import Schedule
from cupynet.parallel import Groups, Synchronizer
from cupynet.training.callbacks.base import Callback
from cupynet.training.clock import Statistics
from cupynet.training.consensus import StopConsensus
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import TrainerView
from cupynet.training.replica import Replica


class TrainerInternals(TrainerView, Protocol):
    """What callbacks do not see, see `Trainer`."""

    groups: Groups
    replica: Replica
    synchronizer: Synchronizer
    schedule: Schedule
    callbacks: list[Callback]
    statistics: Statistics
    consensus: StopConsensus
    iteration: int
    epoch: int
    round: int
    fit_start: int | None
    averaged: bool
    deal: tuple[int, ...]
    evaluation: Evaluation | None

    def emit(self, event: str, *arguments: Any) -> None:
        """Tell callbacks of an event."""

    def evaluate(self, loader: Batches) -> Evaluation:
        """Evaluate a data set in parallel."""
