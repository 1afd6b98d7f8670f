from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynet.core.checks import integer, one_of
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.finite_check import SkipNonFinite
from cupynet.training.trainer import Trainer


class NonFinite(Callback):
    """Stops training or skips the batch if a loss or a gradient is NaN or infinite.

    Args:
        action: `stop` ends the fit with a DivergedError that names the worker, batch, samples and layer. This is also
            done without this callback. `skip` skips the batch on its worker and logs a warning, but ends the fit if the
            weights themselves are not finite.
        max_skipped: maximum number of batches that a worker may skip before the fit ends.
    """

    every_rank = True
    last = True

    def __init__(self, action: str = "stop", max_skipped: int = 100) -> None:
        self.action = one_of("action", action, ("stop", "skip"))
        self.max_skipped = integer("max_skipped", max_skipped, 1)
        self._skipped: list[tuple[int, int]] = []  # (epoch, batch) on this worker
        self._others = 0  # batches skipped by other workers up to the end of the last fit
        self._removed = 0  # batches skipped by workers that a resume removed

    @property
    def skipped_batches(self) -> int:
        """The number of batches skipped by all workers up to the end of the last fit, and by this worker since then."""
        return self._others + len(self._skipped)

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._skipped, self._others, self._removed = [], 0, 0
        if self.action == "skip":
            trainer.replica.check = SkipNonFinite(self.max_skipped, self._skipped)

    def on_fit_start(self, trainer: Trainer) -> None:
        if isinstance(check := trainer.replica.check, SkipNonFinite):
            check.max_skipped = self.max_skipped  # may have changed since the last fit

    def on_fit_end(self, trainer: Trainer) -> None:
        if self.action == "skip":
            own = np.array(self._skipped, np.int64).reshape(-1)
            every = np.concatenate(trainer.world.all_gather(own)).reshape(-1, 2)
            # a batch skipped by several stages is one batch
            self._others = self._removed + len(np.unique(every, axis=0)) - len(self._skipped)

    def state(self) -> dict[str, Any]:
        skipped = np.array(self._skipped, np.int64).reshape(-1, 2)
        return {"skipped": skipped, "others": self._others, "removed": self._removed}

    def restore(self, state: dict[str, Any]) -> None:
        self._skipped[:] = [(int(epoch), int(batch)) for epoch, batch in state["skipped"]]
        # not saved by earlier versions
        self._others, self._removed = int(state.get("others", 0)), int(state.get("removed", 0))

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Keep the batches of the worker that skipped most, and the number of the others."""
        lists = [np.reshape(each["skipped"], (-1, 2)) for each in states]
        most = max(lists, key=len)
        removed = int(states[0].get("removed", 0)) + len(np.unique(np.concatenate(lists), axis=0)) - len(most)
        return {"skipped": most, "others": removed, "removed": removed}
