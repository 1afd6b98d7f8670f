"""Run a learning-rate range test: `cupynet find_rate [key=value ...]`.

Prints the loss over the learning rate and the setting to use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
    """Run the test and write find_rate.csv and find_rate.png into `folder`. Return the suggested rate."""
    found = tested(experiment)
    if experiment.rank:
        return None
    write(found, folder)
    if found.ended:
        log.info("%s, after %d of %d iterations", found.ended, len(found.rates), found.asked)
    print()
    print("\n".join([*bars(found), "", *_lines(found, experiment, folder)]))
    return found.suggestion


def tested(experiment: Experiment) -> RateTest:
    """Run the test, on every rank of mpiexec."""
    from cupynet.training.callbacks.rate_test import Growing, tested

    settings = experiment.settings
    assert isinstance(settings, RateSettings)
    if experiment.rank == 0:
        experiment.announce()
        log.info("%d iterations, learning rates of %g to %g", settings.iterations, settings.lowest, settings.highest)
    data = experiment.load()

    def make(optimizer: Optimizer, watch: Callback) -> ParallelWrapper:
        wrapper = experiment.wrapper(callbacks=[watch, *experiment.pools()], optimizer=optimizer, report_every=1)
        experiment.limit_memory()
        wrapper.warm_up(settings.batch_size)
        return wrapper

    rates = Growing(settings.lowest, settings.highest, settings.iterations)
    return tested(experiment.train_loader(data), experiment.optimizer, rates, make)


# results --------------------------------------------------------------------------------------------------------------


def _lines(found: RateTest, experiment: Experiment, folder: Path) -> Sequence[str]:
    """Return lines about the result and its files."""
    files = " and ".join(path.name for path in sorted(folder.glob("find_rate.*")))
    where = f"written       {files} in {near(folder)}"
    rate, least = found.suggestion, found.least
    if rate is None or least is None:
        reason = "the loss never fell: another range, lowest=... highest=..., or more iterations=... may show where"
        return [f"suggested     nothing: {reason}", where]
    lines = [f"suggested     {short(rate)}: a tenth of {short(found.rates[least])}, where the loss is least"]
    if found.steepest is not None:
        lines.append(f"              the loss falls fastest at {short(found.steepest)}")
    if least >= len(found.rates) - 2 and not found.ended:
        lines.append("              it still falls at the highest rate: try highest=... above that")
    return [*lines, f"write         {setting(experiment.settings.optimizer, rate)}", where]


def short(rate: float) -> str:
    """Format a learning rate with two digits."""
    return f"{rate:.2g}"


def setting(optimizer: Mapping[str, Any], rate: float) -> str:
    """Return the setting that gives a run this learning rate: of a schedule, its highest."""
    return _setting("optimizer.learning_rate", optimizer.get("learning_rate"), rate)


def _setting(key: str, node: Any, rate: float) -> str:
    from cupynet import optim

    if not isinstance(node, Mapping):
        return f"{key}={short(rate)}"
    name = str(node.get("_target_", "")).rpartition(".")[2]
    kind = getattr(optim, name, None)
    highest = kind.highest if isinstance(kind, type) and issubclass(kind, optim.Schedule) else None
    if highest is None:
        return f"a {name} whose highest rate is {short(rate)}"
    if kind is optim.Scaled:
        rate /= float(node.get("factor", 1.0))
    return _setting(f"{key}.{highest}", node.get(highest), rate)


def write(found: RateTest, folder: Path) -> None:
    """Write find_rate.csv, and find_rate.png if matplotlib is installed. OutputError."""
    from cupynet.config.sweep_table import Column, as_csv
    from cupynet.core.files import write_whole
    from cupynet.reporting import charts

    rows = {
        "iteration": range(1, len(found.rates) + 1),
        "learning_rate": found.rates,
        "loss": found.losses,
        "smoothed_loss": found.smoothed,
    }
    table = [Column(name, name, (), values) for name, values in rows.items()]
    write_whole(folder / "find_rate.csv", as_csv(table).encode())
    if charts.available():
        write_whole(folder / "find_rate.png", charts.png([chart(found)]))
    else:
        log.info("find_rate.png is left out: %s", charts.MISSING)


def chart(found: RateTest) -> Any:
    """Return the chart of the losses over the rates."""
    from cupynet.reporting.charts import BACKGROUND, Chart, Line

    top = _top(found)
    raw, smoothed = ([loss if loss <= top else None for loss in losses] for losses in (found.losses, found.smoothed))
    lines = [
        Line("loss", found.rates, raw, BACKGROUND, width=1.0, behind=True),
        Line("smoothed", found.rates, smoothed),
    ]
    if found.suggestion is not None:
        name, bottom = f"suggested: {short(found.suggestion)}", min(found.smoothed)
        lines.append(Line(name, [found.suggestion] * 2, [bottom, top], 1, dashed=True))
    return Chart("Learning-rate range test", "learning rate", "training loss", lines, log_x=True)


def _top(found: RateTest) -> float:
    return max(TALL * found.losses[0], 1.05 * min(found.smoothed))


def bars(found: RateTest) -> list[str]:
    """Return the smoothed loss at about 20 of the learning rates, with a bar as long as the loss is high."""
    top = _top(found)
    shown = [(rate, loss) for rate, loss in zip(found.rates, found.smoothed, strict=True) if loss <= top]
    highest = max(loss for _, loss in shown) or 1.0
    rows = [
        f"{rate:>8.1e}{loss:>10.4g}  {'#' * round(BAR * loss / highest)}"
        for rate, loss in shown[:: -(-len(shown) // ROWS)]
    ]
    return [f"{'rate':>8}{'loss':>10}", *rows]
