"""Run a learning-rate range test: `cupynet find_rate [key=value ...]`."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config
from cupynet.config.composing import RATE
from cupynet.config.schema import RateSettings
from cupynet.config.stored import job_overrides
from cupynet.core import signals
from cupynet.core.settings import flat
from cupynet.core.terminal import near

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment
    from cupynet.training import RateTest

log = logging.getLogger(__name__)

ROWS, BAR = 20, 50  # number of rows, and length of the longest bar
TALL = 1.25  # the longest bar represents this multiple of the first loss


def main() -> None:
    signals.command(_command)


def _command() -> None:
    from cupynet.commands.train import ranks

    config.run(find, prepare, "find_rate", RateSettings, ranks)


def prepare(settings: RateSettings) -> tuple[Experiment, RateTest]:
    from cupynet.config.experiment import Experiment
    from cupynet.training import RateTest

    test = RateTest(settings.lowest, settings.highest, settings.iterations)
    return Experiment(settings), test


def find(prepared: tuple[Experiment, RateTest], folder: Path) -> float | None:
    """Run the test on all ranks. On rank 0, write find_rate.csv to `folder`, and print and return the suggested rate.

    Returns None on other ranks, or if no rate is suggested.
    """
    from cupynet.config.announcement import announce
    from cupynet.core.files import write_whole
    from cupynet.core.table import as_csv, column

    experiment, test = prepared
    if experiment.rank == 0:
        announce(experiment)
        log.info("%d iterations with increasing learning rates", test.planned)
    loader = experiment.train_loader(experiment.load())
    options = replace(experiment.options, optimizer=test.optimizer(experiment.optimizer), log_every=1)
    with experiment.pools_limited():
        test.run(experiment.wrapper(callbacks=[test, *experiment.pools()], options=options), loader)
    if experiment.rank:
        return None
    figures = {"learning_rate": test.rates, "loss": test.losses, "smoothed_loss": test.smoothed}
    columns = [column("iteration", range(1, len(test.losses) + 1)), *(column(*each) for each in figures.items())]
    path = folder / "find_rate.csv"
    write_whole(path, as_csv(columns))
    if test.ended:
        log.info("%s, after %d of %d iterations", test.ended, len(test.losses), test.planned)
    print("", *bars(test), "", sep="\n")
    if test.suggestion is None:
        print("suggested     none, because the loss never decreased. Change lowest=..., highest=... or iterations=...")
    else:
        if min(test.smoothed) == test.smoothed[-1]:
            log.warning(
                "the loss was still decreasing at the highest rate, so the suggestion may be too low. Raise highest=..."
            )
        print(f"suggested     {test.suggestion:.2g}: a tenth of the rate at the lowest loss")
        print(f"set           {setting(experiment.settings.optimizer, test.suggestion, job_overrides())}")
    print(f"written       {near(path)}")
    return test.suggestion


def setting(optimizer: Mapping[str, Any], rate: float, overrides: Sequence[str] = ()) -> str:
    """Return the override that sets this (highest) learning rate, or describe a schedule without such an argument.

    A schedule that `overrides` chose is written as a whole, because the configuration files have another one.
    """
    from cupynet.config.overrides import name_of, parseable

    schedule = optimizer.get("learning_rate")
    key, changed = _with_rate(RATE, schedule, float(f"{rate:.2g}"))
    if changed is None:
        return f"a schedule whose highest rate is {rate:.2g}"
    whole = any(name_of(each) == RATE for each in overrides) or key not in flat({RATE: schedule})
    return shlex.quote(f"{RATE}={parseable(changed)}") if whole and key != RATE else f"{key}={rate:.2g}"


def _with_rate(key: str, node: Any, rate: float) -> tuple[str, Any]:
    """Return the key of the highest rate of a schedule, and the schedule with this rate, or None if no key sets it."""
    from cupynet import optim
    from cupynet.optim.schedules import NAMES

    if not isinstance(node, Mapping | str):
        return key, rate
    arguments = {"name": node} if isinstance(node, str) else dict(node)
    label = str(arguments.pop("name", None) or arguments.pop("_target_", ""))
    kind: Any = NAMES.get(label) or getattr(optim, label.rpartition(".")[2], None)
    highest = getattr(kind, "highest", None)
    if highest is None:
        return key, None
    key, below = _with_rate(f"{key}.{highest}", arguments.get(highest), rate)
    names = {each: {"name": name} for name, each in NAMES.items()}
    return key, None if below is None else {**names.get(kind, {"_target_": label}), **arguments, highest: below}


def bars(test: RateTest) -> list[str]:
    """Return a bar chart of at most 20 learning rates and their smoothed losses, as lines."""
    rows = list(zip(test.rates, test.smoothed, strict=True))
    full = TALL * test.losses[0] or 1.0
    lines = [f"{'rate':>8}{'loss':>10}"]
    for rate, loss in rows[:: -(-len(rows) // ROWS)]:
        lines.append(f"{rate:>8.1e}{loss:>10.4g}  {'#' * round(BAR * min(loss / full, 1.0))}")
    return lines
