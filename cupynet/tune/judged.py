"""What a trial tells of its evaluations, and hears: to go on, or that others are better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupynet.checks import OBJECTIVES
from cupynet.runs import Run
from cupynet.training import Callback, EpochRecord, Evaluation, StopReason, TrainerView

if TYPE_CHECKING:
    from cupynet.sweeps.jobs import Asking

GO_ON, PRUNED = "go on", "pruned: other trials were better after as many epochs"
ALONE = "the search that this trial belonged to is no more"


class Judged(Callback):
    """Tells a search of each evaluation of validation images, and ends the fit where the search says so, or is no more.

    Args:
        asking: the way to the search.
    """

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def __deepcopy__(self, memo: dict[int, Any]) -> Judged:
        return self  # there is one way, and rank 0 alone goes it

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        """Nothing is told before there is an evaluation."""

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        if record.evaluation is None:
            return
        last = trainer.iteration == trainer.total_iterations
        answer = self._asking.ask({"epoch": record.epoch, "last": last, "figures": figures(record.evaluation)})
        if answer != GO_ON:
            trainer.stop(answer or ALONE, StopReason.EARLY)

    def on_fit_end(self, trainer: TrainerView) -> None:
        if trainer.evaluation is not None:
            self._asking.ask({"epoch": trainer.epoch, "result": figures(trainer.evaluation)})


def figures(evaluation: Evaluation) -> dict[str, float]:
    """What may be searched for, of an evaluation."""
    return {name: float(getattr(evaluation, name)) for name in OBJECTIVES}
