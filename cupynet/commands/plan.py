"""Predict the throughput with more workers: `cupynet plan workers=[2,8,64,1024] link=10gbe [key=value ...]`.

Measures the training loop on this machine, with and without averaging, and applies the model in
cupynet/bench/cost_model.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cupynet import config
from cupynet.bench.cost_model import Costs, Link, forecast
from cupynet.config.schema import PlanSettings
from cupynet.core.errors import ConfigError
from cupynet.core.wording import percent

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment

log = logging.getLogger(__name__)
Rate: TypeAlias = Callable[[int, "int | str"], float]  # workers, frequency -> images per second
MAX_WORKERS = 16  # maximum number of workers to start, even with check=true


class Plan(NamedTuple):
    """A validated plan: the run to measure, and the number of GPUs or cores that its workers can use."""

    settings: PlanSettings
    experiment: Experiment
    cores: int


def main() -> None:
    config.run(plan, prepare, "plan", PlanSettings)


def prepare(settings: PlanSettings) -> Plan:
    from cupynet.backend import available_cores
    from cupynet.config.experiment import Experiment
    from cupynet.parallel import ParameterAveraging

    if settings.check and max(settings.asked) > MAX_WORKERS:
        reason = f"check=true starts all workers. Use at most {MAX_WORKERS}"
        raise ConfigError(reason, "workers", str(max(settings.asked)))
    if settings.parallel.launcher == "mpi":
        raise ConfigError("plan only supports threads. Remove this setting", "parallel.launcher", "mpi")
    experiment = Experiment(settings.run(None))
    if settings.parallel.pipeline is not None or not isinstance(experiment.synchronizer, ParameterAveraging):
        reason = "plan supports only parameter averaging. Remove parallel=..., or train to measure another method"
        raise ConfigError(reason, "parallel")
    cores = len(experiment.placement.devices) or available_cores()
    return Plan(settings, Experiment(settings.run(max(2, min(cores, MAX_WORKERS)))), cores)


def plan(prepared: Plan, folder: Path) -> None:
    from cupynet.backend.environment import commit, environment
    from cupynet.bench import measure
    from cupynet.config.announcement import announce
    from cupynet.core.files import write_json

    settings, experiment, _ = prepared
    announce(experiment)
    rate = loop_rate(experiment, settings.images)
    costs, link = measured(prepared, rate), Link.of(settings.link)
    cores, machines = (costs.cores, 1) if settings.check else (settings.cores_per_machine, settings.machines)
    cases = [(workers, every) for workers in settings.asked for every in settings.every[: None if workers > 1 else 1]]
    rows = [asdict(forecast(costs, link, *case, cores, machines)) for case in cases]
    if settings.check:
        rates = measure.medians({case: partial(rate, *case) for case in cases}, settings.repeats)
        for case, row in zip(cases, rows, strict=True):
            row |= {"measured": rates[case], "ratio": row["images_per_s"] / rates[case]}
    print("\n".join(table(costs, rows)))
    known = {"commit": commit(), "environment": environment(), "link": settings.link, "costs": asdict(costs)}
    write_json(folder / "plan.json", {**known, "forecasts": rows})
    print(f"written to {folder / 'plan.json'}")


def loop_rate(experiment: Experiment, images: int) -> Rate:
    from cupynet.bench import measure
    from cupynet.parallel.synchronizers.schedule import averaging_schedule

    data = experiment.load()

    def rate(workers: int, frequency: int | str) -> float:
        synchronizer = copy.deepcopy(experiment.synchronizer)
        synchronizer.schedule = averaging_schedule(frequency)
        options = replace(experiment.options, workers=workers, synchronizer=synchronizer)
        return measure.loop_images_per_s(experiment, options, data, images)

    return rate


def measured(prepared: Plan, rate: Rate) -> Costs:
    """Measure the costs on this machine, as medians of interleaved measurements."""
    from cupynet.bench import measure

    batch, workers = prepared.settings.batch_size, prepared.experiment.placement.workers
    cores = min(prepared.cores, workers)
    cases: tuple[tuple[int, int | str], ...] = ((1, "end"), (workers, "end"), (workers, 1))
    rates = measure.medians({case: partial(rate, *case) for case in cases}, prepared.settings.repeats)
    alone_s, busy_s, averaged_s = (of * batch / rates[of, frequency] for of, frequency in cases)
    if averaged_s <= busy_s:
        log.warning(
            "the time of an averaging step could not be measured. Repeat on an idle machine, or with more repeats"
        )
    return Costs(
        batch_size=batch,
        alone_s=alone_s,
        busy_s=busy_s * cores / workers,  # workers share the cores
        average_s=max(averaged_s - busy_s, 0.0) * cores / workers,
        size=averaged_bytes(prepared.experiment),
        cores=cores,
    )


def averaged_bytes(experiment: Experiment) -> int:
    """Return the number of bytes sent in an averaging step: the weights, and the optimizer state if it is averaged."""
    from cupynet.parallel import ElasticAveraging

    synchronizer: Any = experiment.synchronizer
    model, optimizer = experiment.model(), copy.deepcopy(experiment.optimizer)
    optimizer.init(model.params, model.backend)
    averages_states = experiment.settings.parallel.average_updaters and not isinstance(synchronizer, ElasticAveraging)
    weights, states = model.params.master, optimizer.state.values() if averages_states else ()
    sent = 2 * len(weights) if synchronizer.transfer_dtype == "half" else weights.nbytes
    return int(sent + sum(vector.nbytes for vector in states))


def table(costs: Costs, rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"an iteration takes {1e3 * costs.alone_s:.1f} ms with one worker and {1e3 * costs.busy_s:.1f} ms with "
        f"{costs.cores} workers; averaging {costs.size / 1e6:.1f} MB takes {1e3 * costs.average_s:.1f} ms",
        "",
        f"{'workers':>8}{'machines':>10}{'averaged every':>16}{'images/s':>14}{'efficiency':>12}{'averaging':>12}"
        + f"{'measured':>12}{'ratio':>8}" * ("ratio" in rows[0]),
    ]
    for row in rows:
        share = row["averaging_s"] / (row["computing_s"] + row["averaging_s"])
        lines.append(
            f"{row['workers']:>8,}{row['machines']:>10,}{row['frequency']:>16}{row['images_per_s']:>14,.0f}"
            f"{percent(row['efficiency'], 0):>12}{percent(share, 0):>12}"
            + (f"{row['measured']:>12,.0f}{row['ratio']:>8.2f}" if "ratio" in row else "")
        )
    return lines
