"""The table at the end of a training run."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from cupynet.core.checks import amount, counted, one_line, percent
from cupynet.core.terminal import is_terminal, near, printable, wrapped
from cupynet.runs.run import Run, Summary
from cupynet.training.events import Spent

log = logging.getLogger(__name__)

WIDTH = 65  # characters of a value, next to its name, on a terminal of 80
STYLES = {"test accuracy": "bold", "FAST DEV RUN": "bold red"}


def is_quiet(callbacks: Mapping[str, Any]) -> bool:
    """Return True if the settings of `callbacks` have a progress of the style `none`."""
    part = callbacks.get("progress")
    return isinstance(part, Mapping) and part.get("style") == "none"


def result_table(summary: Summary, run: Run) -> None:
    """Print the results of a run. If stdout fails, log a warning."""
    table = io.StringIO()
    console = Console(file=table, force_terminal=is_terminal(), soft_wrap=True, highlight=False)
    for name, value in rows(summary).items():
        for number, line in enumerate(wrapped(printable(value), WIDTH)):
            console.print(Text.assemble(f"{'' if number else name:<15}", (line, STYLES.get(name, ""))))
    if run.report_path.exists():
        console.print(Text(f"{'report':<15}{printable(near(run.report_path))}"))
    console.print(Text(f"{'run folder':<15}{printable(near(run.folder))}"))
    try:
        print(table.getvalue(), end="", flush=True)
    except (OSError, ValueError) as error:
        log.warning("the results cannot be shown (%s): they are in %s", one_line(error), run.summary_path)


def rows(summary: Summary) -> dict[str, str]:
    """Return the rows of the table: name -> text."""
    setup, outcome, cost, scores = summary.setup, summary.outcome, summary.cost, summary.scores
    stages = f" of {setup.stages} stages" if setup.stages > 1 else ""
    trained = counted(outcome.iterations, "iteration")
    if outcome.epochs:
        trained = f"{outcome.epochs} epoch{'s' * (outcome.epochs > 1)}"
    found = {}
    if setup.fast_dev_run:
        found["FAST DEV RUN"] = "a test that everything works: its figures are not results"
    found |= {
        "data": f"{setup.dataset} (fallback: not MNIST)" if setup.fallback else setup.dataset,
        "backend": f"{setup.backend}, {setup.dtype}",
        "workers": f"{setup.workers}{stages} on {', '.join(dict.fromkeys(setup.devices))}",
        "replicas": "-" if setup.workers == 1 else setup.synchronizer + _divergence(summary),
        "training": f"{trained} in {cost.train_s:.1f} s, {cost.images_per_s:,.0f} images/s",
    }
    if cost.spent is not None and len(cost.spent["rounds_s"]) > 1:
        found["spent"] = _spent(Spent(**cost.spent), summary)
    if cost.memory:
        found["GPU memory"] = _pools(cost.memory)
    if cost.pipeline is not None:
        found["pipeline"] = f"{cost.pipeline['speed_up']:.2f} times one worker, bound {cost.pipeline['bound']:.2f}"
    if outcome.advice is not None:
        found["advice"] = outcome.advice
    if outcome.left_out:
        found["left out"] = f"{counted(outcome.left_out, 'batch')}, not finite"
    if outcome.skipped_steps:
        found["skipped"] = f"{counted(outcome.skipped_steps, 'step')}, to find the loss scale"
    if outcome.stopped_by is not None:
        found["stopped"] = outcome.stopped_by
    best = outcome.early_stopping
    if best is not None and best["best_epoch"] is not None:
        kept = "restored" if best["restored"] else "not restored"
        found["best epoch"] = f"{best['best_epoch']}, validation {best['monitor']} {best['best_score']:.4g}, {kept}"
    if outcome.train_loss is not None:
        found["training loss"] = f"{outcome.train_loss:.4g}, mean of the last epoch"
    if scores.validation_accuracy is not None:
        found["validation"] = f"accuracy {percent(scores.validation_accuracy)}"
    if scores.test_accuracy is not None:
        found["test accuracy"] = percent(scores.test_accuracy)
        found["test loss"] = "-" if scores.test_loss is None else f"{scores.test_loss:.4g}"
        found["macro F1"] = "-" if scores.test_f1 is None else f"{scores.test_f1:.4f}"
    return found


def _divergence(summary: Summary) -> str:
    """Return the last measured divergence of the replicas, and the layer in which it was largest."""
    if summary.outcome.divergence is None:
        return ""
    layers = summary.outcome.divergence_by_layer or {}
    most = f", most in {max(layers, key=lambda name: layers[name])}" if layers else ""
    bound = "at most " if summary.setup.stages > 1 else ""
    return f", last {bound}{100 * summary.outcome.divergence:.2g} % apart{most}"


def _spent(spent: Spent, summary: Summary) -> str:
    """Return the shares of the workers' time, and the bytes that they sent."""

    def between(name: str) -> str:
        shares = [round(100 * share) for share in spent.share(name)]
        return f"{min(shares)}-{max(shares)} %" if min(shares) < max(shares) else f"{shares[0]} %"

    waiting = f"waiting {between('waiting_s')}, " if summary.setup.stages > 1 else ""
    round_bytes = summary.cost.bytes_sent // max(summary.outcome.iterations, 1)
    sent = f"sent {amount(summary.cost.bytes_sent)}, {amount(round_bytes)} a round"
    return f"{waiting}averaging {between('averaging_s')}, data {between('data_s')}; {sent}"


def _pools(memory: list[dict[str, Any]]) -> str:
    """Return the bytes that the fullest memory pool held and used."""
    most = max(memory, key=lambda pool: pool["held_bytes"])
    used, held, limit = (most[f"{name}_bytes"] for name in ("used", "held", "limit"))
    return f"{most['device']} held {amount(held)}, used {amount(used)}{'' if limit is None else f' of {amount(limit)}'}"
