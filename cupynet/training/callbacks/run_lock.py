from __future__ import annotations

import logging

from cupynet.core.lock import Hold
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)


class RunLock(Callback):
    """Locks the run folder of a `ParallelWrapper`, so that no other training run can use it. Commands lock theirs."""

    def __init__(self) -> None:
        self._hold: Hold | None = None

    def start(self, trainer: Trainer, run: Run | None) -> None:
        if run is not None and run.settings is None:
            self._hold = Hold(run.folder)
            if self._hold.warning:
                log.warning("%s", self._hold.warning)

    def close(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None
