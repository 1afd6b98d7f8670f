"""What a run says on the terminal: a progress bar, or plain lines where there is none, and a table at the end."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cupynet.errors import ConfigError
from cupynet.training.callbacks import Callback, EpochRecord, Report

if TYPE_CHECKING:
    from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)

STYLES = ("auto", "bar", "lines", "none")


def progress(style: str = "auto") -> Callback:
    """How progress is shown: `bar`, `lines`, `none`, or `auto`: a bar on a terminal, else lines."""
    if style not in STYLES:
        raise ConfigError(f"callbacks.progress={style}: must be one of {', '.join(STYLES)}")
    if style == "auto":
        style = "bar" if sys.stdout.isatty() else "lines"
    return {"bar": ProgressBar, "lines": ProgressLines, "none": Callback}[style]()


def describe(record: EpochRecord) -> str:
    """An epoch in one line."""
    rate = record.samples / record.train_s if record.train_s else 0.0
    text = f"epoch {record.epoch}: {record.samples:,} images in {record.train_s:.1f} s ({rate:,.0f}/s)"
    if record.evaluation is not None:
        text += f", {record.split} accuracy {record.evaluation.accuracy:.2%}, loss {record.evaluation.loss:.4f}"
    return text


class _Terminal(Console):
    """A console whose reader may leave without ending the process, which is what rich does by default."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class ProgressLines(Callback):
    """One line per epoch, on the terminal and in the run's log."""

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        log.info("%s", describe(record))


class ProgressBar(ProgressLines):
    """Below the lines, a bar over all rounds, drawn by a thread of its own four times a second."""

    def __init__(self) -> None:
        columns = (
            TextColumn("[bold]epoch {task.fields[epoch]}"),
            BarColumn(),
            TextColumn(
                "{task.percentage:>3.0f} %  training loss {task.fields[loss]}  "
                "{task.fields[split]} accuracy {task.fields[accuracy]}"
            ),
            TextColumn("{task.fields[rate]} images/s"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=_Terminal(), refresh_per_second=4)
        self._task: TaskID | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        fields: dict[str, Any] = {"epoch": 1, "loss": "  -   ", "split": "test", "accuracy": "  -   ", "rate": "-"}
        self._task = self._progress.add_task("", total=trainer.total_iterations, **fields)
        self._progress.start()

    def on_iteration_end(self, trainer: Trainer) -> None:
        if self._task is None or trainer.iteration % 5:
            return
        self._progress.update(self._task, completed=trainer.iteration, epoch=trainer.epoch + 1)

    def on_report(self, trainer: Trainer, report: Report) -> None:
        if self._task is not None:
            self._progress.update(self._task, loss=f"{report.loss:.4f}", rate=f"{report.images_per_s:,.0f}")

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        super().on_epoch_end(trainer, record)
        if self._task is not None and record.evaluation is not None:
            accuracy = f"{record.evaluation.accuracy:.2%}"
            self._progress.update(self._task, accuracy=accuracy, split=record.split)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=trainer.iteration)
        self._progress.stop()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        self._progress.stop()


def result_table(summary: dict[str, Any], folder: str) -> None:
    """Print what a run came to."""
    dataset = f"[bold red]{summary['dataset']} (fallback: not MNIST)[/]" if summary["fallback"] else summary["dataset"]
    workers = f"{summary['workers']} on {', '.join(dict.fromkeys(summary['devices']))}"
    frequency = summary["averaging_frequency"]
    every = {"epoch": "after every epoch", "end": "at the end"}.get(frequency, f"every {frequency} iterations")
    averaging = every if summary["workers"] > 1 else "-"
    speed = f"{summary['train_s']:.1f} s, {summary['images_per_s']:,.0f} images/s"
    rows = {
        "data": dataset,
        "backend": f"{summary['backend']}, {summary['dtype']}",
        "workers": workers,
        "averaged": averaging,
        "training": f"{summary['epochs']} epochs in {speed}",
    }
    if summary["test_accuracy"] is not None:
        rows["test accuracy"] = f"[bold]{summary['test_accuracy']:.2%}[/]"
        rows["test loss"] = f"{summary['test_loss']:.4f}"
        rows["macro F1"] = f"{summary['test_f1']:.4f}"
    rows["run folder"] = escape(folder)
    console = _Terminal(soft_wrap=True, highlight=False)
    for name, value in rows.items():
        console.print(f"{name:<15}{value}")
