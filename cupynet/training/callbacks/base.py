"""The base class of callbacks: the events of training, in their order."""

from __future__ import annotations

from typing import Any

from cupynet.runs.run import Run
from cupynet.training.events import EpochRecord, Report
from cupynet.training.trainer_view import TrainerView


class Callback:
    """Receives the events of training on rank 0, or on every worker if `every_rank` is True.

    Rank 0 uses the object it was given; other workers use copies made before `start`. Events do nothing by default.

    Attributes:
        every_rank: True for a copy on every worker.
        last: True to receive each event after the other callbacks.
        needs_validation: True to refuse a fit that does not evaluate held-out training images after each epoch.
    """

    every_rank = False
    last = False
    needs_validation = False

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        """Once for each trainer, when it is made. run: where files belong; None where nothing is written."""

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Before the first iteration of a `fit`."""

    def on_iteration_end(self, trainer: TrainerView) -> None:
        """After each round: this replica's update, the average if there was one, the report if one was due."""

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        """Every `report_every` iterations."""

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        """After a complete epoch and its evaluation; not after one that a stop broke off."""

    def on_stop(self, trainer: TrainerView) -> None:
        """A stop ends a fit early: after its last round, before the average that it ends with."""

    def before_finish(self, trainer: TrainerView) -> None:
        """After the last round of a fit, before its last average and evaluation.

        A place to change weights, see `TrainerView`: each replica's own, which may differ, and are averaged then; an
        outer step follows where it follows every average.
        """

    def after_finish(self, trainer: TrainerView) -> None:
        """After the last average of a fit and the end of its last epoch, where a stop ended it early too.

        The other place to change weights, on every worker alike: those of the result, which no average and no outer
        step moves any more. Where they were changed, they are evaluated again.
        """

    def on_fit_end(self, trainer: TrainerView) -> None:
        """After all that, where a stop ended training early too; not after an error."""

    def on_diverged(self, trainer: TrainerView, text: str) -> None:
        """After a fit that a number ended which is not finite, on whatever worker; text: what was told of it.

        The last place to change weights: all workers have left the fit, and nothing can be exchanged any more.
        """

    def close(self) -> None:
        """Let go of what is held; after an error too, even one in `start`."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on exactly: numbers, and arrays on the host, by name."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, before the next `fit`, which goes on with the same."""
