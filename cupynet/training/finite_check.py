"""Checks for non-finite losses and gradients, before they change weights or reach other replicas."""

from __future__ import annotations

import logging

from cupynet.core.errors import DivergedError
from cupynet.core.wording import counted, setting
from cupynet.parallel import is_finite
from cupynet.training.diagnosis import diagnose
from cupynet.training.replica import Replica, Step, StepCheck

REMEDY = ". Lower learning_rate, train in a wider dtype, or skip such batches: " + setting(
    "callbacks", "nonfinite.action", "skip", python="NonFinite(action='skip')"
)

log = logging.getLogger(__name__)


class StopAtNonFinite(StepCheck):
    """Raises a DivergedError that names the worker, batch, samples and layer."""

    def __call__(self, replica: Replica, step: Step) -> Step:
        if step.finite or step.batch is None:
            return step
        text = diagnose(replica, step.batch)
        replica.forget()
        raise DivergedError(text + REMEDY)


class SkipNonFinite(StepCheck):
    """Skips the batch on its worker and logs a warning. `skipped` receives the epoch and index of each batch.

    Raises DivergedError if the weights themselves are not finite, or if a worker skips more than `max_skipped`
    batches.
    """

    may_wait = False

    def __init__(self, max_skipped: int, skipped: list[tuple[int, int]]) -> None:
        self.max_skipped, self.skipped = max_skipped, skipped

    def __call__(self, replica: Replica, step: Step) -> Step:
        if step.overflowed:
            return step
        stages, batch = replica.groups.stages, step.batch
        text = diagnose(replica, batch) if batch is not None and not step.finite else ""
        broken = bool(text) if stages.size == 1 else bool(stages.gather_numbers(bool(text)).any())
        if not broken or batch is None:
            return step
        reason = text or "another pipeline stage has a non-finite value"
        if not stages.gather_numbers(is_finite(*replica.params.vectors)).all():
            raise DivergedError(reason + REMEDY)
        if len(self.skipped) >= self.max_skipped:
            before = f"{counted(self.max_skipped, 'batch')} already skipped by this worker"
            raise DivergedError(f"{reason}; {before}{REMEDY}")
        if text:
            log.warning("%s. The batch is skipped", text)
        self.skipped.append((batch.epoch, batch.index))
        replica.forget()
        return Step(batch)
