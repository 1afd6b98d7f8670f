"""Run a learning-rate range test: `cupynet find_rate [key=value ...]`.

Prints the loss over the learning rate and the setting to use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config
from cupynet.config.schema import RateSettings
from cupynet.core import signals
from cupynet.core.errors import ConfigError
from cupynet.core.terminal import near

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment
    from cupynet.optim import Optimizer
    from cupynet.training import Callback, ParallelWrapper, RateTest

log = logging.getLogger(__name__)

ROWS, BAR = 20, 50  # rows on a terminal, and characters of the longest bar
TALL = 1.25  # losses above this many times the first are not shown: training has exploded


def main() -> None:
    """Run the command."""
    signals.command(_command)


def _command() -> None:
    from cupynet.commands.train import ranks

    config.run(find, prepare, "find_rate", RateSettings, ranks)


def prepare(settings: RateSettings) -> Experiment:
    """Return the experiment to test. ConfigError."""
    from cupynet.config.experiment import Experiment

    if settings.highest <= settings.lowest:
        raise ConfigError(f"highest={settings.highest:g}: must be above lowest={settings.lowest:g}")
    experiment = Experiment(settings)
    experiment.check_memory()
    experiment.check_shards()
    return experiment


def find(experiment: Experiment, folder: Path) -> float | None:
    """Run the test on every rank of mpiexec, write find_rate.csv into `folder`, and print the result.

    Returns the suggested rate.
    """
    from cupynet.training.callbacks.rate_test import range_test

    settings = experiment.settings
    assert isinstance(settings, RateSettings)
    if experiment.rank == 0:
        experiment.announce()
        log.info("%d iterations, learning rates of %g to %g", settings.iterations, settings.lowest, settings.highest)
    loader = experiment.train_loader(experiment.load())

    def make(optimizer: Optimizer, callback: Callback) -> ParallelWrapper:
        wrapper = experiment.wrapper(callbacks=[callback, *experiment.pools()], optimizer=optimizer, report_every=1)
        experiment.limit_memory()
        return wrapper

    found = range_test(loader, experiment.optimizer, settings.lowest, settings.highest, settings.iterations, make)
    if experiment.rank:
        return None
    path = folder / "find_rate.csv"
    write(found, path)
    if found.ended:
        log.info("%s, after %d of %d iterations", found.ended, len(found.rates), found.planned)
    print("", *bars(found), "", *_result(found, settings.optimizer), f"written       {near(path)}", sep="\n")
    return found.suggestion


def _result(found: RateTest, optimizer: Mapping[str, Any]) -> list[str]:
    """Return the suggested rate, and the setting for it, as lines."""
    rate, least = found.suggestion, found.least
    if rate is None or least is None:
        return ["suggested     nothing, because the loss never fell: change lowest=..., highest=... or iterations=..."]
    lines = [f"suggested     {rate:.2g}: a tenth of {found.rates[least]:.2g}, where the loss is least"]
    if least >= len(found.rates) - 2 and not found.ended:
        lines.append("              it still falls at the highest rate: try highest=... above that")
    return [*lines, f"write         {setting(optimizer, rate)}"]


def setting(optimizer: Mapping[str, Any], rate: float) -> str:
    """Return the setting for this learning rate; for a schedule, the one for its highest rate."""
    from cupynet import optim

    key, node = "optimizer.learning_rate", optimizer.get("learning_rate")
    while isinstance(node, Mapping):
        name = str(node.get("_target_", "")).rpartition(".")[2]
        highest = getattr(getattr(optim, name, None), "highest", None)
        if highest is None:
            return f"a {name} whose highest rate is {rate:.2g}"
        key, node = f"{key}.{highest}", node.get(highest)
    return f"{key}={rate:.2g}"


def write(found: RateTest, path: Path) -> None:
    """Write the rates and losses as CSV. OutputError."""
    from cupynet.core.files import write_whole

    rows = enumerate(zip(found.rates, found.losses, found.smoothed, strict=True), 1)
    lines = [f"{number},{rate!r},{loss!r},{smoothed!r}\n" for number, (rate, loss, smoothed) in rows]
    write_whole(path, "".join(["iteration,learning_rate,loss,smoothed_loss\n", *lines]).encode())


def bars(found: RateTest) -> list[str]:
    """Return the smoothed loss at about 20 of the learning rates, with a bar as long as the loss is high."""
    top = max(TALL * found.losses[0], 1.05 * min(found.smoothed))
    shown = [(rate, loss) for rate, loss in zip(found.rates, found.smoothed, strict=True) if loss <= top]
    highest = max(loss for _, loss in shown) or 1.0
    rows = [
        f"{rate:>8.1e}{loss:>10.4g}  {'#' * round(BAR * loss / highest)}"
        for rate, loss in shown[:: -(-len(shown) // ROWS)]
    ]
    return [f"{'rate':>8}{'loss':>10}", *rows]
