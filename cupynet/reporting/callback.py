from __future__ import annotations

import logging
import sys

from cupynet.core.checks import flag
from cupynet.core.errors import ConfigError
from cupynet.core.wording import one_line
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)


class ReportPage(Callback):
    """Writes `report.html` and `curves.png` to the run folder when the run ends, even after an error.

    The results are saved first. If writing fails, the callback logs a warning and the run ends as usual.
    `cupynet report RUN` can write the report at any later time.

    Args:
        enabled: False to disable the report.
    """

    last = True

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = flag("enabled", enabled)
        self._run: Run | None = None

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._run = run
        if run is None and self.enabled:
            log.warning("ReportPage writes nothing without a run folder. Pass run=FOLDER to the wrapper")

    def close(self) -> None:
        run, self._run = self._run, None
        error = sys.exc_info()[1]
        if run is None or not self.enabled or not isinstance(error, Exception | None):
            return  # a KeyboardInterrupt or SystemExit ends the process at once
        try:
            from cupynet.reporting.page import write_page  # imports Jinja and matplotlib

            _, missing = write_page(run.folder, over=True, error=error)
            if missing:
                log.info("%s", missing)
        except ConfigError:
            if error is None:
                log.warning("cannot write report.html, because %s has no history. Add a HistoryWriter", run)
        except Exception as failure:
            reason = one_line(failure) or type(failure).__name__
            log.warning("cannot write report.html (%s). To write it later: cupynet report %s", reason, run)
