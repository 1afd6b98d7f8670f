"""What a run says on the terminal: a progress bar, or plain lines where there is none, and a table at the end."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from cupynet.core import terminal
from cupynet.core.checks import amount, counted, one_line, one_of, percent
from cupynet.core.terminal import near, wrapped
from cupynet.runs.run import Run, Summary
from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.progress_bar import Bar, figure
from cupynet.training.events import EpochRecord, Report, Spent, TrainerView

log = logging.getLogger(__name__)

STYLES = ("auto", "bar", "lines", "none")
STRESSED = {"test accuracy": "bold", "FAST DEV RUN": "bold red"}
WIDTH = 65  # characters in a row of the table, beside its name, on a terminal of 80


def describe(record: EpochRecord, epochs: int) -> str:
    """An epoch in one line. epochs: with which one the fit ends."""
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
    """A console that may fail without anybody failing with it; rich by default ends the process when a reader leaves.

    What goes wrong is kept, by the thread that draws too, and nothing more is drawn.

    Attributes:
        failure: the first that went wrong.
    """

    failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Draw nothing more."""
        self.failure, self.quiet = self.failure or error, True

    def on_broken_pipe(self) -> None:
        self.fail(BrokenPipeError("nobody reads it any more"))

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
        """An exception in here is a failure of the display."""
        try:
            yield
        except Exception as error:  # of the stream, or of rich
            self.fail(error)


class Progress(Callback):
    """One line per epoch, and on a terminal a bar over all rounds of a fit below them.

    The lines are records of the log (level INFO): of a command's terminal and of train.log. Where nobody listens to
    such records, as in a notebook or a script that has not set up logging, they are printed. The bar is drawn by a
    thread of its own, four times a second; where that fails, it is told once, and lines alone are left.

    Args:
        style: `bar`; `lines` alone; `none`, nothing on the terminal, and the lines in a log alone; or `auto`: a bar on
            a terminal that can draw one, not where `TERM` is `dumb`, else lines.
    """

    def __init__(self, style: str = "auto") -> None:
        self.style = one_of("style", style, STYLES)
        self._bar: Bar | None = None

    def start(self, trainer: TrainerView, run: Run | None) -> None:
        if self.style == "auto":
            self.style = "bar" if terminal.can_draw() else "lines"

    def on_fit_start(self, trainer: TrainerView) -> None:
        if self.style != "bar":
            return
        self.close()
        known = {"epoch": _current(trainer), "epochs": trainer.total_epochs, "workers": trainer.workers}
        self._bar = Bar(_Terminal(), trainer.total_iterations, trainer.iteration, **known, memory=_memory(trainer))
        self._draw(self._bar, self._bar.start)

    def on_iteration_end(self, trainer: TrainerView) -> None:
        end = trainer.iteration == trainer.total_iterations
        if end:
            self._show(completed=trainer.iteration, loss=None)  # the last that was reported is some rounds old
        elif trainer.iteration % 5 == 0:
            self._show(completed=trainer.iteration, epoch=_current(trainer))

    def on_report(self, trainer: TrainerView, report: Report) -> None:
        loss = None if math.isnan(report.loss) else report.loss
        self._show(loss=loss, images_per_s=report.images_per_s, memory=_memory(trainer))

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self._say(describe(record, trainer.total_epochs))
        loss = None if math.isnan(record.loss) else record.loss
        self._show(completed=trainer.iteration, epoch=_current(trainer), loss=loss, images_per_s=record.images_per_s)
        if record.evaluation is not None:
            self._show(accuracy=record.evaluation.accuracy, split=record.split)

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._show(completed=trainer.iteration)
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        bar, self._bar = self._bar, None
        if bar is not None:
            self._draw(bar, bar.stop)

    def _say(self, line: str) -> None:
        if log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info("%s", line)
        elif self.style != "none":
            with contextlib.suppress(OSError, ValueError):  # stdout is full, or closed
                print(terminal.folded(line), flush=True)

    def _show(self, **known: Any) -> None:
        bar = self._bar
        if bar is not None:
            self._draw(bar, lambda: bar.show(**known))

    def _draw(self, bar: Bar, work: Callable[[], None]) -> None:
        """Do something to the bar; where that fails, or drawing has failed meanwhile, there are lines from here on."""
        drawn_on = cast(_Terminal, bar.console)
        with drawn_on.failing():
            work()
        failure = drawn_on.failure
        if failure is not None:
            self.style, self._bar = "lines", None
            with contextlib.suppress(Exception):
                bar.stop()  # gives stdout back
            log.warning("the progress bar is given up (%s: %s)", type(failure).__name__, one_line(failure))


