from __future__ import annotations

import contextlib
import logging
import math
import shutil
import time

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from cupynet.core import terminal
from cupynet.core.checks import one_of
from cupynet.core.table import Screen
from cupynet.core.wording import one_line, percent
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord, IterationRecord
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)

STYLES = ("auto", "bar", "lines", "none")
REFRESH_S = 0.25  # minimum interval between updates of the bar
WIDE, WIDE_BAR, NARROW_BAR = 100, 16, 5  # columns of a wide terminal, and of the bar on wide and narrow terminals
OTHER_COLUMNS = "  100 % 00:00 "
NARROWEST, PIPED = 80, (200, 24)  # columns of the narrowest terminal; columns and lines without a terminal
TIMESTAMP = len("[12:30:05] ")  # columns of a log line before the message


class Progress(Callback):
    """Shows a line for each epoch and, on a terminal, a progress bar of the current epoch.

    Lines are logged at level INFO, or printed if no handler shows them, as in a notebook. If drawing the bar fails, a
    warning is logged and only lines are shown.

    Args:
        style: `bar`; `lines`, without a bar; `none`, to only log lines; or `auto`, which is `bar` on a terminal that
            can draw one (not if TERM=dumb), otherwise `lines`.
    """

    def __init__(self, style: str = "auto") -> None:
        self.style = one_of("style", style, STYLES)
        self._bar: Bar | None = None
        self._text = ""
        self._evaluated: list[str] = []
        self._room = 0  # characters available for figures

    def start(self, trainer: Trainer, run: Run | None) -> None:
        if self.style == "auto":
            self.style = "bar" if terminal.can_draw() else "lines"

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.style != "bar":
            return
        epochs = max(trainer.plan.epochs - trainer.epoch, 1)
        iterations = (trainer.plan.iterations - trainer.iteration + trainer.epoch_iteration) // epochs
        figures = TextColumn(
            "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="crop")
        )
        screen = Screen()
        width = WIDE_BAR if screen.width >= WIDE else NARROW_BAR
        epoch = f"epoch {trainer.plan.epochs}/{trainer.plan.epochs}"
        self._room = screen.width - len(epoch) - width - len(OTHER_COLUMNS)
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(width),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            figures,
            console=screen,
            auto_refresh=False,
            expand=True,
        )
        self._task = self._bar.add_task("", total=iterations, epoch="")
        self._text, self._evaluated = "", []
        self._draw(trainer)

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self._bar is not None and time.monotonic() - self._drawn >= REFRESH_S:
            self._draw(trainer)

    def on_log(self, trainer: Trainer, record: IterationRecord) -> None:
        self._note(record)

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        say(log, describe(record, trainer.plan.epochs), printed=self.style != "none")
        if record.evaluation is not None:
            self._evaluated = _evaluated(record)
        self._note(record)
        self._draw(trainer, restart=trainer.epoch < trainer.plan.epochs)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.stop()
            self._bar = None

    def _note(self, record: IterationRecord | EpochRecord) -> None:
        found = [*_trained(record), *self._evaluated, f"{record.images_per_s:,.0f} images/s"]
        figures = [figure for figure in found if figure]
        while figures and len("  ".join(figures)) > self._room:
            figures.pop()
        self._text = "  ".join(figures)

    def _draw(self, trainer: Trainer, *, restart: bool = False) -> None:
        """Draw the bar, starting again at 0 if `restart`. If that fails, show only lines from now on."""
        if self._bar is None:
            return
        self._drawn = time.monotonic()
        complete = trainer.epoch == trainer.plan.epochs
        epoch = f"{trainer.epoch + (not complete)}/{trainer.plan.epochs}"
        done = self._bar.tasks[0].total if complete else trainer.epoch_iteration
        try:
            if restart:
                self._bar.reset(self._task)
            self._bar.update(self._task, completed=done, epoch=epoch, description=self._text)
            self._bar.start()
            self._bar.refresh()
        except Exception as error:  # from the terminal or rich
            log.warning("the progress bar failed and is disabled (%s: %s)", type(error).__name__, one_line(error))
            self.style = "lines"
            self.close()


def say(logger: logging.Logger, text: str, *, printed: bool) -> None:
    """Log a line at level INFO. If `printed` and no handler shows it, as in a notebook, print it instead."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", text)
    elif printed:
        with contextlib.suppress(OSError, ValueError):  # stdout is full or closed
            print(text, flush=True)


def describe(record: EpochRecord, epochs: int) -> str:
    """Describe an epoch, out of `epochs`, in a line that fits a terminal of at least 80 columns."""
    took, speed = f"{record.train_s:.1f} s", f"{record.images_per_s:,.0f}"
    trained, evaluated = _trained(record), _evaluated(record)
    scores = [figure.removeprefix("accuracy ") for figure in trained]
    evaluated_scores = [figure.removeprefix("loss ").replace("validation ", "val ") for figure in evaluated]
    width = max(shutil.get_terminal_size(PIPED).columns, NARROWEST) - TIMESTAMP - len(f"epoch {epochs}/{epochs}: ")
    for figures in (
        [took, f"{speed} images/s", *trained, *evaluated],
        [took, f"{speed}/s", *scores, *evaluated_scores],
        [f"{speed}/s", *scores, *evaluated_scores],
        [f"{speed}/s", *scores[:1], *evaluated_scores],
    ):
        text = ", ".join(figures)
        if len(text) <= width:
            break
    return f"epoch {record.epoch}/{epochs}: {text}"


def _evaluated(record: EpochRecord) -> list[str]:
    main, *more = [""] if record.evaluation is None else record.evaluation.brief()
    return [f"{record.split} {main}", *more] if main else []


def _trained(record: IterationRecord | EpochRecord) -> list[str]:
    loss, accuracy = f"loss {record.loss:.4g}", f"accuracy {percent(record.accuracy)}"
    return [text for text, value in ((loss, record.loss), (accuracy, record.accuracy)) if not math.isnan(value)]
