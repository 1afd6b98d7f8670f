"""Progress on the terminal: a bar and a line per epoch during training, and a table at the end."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from cupynet.core import terminal
from cupynet.core.checks import amount, counted, one_line, one_of, percent
from cupynet.core.terminal import near, printable, wrapped
from cupynet.runs.run import Run, Summary
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord, Report, Spent
from cupynet.training.trainer_view import TrainerView

log = logging.getLogger(__name__)

STYLES = ("auto", "bar", "lines", "none")
WIDTH = 65  # characters in a row of the table, beside its name, on a terminal of 80


def figure(value: float) -> str:
    """Return a loss in four digits."""
    return f"{value:.4g}"


def describe(record: EpochRecord, epochs: int) -> str:
    """Return an epoch in one line. epochs: the last epoch of the fit."""
    text = f"epoch {record.epoch}/{epochs}: {counted(record.samples, 'image')} in {record.train_s:.1f} s"
    text += f" ({record.images_per_s:,.0f}/s)"
    if not math.isnan(record.loss):
        text += f", training loss {figure(record.loss)}"
    text += f", learning rate {figure(record.learning_rate)}"
    if record.evaluation is not None:
        text += f", {record.split} accuracy {percent(record.evaluation.accuracy)}"
        text += f", loss {figure(record.evaluation.loss)}"
    return text


class _Terminal(Console):
    """A console that keeps its first failure and then draws nothing more. (By default rich ends the process.)"""

    failure: Exception | None = None

    def on_broken_pipe(self) -> None:
        self._fail(BrokenPipeError("broken pipe"))

    def print(self, *objects: Any, **how: Any) -> None:
        with self.failing():
            super().print(*objects, **how)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self.failing():
            super().__exit__(kind, error, traceback)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Keep an exception of the stream or of rich."""
        try:
            yield
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure, self.quiet = self.failure or error, True


class Figures(ProgressColumn):
    """The known figures of a fit, the most important first: what is too long for the terminal is cut off."""

    def __init__(self) -> None:
        super().__init__(Column(ratio=1, no_wrap=True, overflow="crop"))

    def render(self, task: Task) -> Text:
        known, texts = task.fields, []
        if known.get("loss") is not None:
            texts.append(f"loss {figure(known['loss'])}")
        if "accuracy" in known:
            texts.append(f"accuracy {percent(known['accuracy'])}")
        if "images_per_s" in known:
            texts.append(f"{known['images_per_s']:,.0f} images/s")
        if known["workers"] > 1:
            texts.append(f"{known['workers']} workers")
        if known["memory"] is not None:
            texts.append(f"GPU {amount(known['memory'])}")
        return Text("  ".join(texts))


def _bar() -> Bar:
    return Bar(
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(16),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        Figures(),
        console=_Terminal(),
        refresh_per_second=4,
        expand=True,
    )


