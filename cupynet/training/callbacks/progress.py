"""Progress on the terminal: a line per epoch, and a bar below them."""

from __future__ import annotations

import contextlib
import logging
import math
import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from cupynet.core import terminal
from cupynet.core.checks import counted, one_line, one_of, percent
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord, Report
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)

STYLES = ("auto", "bar", "lines", "none")
REFRESH_S = 0.25  # between two drawings of the bar


class Progress(Callback):
    """Shows one line per epoch, and on a terminal a bar over the rounds of the current epoch below them.

    The lines are log records of level INFO; if nothing handles such records, as in a notebook, they are printed. If the
    bar cannot be drawn, a warning is logged, and only lines are shown.

    Args:
        style: `bar`; `lines` without a bar; `none`, lines in the log alone; or `auto`: `bar` on a terminal that can
            draw one (not if `TERM` is `dumb`), else `lines`.
    """

    def __init__(self, style: str = "auto") -> None:
        self.style = one_of("style", style, STYLES)
        self._bar: Bar | None = None
        self._text = self._accuracy = ""

    def start(self, trainer: Trainer, run: Run | None) -> None:
        if self.style == "auto":
            self.style = "bar" if terminal.can_draw() else "lines"

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.style != "bar":
            return
        epochs = max(trainer.total_epochs - trainer.epoch, 1)
        rounds = (trainer.total_iterations - trainer.iteration + trainer.round) // epochs
        figures = TextColumn(
            "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="crop")
        )
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(16),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            figures,
            console=_Screen(),
            auto_refresh=False,
            expand=True,
        )
        self._task = self._bar.add_task("", total=rounds, epoch="")
        self._text = self._accuracy = ""
        self._draw(trainer)

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self._bar is not None and time.monotonic() - self._drawn >= REFRESH_S:
            self._draw(trainer)

    def on_report(self, trainer: Trainer, report: Report) -> None:
        self._note(report.loss, report.images_per_s)

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        line = describe(record, trainer.total_epochs)
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info("%s", line)
        elif self.style != "none":
            with contextlib.suppress(OSError, ValueError):  # stdout is full or closed
                print(line, flush=True)
        if record.evaluation is not None:
            self._accuracy = f"accuracy {percent(record.evaluation.accuracy)}"
        self._note(record.loss, record.images_per_s)
        self._draw(trainer, restart=trainer.epoch < trainer.total_epochs)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.stop()
            self._bar = None

    def _note(self, loss: float, images_per_s: float) -> None:
        shown = "" if math.isnan(loss) else f"loss {loss:.4g}"
        self._text = "  ".join(filter(None, (shown, self._accuracy, f"{images_per_s:,.0f} images/s")))

    def _draw(self, trainer: Trainer, *, restart: bool = False) -> None:
        """Draw the bar, from the beginning if `restart`. If that fails, show only lines from now on."""
        if self._bar is None:
            return
        self._drawn = time.monotonic()
        complete = trainer.epoch == trainer.total_epochs
        epoch = f"{trainer.epoch + (not complete)}/{trainer.total_epochs}"
        done = self._bar.tasks[0].total if complete else trainer.round
        try:
            if restart:
                self._bar.reset(self._task)
            self._bar.update(self._task, completed=done, epoch=epoch, description=self._text)
            self._bar.start()
            self._bar.refresh()
        except Exception as error:  # of the terminal or of rich
            log.warning("the progress bar failed and is disabled (%s: %s)", type(error).__name__, one_line(error))
            self.style = "lines"
            self.close()


class _Screen(Console):
    """A console whose errors are raised."""

    def on_broken_pipe(self) -> None:  # by default rich ends the process
        raise BrokenPipeError("broken pipe")


def describe(record: EpochRecord, epochs: int) -> str:
    """Return an epoch in one line. epochs: the last epoch of the fit."""
    text = f"epoch {record.epoch}/{epochs}: {counted(record.samples, 'image')} in {record.train_s:.1f} s"
    text += f" ({record.images_per_s:,.0f}/s)"
    if not math.isnan(record.loss):
        text += f", training loss {record.loss:.4g}"
    text += f", learning rate {record.learning_rate:.4g}"
    if record.evaluation is not None:
        text += f", {record.split} accuracy {percent(record.evaluation.accuracy)}"
        text += f", loss {record.evaluation.loss:.4g}"
    return text
