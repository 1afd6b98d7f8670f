"""Which learning rate to train with: `cupynet find_rate [key=value ...]`.

A learning-rate range test of the configured training. The result is a picture and the setting to write.
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
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

WIDTH, HEIGHT = 80, 14  # of the picture on a terminal, in characters
TALL = 1.25  # the picture ends at so many times the first loss: above that it has exploded


def main() -> None:
    """The command."""
    signals.command(_command)


def _command() -> None:
    from cupynet.commands.train import ranks

    config.run(find, prepare, "find_rate", RateSettings, ranks)


def prepare(settings: RateSettings) -> Experiment:
    """The experiment whose learning rate is looked for; ConfigError."""
    from cupynet.config.experiment import Experiment

    if settings.highest <= settings.lowest:
        raise ConfigError(f"highest={settings.highest:g}: must be above lowest={settings.lowest:g}")
    experiment = Experiment(settings)
    experiment.check_memory()
    experiment.check_shards()
    return experiment


def find(experiment: Experiment, folder: Path) -> float | None:
    """Test, tell, and write find_rate.csv and find_rate.png into `folder`; the rate that is suggested."""
    found = tested(experiment)
    if experiment.rank:
        return None
    write(found, folder)
    if found.ended:
        log.info("%s, after %d of %d iterations", found.ended, len(found.rates), found.asked)
    print()
    for line in [*picture(found, _columns(), plain=_plain()), "", *_lines(found, experiment, folder)]:
        print(line)
    return found.suggestion


def tested(experiment: Experiment) -> RateTest:
    """The range test of a run with these settings; on every rank, where mpiexec started several."""
    from cupynet.training.callbacks.rate_test import Growing, tested

    settings = experiment.settings
    assert isinstance(settings, RateSettings)
    if experiment.rank == 0:
        experiment.announce()
        log.info(
            "%d iterations, learning rates of %g to %g", settings.iterations, settings.lowest, settings.highest
        )  # fmt: skip
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
    """A learning rate in two digits."""
    return f"{rate:.2g}"


def setting(optimizer: Mapping[str, Any], rate: float) -> str:
    """How a run is given this learning rate: of a schedule the argument that is its highest."""
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
    """find_rate.csv, and find_rate.png where matplotlib is installed. OutputError."""
    from cupynet.config.sweep_table import Column, as_csv
    from cupynet.core.files import write_whole
    from cupynet.reporting import charts

    iterations = range(1, len(found.rates) + 1)
    rows = {
        "iteration": iterations,
        "learning_rate": found.rates,
        "loss": found.losses,
        "smoothed_loss": found.smoothed,
    }
    table = [Column(name, name, (), values) for name, values in rows.items()]
    write_whole(folder / "find_rate.csv", as_csv(table).encode())
    if not charts.available():
        log.info("find_rate.png is left out: %s", charts.MISSING)
        return
    try:
        write_whole(folder / "find_rate.png", charts.png([chart(found)]))
    except Exception as error:  # of what only shows something
        log.warning("find_rate.png cannot be drawn (%s: %s)", type(error).__name__, error)


def chart(found: RateTest) -> Any:
    """The losses over the rates."""
    from cupynet.reporting.charts import BACKGROUND, Chart, Line

    top = _top(found)
    raw = [loss if loss <= top else None for loss in found.losses]
    lines = [
        Line("loss", found.rates, raw, BACKGROUND, width=1.0, behind=True),
        Line("smoothed", found.rates, _below(found, top)),
    ]
    if found.suggestion is not None:
        bottom = min(found.smoothed)
        lines.append(
            Line(f"suggested: {short(found.suggestion)}", [found.suggestion] * 2, [bottom, top], 1, dashed=True)
        )
    return Chart("Learning-rate range test", "learning rate", "training loss", lines, log_x=True)


def _top(found: RateTest) -> float:
    """Where a picture of the losses ends."""
    return max(TALL * found.losses[0], 1.05 * min(found.smoothed))


def _below(found: RateTest, top: float) -> list[float | None]:
    return [loss if loss <= top else None for loss in found.smoothed]


def picture(found: RateTest, width: int = WIDTH, *, plain: bool = False) -> list[str]:
    """The smoothed loss over the learning rate, by orders of magnitude, in characters; | is the suggestion.

    plain: in ASCII.
    """
    import numpy as np

    margin, mark = 9, "*" if plain else "•"
    columns = max(min(width, WIDTH) - margin - 1, 20)
    low, high = math.log10(found.rates[0]), math.log10(found.rates[-1])
    scale = (columns - 1) / max(high - low, 1e-9)

    def column(rate: float) -> int:
        return min(max(round((math.log10(rate) - low) * scale), 0), columns - 1)

    shown = [
        (rate, loss) for rate, loss in zip(found.rates, _below(found, _top(found)), strict=True) if loss is not None
    ]
    powers, losses = [math.log10(rate) for rate, _ in shown], [loss for _, loss in shown]
    bottom, top = min(losses), max(losses)
    rows = [[" "] * columns for _ in range(HEIGHT)]
    if found.suggestion is not None:
        for row in rows:
            row[column(found.suggestion)] = "|"
    places = range(column(shown[-1][0]) + 1)
    for place, loss in zip(places, np.interp([low + place / scale for place in places], powers, losses), strict=True):
        share = (loss - bottom) / max(top - bottom, 1e-12)
        rows[round((1 - share) * (HEIGHT - 1))][place] = mark
    labels = {0: top, HEIGHT // 2: (top + bottom) / 2, HEIGHT - 1: bottom}
    lines = [
        f"{format(labels[place], '.3g') if place in labels else '':>{margin - 2}} |{''.join(row).rstrip()}"
        for place, row in enumerate(rows)
    ]
    axis, ticks = ["-"] * columns, [" "] * (columns + 8)
    for power in range(math.ceil(low), math.floor(high) + 1):
        place = column(10.0**power)
        axis[place] = "+"
        label = f"1e{power}" if not -2 <= power <= 2 else f"{10.0**power:g}"
        ticks[place : place + len(label)] = label
    head = f"{'loss':>{margin - 2}}"
    below = f"{'rate':>{margin - 2}}  {''.join(ticks).rstrip()}"
    return [head, *lines, f"{' ' * (margin - 2)} +{''.join(axis)}", below[:width]]


def _columns() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def _plain() -> bool:
    """Whether stdout has ASCII alone."""
    return "utf" not in (getattr(sys.stdout, "encoding", None) or "").lower()