class Progress(Callback):
    """One line per epoch, and on a terminal a bar over the rounds of the current epoch below them.

    The lines are log records of level INFO; if nothing handles such records, as in a notebook, they are printed. A bar
    that fails is replaced by lines, with a warning.

    Args:
        style: `bar`; `lines` without a bar; `none`, lines in the log alone; or `auto`: `bar` on a terminal that can
            draw one (not if `TERM` is `dumb`), else `lines`.
    """

    def __init__(self, style: str = "auto") -> None:
        self.style = one_of("style", style, STYLES)
        self._bar: Bar | None = None
        self._rounds = 0  # of an epoch

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        if self.style == "auto":
            self.style = "bar" if terminal.can_draw() else "lines"

    def on_fit_start(self, trainer: TrainerView) -> None:
        if self.style != "bar":
            return
        self.close()
        self._bar, self._rounds = _bar(), _rounds(trainer)
        bar = self._bar
        self._task = bar.add_task(
            "",
            total=self._rounds,
            completed=trainer.round,
            epoch=_current(trainer),
            epochs=trainer.total_epochs,
            workers=trainer.workers,
            memory=_memory(trainer),
        )
        self._draw(bar.start)

    def on_iteration_end(self, trainer: TrainerView) -> None:
        if trainer.iteration == trainer.total_iterations:
            self._show(completed=trainer.round, loss=None)  # the last report is some rounds old
        elif trainer.round == self._rounds or trainer.round % 5 == 0:
            self._show(completed=trainer.round)

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        loss = None if math.isnan(report.loss) else report.loss
        self._show(loss=loss, images_per_s=report.images_per_s, memory=_memory(trainer))

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self._say(describe(record, trainer.total_epochs))
        loss = None if math.isnan(record.loss) else record.loss
        known = {} if record.evaluation is None else {"accuracy": record.evaluation.accuracy}
        self._show(loss=loss, images_per_s=record.images_per_s, **known)
        if self._bar is not None and trainer.epoch < trainer.total_epochs:
            bar = self._bar
            self._draw(lambda: bar.reset(self._task))
            self._show(epoch=_current(trainer))

    def on_fit_end(self, trainer: TrainerView) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self._bar is not None:
            self._draw(self._bar.stop)
            self._bar = None

    def _say(self, line: str) -> None:
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info("%s", line)
        elif self.style != "none":
            with contextlib.suppress(OSError, ValueError):  # stdout is full, or closed
                print(terminal.folded(line), flush=True)

    def _show(self, **known: Any) -> None:
        if self._bar is not None:
            bar = self._bar
            self._draw(lambda: bar.update(self._task, **known))

    def _draw(self, work: Callable[[], None]) -> None:
        """Draw; if that fails, or has failed in rich's thread, show lines from here on."""
        bar = cast(Bar, self._bar)
        drawn_on = cast(_Terminal, bar.console)
        with drawn_on.failing():
            work()
        if drawn_on.failure is not None:
            self.style, self._bar = "lines", None
            with contextlib.suppress(Exception):
                bar.stop()  # restores stdout
            kind = type(drawn_on.failure).__name__
            log.warning("the progress bar is given up (%s: %s)", kind, one_line(drawn_on.failure))


def _rounds(trainer: TrainerView) -> int:
    """Return the number of rounds in an epoch, at the start of a fit."""
    epochs = trainer.total_epochs - trainer.epoch
    return (trainer.total_iterations - trainer.iteration + trainer.round) // max(epochs, 1)


def _current(trainer: TrainerView) -> int:
    return min(trainer.epoch + 1, trainer.total_epochs)


def _memory(trainer: TrainerView) -> int | None:
    """Return the bytes held by the memory pool of this worker's GPU; None on a CPU."""
    if trainer.backend.name != "cupy":
        return None
    from cupynet.backend import cuda

    return cuda.pool(trainer.backend.device).held


def is_quiet(callbacks: Mapping[str, Any]) -> bool:
    """Return True if the settings of `callbacks` have a progress of the style `none`."""
    part = callbacks.get("progress")
    return isinstance(part, Mapping) and part.get("style") == "none"


def result_table(summary: Summary, run: Run) -> None:
    """Print the results of a run."""
    console = _Terminal(soft_wrap=True, highlight=False)
    for name, value in _rows(summary).items():
        style = "bold" if name == "test accuracy" else "bold red" if name == "FAST DEV RUN" else ""
        for number, line in enumerate(wrapped(printable(value), WIDTH)):
            console.print(Text.assemble(f"{'' if number else name:<15}", (line, style)))
    for name, path in (("report", run.report_path), ("run folder", run.folder)):
        if path.exists() or path == run.folder:
            console.print(Text(f"{name:<15}{printable(near(path))}"))
    if console.failure is not None:
        log.warning("the results cannot be shown (%s): they are in %s", one_line(console.failure), run.summary_path)