def _current(trainer: TrainerView) -> int:
    """The epoch that is going on, from 1; after the last, that one."""
    return min(trainer.epoch + 1, trainer.total_epochs)


def _memory(trainer: TrainerView) -> int | None:
    """Bytes that the memory pool of this worker's GPU holds; None on a CPU."""
    if trainer.backend.name != "cupy":
        return None
    from cupynet.backend import cuda

    return cuda.pool(trainer.backend.device).held


def _spent(spent: Spent, summary: Summary) -> str:
    """Where the workers' time went, and what they sent, in at most `WIDTH` characters."""

    def between(name: str) -> str:
        shares = [round(100 * share) for share in spent.share(name)]
        return f"{min(shares)}-{max(shares)} %" if min(shares) < max(shares) else f"{shares[0]} %"

    parts, sent = f"averaging {between('averaging_s')}, data {between('data_s')}", amount(summary.cost.bytes_sent)
    if summary.setup.stages > 1:
        return f"waiting {between('waiting_s')}, {parts}; sent {sent}"
    return f"{parts}; sent {sent}, {amount(summary.cost.bytes_sent // max(summary.outcome.iterations, 1))} a round"


def _replicas(summary: Summary) -> dict[str, str]:
    """How replicas were kept together, and how far apart they were: in one row if it is short enough, else in two."""
    if summary.setup.workers == 1:
        return {"replicas": "-"}
    if summary.outcome.divergence is None:
        return {"replicas": summary.setup.synchronizer}
    apart = _drift(summary, summary.outcome.divergence)
    row = f"{summary.setup.synchronizer}, {apart}"
    return {"replicas": row} if len(row) <= WIDTH else {"replicas": f"{summary.setup.synchronizer},", "": apart}


def _drift(summary: Summary, divergence: float) -> str:
    """How far the replicas were apart when that was last measured, and in which layer most."""
    layers = summary.outcome.divergence_by_layer or {}
    most = f", most in {max(layers, key=lambda name: layers[name])}" if layers else ""
    return f"last {'at most ' * (summary.setup.stages > 1)}{100 * divergence:.2g} % apart{most}"


def _pools(memory: list[dict[str, Any]]) -> str:
    """What the fullest of the devices' memory pools held and used."""
    most = max(memory, key=lambda pool: pool["held_bytes"])
    used, held, limit = (most[f"{name}_bytes"] for name in ("used", "held", "limit"))
    where = most["device"] if len(memory) == 1 else f"{most['device']}, the fullest of {len(memory)},"
    return f"{where} held {amount(held)}, used {amount(used)}{'' if limit is None else f' of {amount(limit)}'}"


def is_quiet(callbacks: Mapping[str, Any]) -> bool:
    """Whether settings ask for silence on the terminal: a progress of the style `none`."""
    part = callbacks.get("progress")
    return isinstance(part, Mapping) and part.get("style") == "none"


def result_table(summary: Summary, run: Run) -> None:
    """Print what a run came to."""
    console = _Terminal(soft_wrap=True, highlight=False)
    for name, value in _rows(summary).items():
        style = STRESSED.get(name, "bold red" if name == "data" and summary.setup.fallback else "")
        for number, line in enumerate(wrapped(value, WIDTH) or [""]):
            console.print(Text.assemble(f"{'' if number else name:<15}", (line, style)))
    for name, path in (("report", run.report_path), ("run folder", run.folder)):
        if path.exists() or path == run.folder:
            console.print(Text(f"{name:<15}{near(path)}"))
    if console.failure is not None:
        log.warning("the results cannot be shown (%s): they are in %s", one_line(console.failure), run.summary_path)


