"""Plan: `cupynet plan workers=[2,8,64,1024] link=10gbe [key=value ...]`.

Forecasts the speed of training with more workers than this machine has cores: measures the training loop here, with and
without averaging, and applies cupynet/bench/cost_model.py. `check=true` trains with each number of workers instead, as
threads and under mpiexec, and prints the ratio of predicted to measured speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cupynet import config
from cupynet.bench.cost_model import Cluster, Costs, Forecast, Link, forecast, recommended
from cupynet.config.schema import PlanSettings
from cupynet.core.checks import percent
from cupynet.core.errors import ConfigError

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment

log = logging.getLogger(__name__)
Rate: TypeAlias = Callable[[int, "int | str"], float]  # workers, frequency -> images per second
NEAR = 0.25  # relative error of a good forecast
MOST_CHECKED = 32  # most workers that check=true starts
MOST_MEASURED = 16  # most workers started to measure how they slow each other down


def main() -> None:
    """Run the command."""
    config.run(plan, prepare, "plan", PlanSettings)


@dataclass(frozen=True)
class Plan:
    """A validated plan and the run it measures."""

    settings: PlanSettings
    experiment: Experiment


def prepare(settings: PlanSettings) -> Plan:
    """Refuse what cannot work before anything is measured. ConfigError."""
    from cupynet.config.experiment import Experiment
    from cupynet.parallel import ParameterAveraging

    largest = max(settings.asked)
    if settings.check and largest > MOST_CHECKED:
        raise ConfigError(f"workers={largest}: check=true starts them all. Use at most {MOST_CHECKED}.")
    if settings.parallel.launcher == "mpi":
        raise ConfigError("launcher=mpi: plan measures threads of one process, and check=true starts ranks. Omit it.")
    experiment = Experiment(settings.run(None))
    if settings.parallel.pipeline is not None or not isinstance(experiment.synchronizer, ParameterAveraging):
        raise ConfigError("parallel: only averaging is forecast. Leave parallel= out, and train to see other speeds.")
    experiment.check_memory()
    return Plan(settings, Experiment(settings.run(max(2, min(cores_of(experiment), MOST_MEASURED)))))


def cores_of(experiment: Experiment) -> int:
    """Return how many workers this machine runs at once."""
    from cupynet.backend import available_cores

    return len(experiment.placement.devices) or available_cores()


def plan(prepared: Plan, folder: Path) -> None:
    """Measure, then forecast or check. Print a table and a sentence; write plan.json into `folder`."""
    from cupynet.backend.environment import commit, environment
    from cupynet.core.files import write_json

    prepared.experiment.announce()
    result: dict[str, Any] = {"commit": commit(), "environment": environment(), "link": prepared.settings.link}
    if prepared.settings.check:
        rows = check(prepared, folder)
        lines, sentence = check_table(rows), verdict(rows)
        result["checked"] = [asdict(row) | {"ratio": row.ratio} for row in rows]
    else:
        costs = measured(prepared, loop_rate(prepared))
        settings = prepared.settings
        here = Cluster(Link.of(settings.link), settings.cores_per_machine or costs.cores, settings.machines)
        found = {
            workers: [forecast(costs, here, workers, frequency) for frequency in settings.every]
            for workers in settings.asked
        }
        lines, sentence = [*foundation(costs, here), "", *table(found)], advice(found, here)
        result |= {"costs": asdict(costs), "cluster": asdict(here)}
        result["forecasts"] = [asdict(each) for rows_of in found.values() for each in rows_of]
    print("\n".join(lines), sentence, sep="\n\n")
    write_json(folder / "plan.json", result | {"sentence": sentence})
    print(f"written to {folder / 'plan.json'}")


# measuring ------------------------------------------------------------------------------------------------------------


def loop_rate(prepared: Plan) -> Rate:
    """Return a function that measures the training loop in this process."""
    from cupynet.bench import measure
    from cupynet.parallel import ParameterAveraging

    data = prepared.experiment.load()

    def rate(workers: int, frequency: int | str) -> float:
        averaging = ParameterAveraging(frequency)
        return measure.loop_images_per_s(
            prepared.experiment, data, workers, prepared.settings.images, synchronizer=averaging
        )

    return rate


def run_rate(prepared: Plan, folder: Path, *, ranks: bool) -> Rate:
    """Return a function that measures whole runs of `cupynet train`."""
    from cupynet.bench import measure

    epochs = -(-prepared.settings.images // len(prepared.experiment.load().train))
    chosen = ("workers", "epochs", "parallel", "parallel.averaging_frequency")
    command = measure.overrides(folder, PlanSettings, *chosen)
    command += [f"epochs={epochs}", f"evaluate_every_epochs={epochs}"]

    def rate(workers: int, frequency: int | str) -> float:
        run = [*command, f"workers={workers}", f"parallel.averaging_frequency={frequency}"]
        return measure.run_images_per_s(run, ranks=workers if ranks else 0)

    return rate


def measured(prepared: Plan, rate: Rate) -> Costs:
    """Return the costs on this machine, from the medians of rates that are measured in turn."""
    from cupynet.bench import measure

    batch, workers = prepared.settings.batch_size, prepared.experiment.settings.workers or 1
    cores = min(cores_of(prepared.experiment), workers)
    cases: tuple[tuple[int, int | str], ...] = ((1, "end"), (workers, "end"), (workers, 1))
    rates = measure.medians({case: partial(rate, *case) for case in cases}, prepared.settings.repeats)
    alone_s, busy_s, averaged_s = (of * batch / rates[of, frequency] for of, frequency in cases)
    if averaged_s <= busy_s:
        log.warning("no time of an average could be measured: repeat on an idle machine, or with more repeats")
    turns = workers / cores
    return Costs(
        batch_size=batch,
        alone_s=alone_s,
        busy_s=busy_s / turns,
        average_s=max(averaged_s - busy_s, 0.0) / turns,
        size=measure.averaged_bytes(prepared.experiment),
        cores=cores,
    )


# against real runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """A forecast and the measured run; rates in images per second.

    Attributes:
        kind: of the workers, `threads` or `ranks`.
    """

    kind: str
    workers: int
    frequency: int
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def check(prepared: Plan, folder: Path) -> list[Checked]:
    """Compare forecasts for this machine with runs of `cupynet train`."""
    from cupynet.bench import measure

    sources = {"threads": (loop_rate(prepared), run_rate(prepared, folder, ranks=False))}
    if reason := measure.without_ranks():
        print(f"not checked under mpiexec: {reason}")
    else:
        ranks = run_rate(prepared, folder, ranks=True)
        sources["ranks"] = ranks, ranks
    cases = [(workers, every) for workers in prepared.settings.asked for every in prepared.settings.every]
    rows = []
    for kind, (measure_part, run) in sources.items():
        costs = measured(prepared, measure_part)
        here = Cluster(Link.of(prepared.settings.link), costs.cores, machines=1)
        rates = measure.medians({case: partial(run, *case) for case in cases}, prepared.settings.repeats)
        for workers, every in cases:
            predicted = forecast(costs, here, workers, every).images_per_s
            rows.append(Checked(kind, workers, every, predicted, rates[workers, every]))
    return rows


def check_table(rows: Sequence[Checked]) -> list[str]:
    """Return a line for each forecast."""
    lines = [f"{'workers':<16}{'averaged every':>16}{'predicted':>12}{'measured':>12}{'ratio':>8}"]
    for row in rows:
        name = f"{row.workers} {row.kind}"
        lines.append(f"{name:<16}{row.frequency:>16}{row.predicted:>12,.0f}{row.measured:>12,.0f}{row.ratio:>8.2f}")
    return lines


def verdict(rows: Sequence[Checked]) -> str:
    """Return a sentence with the share of accurate forecasts."""
    near = sum(abs(row.ratio - 1) <= NEAR for row in rows)
    return f"{near} of {len(rows)} forecasts are within {percent(NEAR, 0)} of the measured speed."


# the result -----------------------------------------------------------------------------------------------------------


def foundation(costs: Costs, here: Cluster) -> list[str]:
    """Return lines with the measurements and the machines of the forecast."""
    link = here.link
    machines = "as many machines as they fill" if here.machines is None else f"machines: {here.machines}"
    return [
        f"measured    an iteration of one worker alone {1e3 * costs.alone_s:.1f} ms, of {costs.cores} at once "
        f"{1e3 * costs.busy_s:.1f} ms; an average of {costs.size / 1e6:.1f} MB {1e3 * costs.average_s:.1f} ms",
        f"forecast    {here.cores} workers to a machine, {machines}; "
        f"link {link.name}: {link.bandwidth / 1e6:,.1f} MB/s, {1e6 * link.latency_s:,.0f} us",
    ]


def table(found: dict[int, list[Forecast]]) -> list[str]:
    """Return a line for each forecast."""
    lines = [f"{'workers':>8}{'machines':>10}{'averaged every':>16}{'images/s':>14}{'efficiency':>12}{'averaging':>12}"]
    for rows in found.values():
        for each in rows:
            share = each.averaging_s / (each.computing_s + each.averaging_s)
            lines.append(
                f"{each.workers:>8,}{each.machines:>10,}{each.frequency:>16}{each.images_per_s:>14,.0f}"
                f"{percent(each.efficiency, 0):>12}{percent(share, 0):>12}"
            )
    return lines


def advice(found: dict[int, list[Forecast]], here: Cluster) -> str:
    """Recommend a frequency for each number of workers, in one sentence."""
    best = [recommended(rows) for rows in found.values()]
    each = [f"every {row.frequency} with {row.workers:,} ({percent(row.efficiency, 0)} of each)" for row in best]
    crowded = [row.workers for row in best if row.turns > 1]
    more = f"; from {min(crowded):,} workers on they share cores and gain nothing" if crowded else ""
    return f"Recommended over {here.link.name}: average {', '.join(each)}{more}."