def _rows(summary: Summary) -> dict[str, str]:
    """Return the rows of the closing table: name -> text."""
    setup, outcome, cost, scores = summary.setup, summary.outcome, summary.cost, summary.scores
    stages = f" of {setup.stages} stages" if setup.stages > 1 else ""
    trained = counted(outcome.iterations, "iteration")
    if outcome.epochs:
        trained = f"{outcome.epochs} epoch{'s' * (outcome.epochs > 1)}"
    rows = {}
    if setup.fast_dev_run:
        rows["FAST DEV RUN"] = "a trial of whether everything works: these figures are no results"
    rows |= {
        "data": f"{setup.dataset} (fallback: not MNIST)" if setup.fallback else setup.dataset,
        "backend": f"{setup.backend}, {setup.dtype}",
        "workers": f"{setup.workers}{stages} on {', '.join(dict.fromkeys(setup.devices))}",
        "replicas": "-" if setup.workers == 1 else setup.synchronizer + _drift(summary),
        "training": f"{trained} in {cost.train_s:.1f} s, {cost.images_per_s:,.0f} images/s",
    }
    if cost.spent is not None and len(cost.spent["rounds_s"]) > 1:
        rows["spent"] = _spent(Spent(**cost.spent), summary)
    if cost.memory:
        rows["GPU memory"] = _pools(cost.memory)
    if cost.pipeline is not None:
        rows["pipeline"] = f"{cost.pipeline['speed_up']:.2f} times one worker, bound {cost.pipeline['bound']:.2f}"
    if outcome.advice is not None:
        rows["advice"] = outcome.advice
    if outcome.left_out:
        rows["left out"] = f"{counted(outcome.left_out, 'batch')}, not finite"
    if outcome.skipped_steps:
        rows["skipped"] = f"{counted(outcome.skipped_steps, 'step')}, to find the loss scale"
    if outcome.stopped_by is not None:
        rows["stopped"] = outcome.stopped_by
    best = outcome.early_stopping
    if best is not None and best["best_epoch"] is not None:
        kept = "restored" if best["restored"] else "not restored"
        rows["best epoch"] = f"{best['best_epoch']}, validation {best['monitor']} {figure(best['best_score'])}, {kept}"
    if outcome.train_loss is not None:
        rows["training loss"] = f"{figure(outcome.train_loss)}, mean of the last epoch"
    if scores.validation_accuracy is not None:
        rows["validation"] = f"accuracy {percent(scores.validation_accuracy)}"
    if scores.test_accuracy is not None:
        rows["test accuracy"] = percent(scores.test_accuracy)
        rows["test loss"] = "-" if scores.test_loss is None else figure(scores.test_loss)
        rows["macro F1"] = "-" if scores.test_f1 is None else f"{scores.test_f1:.4f}"
    return rows


def _drift(summary: Summary) -> str:
    """Return how far the replicas were apart when that was last measured, and in which layer most."""
    if summary.outcome.divergence is None:
        return ""
    layers = summary.outcome.divergence_by_layer or {}
    most = f", most in {max(layers, key=lambda name: layers[name])}" if layers else ""
    bound = "at most " if summary.setup.stages > 1 else ""
    return f", last {bound}{100 * summary.outcome.divergence:.2g} % apart{most}"


def _spent(spent: Spent, summary: Summary) -> str:
    """Return where the workers' time went, and what they sent."""

    def between(name: str) -> str:
        shares = [round(100 * share) for share in spent.share(name)]
        return f"{min(shares)}-{max(shares)} %" if min(shares) < max(shares) else f"{shares[0]} %"

    waiting = f"waiting {between('waiting_s')}, " if summary.setup.stages > 1 else ""
    round_bytes = summary.cost.bytes_sent // max(summary.outcome.iterations, 1)
    sent = f"sent {amount(summary.cost.bytes_sent)}, {amount(round_bytes)} a round"
    return f"{waiting}averaging {between('averaging_s')}, data {between('data_s')}; {sent}"


def _pools(memory: list[dict[str, Any]]) -> str:
    """Return what the fullest of the devices' memory pools held and used."""
    most = max(memory, key=lambda pool: pool["held_bytes"])
    used, held, limit = (most[f"{name}_bytes"] for name in ("used", "held", "limit"))
    return f"{most['device']} held {amount(held)}, used {amount(used)}{'' if limit is None else f' of {amount(limit)}'}"


def profile_table(profile: dict[str, Any], longest: int, folder: Path | None) -> None:
    """Print the calls that took longest, see `Profile`; in 80 characters."""
    console = _Terminal(soft_wrap=True, highlight=False)
    console.print(f"profile of {counted(profile['rounds'], 'round')}, from iteration {profile['first']} on")
    console.print(f"{'':<36}{'calls':>8}{'total ms':>12}{'mean ms':>12}{'share':>9}")
    for piece in profile["pieces"][:longest]:
        name = piece["name"]
        if piece["kind"] in ("forward", "backward", "evaluation") and piece["kind"] not in name:
            name += f" {piece['kind']}"
        name = name if len(name) < 36 else f"{name[:16]}...{name[-16:]}"
        times = f"{piece['calls']:>8,}{piece['total_ms']:>12,.1f}{piece['mean_ms']:>12.3f}"
        console.print(Text(f"{name:<36}{times}{percent(piece['share'], 1):>9}"))
    if folder is not None:
        console.print(Text(f"all of it: profile.json and trace.json in {near(folder)}"))
