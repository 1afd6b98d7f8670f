"""The table at the end of a training run."""

from __future__ import annotations

import contextlib

from rich.table import Table

from cupynet.core.table import Screen
from cupynet.core.terminal import near, printable
from cupynet.core.wording import amount, counted, percent
from cupynet.runs.run import Run, Summary
from cupynet.training.events import Spent


def result_table(summary: Summary, run: Run) -> None:
    table = Table.grid("", "", padding=(0, 2))
    table.columns[0].min_width = 13
    for name, value in rows(summary).items():
        table.add_row(name, printable(value))
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
        screen = Screen()
        screen.print(table)
        if run.report_path.exists():
            screen.print(f"report         {near(run.report_path)}", soft_wrap=True)
        screen.print(f"run folder     {near(run.folder)}", soft_wrap=True)


def rows(summary: Summary) -> dict[str, str]:
    setup, outcome, cost, scores = summary.setup, summary.outcome, summary.cost, summary.scores
    stages = f", with {setup.stages} stages each," if setup.stages > 1 else ""
    trained = counted(outcome.epochs, "epoch") if outcome.epochs else counted(outcome.iterations, "iteration")
    found = {
        "data": f"{setup.dataset} (fallback: not MNIST)" if setup.fallback else setup.dataset,
        "backend": f"{setup.backend}, {setup.dtype}",
        "workers": f"{setup.workers}{stages} on {', '.join(dict.fromkeys(setup.devices))}",
        "training": f"{trained} in {cost.train_s:.1f} s, {cost.images_per_s:,.0f} images/s",
    }
    if setup.workers > 1:
        apart = outcome.drift
        found["replicas"] = setup.synchronizer + ("" if apart is None else f", last drift {100 * apart:.2g} %")
    if cost.spent is not None and len(cost.spent["rounds_s"]) > 1:
        spent = Spent(**cost.spent)
        sent = f"sent {amount(cost.bytes_sent)}, {amount(cost.bytes_sent // max(outcome.iterations, 1))} per iteration"
        found["spent"] = f"averaging {percent(spent.averaging, 0)}, data {percent(spent.data, 0)}; {sent}"
    if outcome.advice is not None:
        found["advice"] = outcome.advice
    if outcome.stopped_by is not None:
        found["stopped"] = outcome.stopped_by
    best = outcome.early_stopping
    if best is not None and best["best_epoch"] is not None:
        monitor = best["monitor"].removeprefix("validation_").removeprefix("val_")
        found["best epoch"] = f"{best['best_epoch']}, validation {monitor} {best['best_score']:.4g}"
    if outcome.train_loss is not None:
        found["training loss"] = f"{outcome.train_loss:.4g}, mean of the last epoch"
    if scores.validation_accuracy is not None:
        found["validation"] = f"accuracy {percent(scores.validation_accuracy)}"
    if scores.test_accuracy is not None:
        found["test accuracy"] = percent(scores.test_accuracy)
        found["test loss"] = "-" if scores.test_loss is None else f"{scores.test_loss:.4g}"
        found["macro F1"] = "-" if scores.test_f1 is None else f"{scores.test_f1:.4f}"
        for name, value in ((scores.test or {}).get("metrics") or {}).items():
            found[name] = "-" if value is None else f"{value:.4f}"
    return found