def _rows(summary: Summary) -> dict[str, str]:
    """Return the rows of the closing table: name -> text."""
    dataset = f"{summary.setup.dataset} (fallback: not MNIST)" if summary.setup.fallback else summary.setup.dataset
    stages = f" of {summary.setup.stages} stages" if summary.setup.stages > 1 else ""
    count, unit = (
        (summary.outcome.epochs, "epoch") if summary.outcome.epochs else (summary.outcome.iterations, "iteration")
    )
    trained = f"{count} {unit}{'s' * (count != 1)}"
    rows = {}
    if summary.setup.fast_dev_run:
        rows["FAST DEV RUN"] = "a trial of whether everything works: these figures are no results"
    rows |= {
        "data": dataset,
        "backend": f"{summary.setup.backend}, {summary.setup.dtype}",
        "workers": f"{summary.setup.workers}{stages} on {', '.join(dict.fromkeys(summary.setup.devices))}",
        **_replicas(summary),
        "training": f"{trained} in {summary.cost.train_s:.1f} s, {summary.cost.images_per_s:,.0f} images/s",
    }
    if summary.cost.spent is not None and len(summary.cost.spent["rounds_s"]) > 1:
        rows["spent"] = _spent(Spent(**summary.cost.spent), summary)
    if summary.cost.memory:
        rows["GPU memory"] = _pools(summary.cost.memory)
    if summary.cost.pipeline is not None:
        speed = summary.cost.pipeline
        rows["pipeline"] = f"{speed['speed_up']:.2f} times one worker, bound {speed['bound']:.2f}"
    if summary.outcome.advice is not None:
        rows["advice"] = summary.outcome.advice
    if summary.outcome.left_out:
        rows["left out"] = f"{summary.outcome.left_out} batch{'es' * (summary.outcome.left_out > 1)}, not finite"
    if summary.outcome.skipped_steps:
        rows["skipped"] = (
            f"{summary.outcome.skipped_steps} step{'s' * (summary.outcome.skipped_steps > 1)}, to find the loss scale"
        )
    if summary.outcome.stopped_by is not None:
        rows["stopped"] = summary.outcome.stopped_by
    if summary.outcome.early_stopping is not None and summary.outcome.early_stopping["best_epoch"] is not None:
        found = summary.outcome.early_stopping
        kept = "restored" if found["restored"] else "not restored"
        rows["best epoch"] = (
            f"{found['best_epoch']}, validation {found['monitor']} {figure(found['best_score'])}, {kept}"
        )
    if summary.outcome.train_loss is not None:
        rows["training loss"] = f"{figure(summary.outcome.train_loss)}, mean of the last epoch"
    if summary.scores.validation_accuracy is not None:
        rows["validation"] = f"accuracy {percent(summary.scores.validation_accuracy)}"
    if summary.scores.test_accuracy is not None:
        rows["test accuracy"] = percent(summary.scores.test_accuracy)
        rows["test loss"] = "-" if summary.scores.test_loss is None else figure(summary.scores.test_loss)
        rows["macro F1"] = "-" if summary.scores.test_f1 is None else f"{summary.scores.test_f1:.4f}"
    return rows


def profile_table(profile: dict[str, Any], longest: int, folder: Path | None) -> None:
    """Print the pieces of training that took longest, see `Profile`; in 80 characters."""
    count = profile["rounds"]
    head = f"profile of {count} round{'s' * (count != 1)}, from iteration {profile['first']} on"
    lines = [head, f"{'':<36}{'calls':>8}{'total ms':>12}{'mean ms':>12}{'share':>9}"]
    for piece in profile["pieces"][:longest]:
        kind = f" {piece['kind']}" if piece["kind"] in ("forward", "backward", "evaluation") else ""
        name = piece["name"] if kind.strip() in piece["name"].split() else f"{piece['name']}{kind}"
        name = name if len(name) < 36 else f"{name[:16]}...{name[-16:]}"
        figures = (
            f"{piece['calls']:>8,}{piece['total_ms']:>12,.1f}{piece['mean_ms']:>12.3f}{percent(piece['share'], 1):>9}"
        )
        lines.append(f"{name:<36}{figures}")
    if folder is not None:
        lines.append(f"all of it: profile.json and trace.json in {near(folder)}")
    console = _Terminal(soft_wrap=True, highlight=False)
    for line in lines:
        console.print(Text(line))
