"""Plan: `python -m cupynet.plan workers=[2,8,64,1024] link=10gbe [key=value ...]`.

How fast a training run would be with more workers than are here. The step, the loop around it, what it costs to keep
replicas together and the spread of all that are measured on this machine; cupynet/parallel/forecast.py does the rest.
`check=true` trains for real with each number of workers instead, as threads and under mpiexec, and prints what was
predicted over what was measured: that is how far a forecast can be trusted. (Over 300 lines: a plan is made from its
measurements to its sentence in one place.)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config
from cupynet.checks import STAGED_MODES, percent
from cupynet.errors import ConfigError
from cupynet.settings import PlanSettings
from cupynet.train import ranks

if TYPE_CHECKING:
    from rich.console import Console

    from cupynet.experiment import Experiment
    from cupynet.parallel.forecast import Cluster, Costs, Forecast

WIDTH = 100  # columns of the table
BAR = 24  # of them for the bar
MARKS = (("█", "#", "green"), ("▒", "=", "yellow"), ("░", ".", "red"))  # computing, waiting, communication
NEAR = 0.25  # a forecast that is off by no more than this is taken for good
MOST_CHECKED = 32  # workers that are started for real


def main() -> None:
    """The command."""
    config.run(plan, prepare, "plan", PlanSettings, ranks)


@dataclass(frozen=True)
class Plan:
    """What is asked, and the run that is measured for it."""

    settings: PlanSettings
    experiment: Experiment


def prepare(settings: PlanSettings) -> Plan:
    """Refuse what cannot work, before anything is measured; ConfigError."""
    from cupynet.backend import available_cores
    from cupynet.experiment import Experiment
    from cupynet.measure import MOST_AT_WORK

    largest = max(settings.asked)
    if settings.check and largest > MOST_CHECKED:
        raise ConfigError(f"workers={largest}: check=true starts them all: ask for at most {MOST_CHECKED}")
    if settings.micro_batches > settings.batch_size:
        raise ConfigError(f"micro_batches={settings.micro_batches}: a batch has {settings.batch_size} images")
    staged = [mode for mode in settings.compared if mode in STAGED_MODES]
    if settings.accumulate > 1 and staged:
        raise ConfigError(
            f"accumulate={settings.accumulate}: modes=[{','.join(staged)}] cut batches by micro_batches: leave it at "
            "1, or these modes out"
        )
    experiment = Experiment(settings.run(None))
    experiment.check_memory()
    refuse_what_fits_no_mode(settings, experiment.steps())
    if settings.parallel.launcher == "mpi":
        if settings.check or experiment.placement.workers < 2:
            way_out = "check=true starts ranks itself, leave it out" if settings.check else "mpiexec -n 2 or more"
            raise ConfigError(f"launcher=mpi: measures between the ranks that there are: {way_out}")
        return Plan(settings, experiment)
    at_hand = len(experiment.placement.devices) or available_cores()
    return Plan(settings, Experiment(settings.run(max(2, min(at_hand, MOST_AT_WORK)))))


def refuse_what_fits_no_mode(settings: PlanSettings, steps: int) -> None:
    """A number of workers of which there would be nothing to tell: ConfigError. steps: of the network."""
    from cupynet.parallel.forecast import fits, what_fits

    for workers in settings.asked:
        if not any(fits(mode, workers, settings.stages, steps) for mode in settings.compared):
            modes = ",".join(settings.compared)
            ways_out = "; ".join(what_fits(mode, settings.stages, steps) for mode in settings.compared)
            raise ConfigError(f"workers={workers}: cannot work in modes=[{modes}]: {ways_out}")


def plan(asked: Plan, folder: Path) -> None:
    """Measure, forecast or check, and tell: as a table, in one sentence, and as plan.json in `folder`."""
    from cupynet.backend.environment import commit, environment
    from cupynet.files import write_json
    from cupynet.parallel.forecast import recommended

    if asked.experiment.rank:
        measured(asked)
        return
    asked.experiment.announce()
    out = console()
    result: dict[str, Any] = {"commit": commit(), "environment": environment(), "link": asked.settings.link}
    if asked.settings.check:
        checked, costs_of = check(asked, folder)
        out.print(check_table(checked))
        sentence = verdict(checked)
        result["costs"] = {kind: asdict(costs) for kind, costs in costs_of.items()}
        result["checked"] = [asdict(each) | {"ratio": each.ratio} for each in checked]
    else:
        costs = measured(asked)
        here = cluster(asked.settings, costs)
        found = forecasts(asked.settings, costs, here)
        out.print("\n".join(foundation(costs, here)), markup=False)
        out.print(table(found, ascii_only=out.options.ascii_only))
        sentence = advice({workers: recommended(rows) for workers, rows in found.items()}, here)
        rows = [asdict(each) | {"iteration_s": each.iteration_s} for some in found.values() for each in some]
        result |= {"costs": asdict(costs), "cluster": asdict(here), "forecasts": rows}
    out.print(sentence, markup=False)
    write_json(folder / "plan.json", result | {"sentence": sentence})
    print(f"written to {folder / 'plan.json'}")


def console() -> Console:
    """Where the tables go: at least as wide as they are."""
    from rich.console import Console

    out = Console(highlight=False, soft_wrap=True)
    out.width = max(out.width, WIDTH)
    return out


# measuring ------------------------------------------------------------------------------------------------------------


def measured(asked: Plan) -> Costs:
    """What one machine costs: the medians of several sittings."""
    costs: Costs = middle([sitting(asked) for _ in range(asked.settings.repeats)])
    return costs


def sitting(asked: Plan) -> Costs:
    """Everything once, one after the other; on every rank, where mpiexec started several, and of use on rank 0.

    (Over 40 lines: what is measured, in its order.)
    """
    from cupynet import measure
    from cupynet.parallel import GradientSharing
    from cupynet.parallel.forecast import Cluster, Costs, Sharing, all_gather_s, all_reduce_s

    experiment, settings = asked.experiment, asked.settings
    data, workers, first = experiment.load(), experiment.placement.workers, experiment.rank == 0
    machines, cores = workers_at_hand(experiment)
    turns = workers / machines / cores

    def loop_s(of: int, **changes: Any) -> float:
        changes |= {"synchronizer": None, "averaging_frequency": "end"}
        rate = measure.loop_images_per_s(experiment, data, of, settings.images, **changes)
        return of * settings.batch_size / rate

    alone_s = loop_s(1, launcher="thread") if first else 1.0
    busy_s = loop_s(workers) / turns
    step_s, spread_s = measure.step_times(experiment, workers, 1.0).mean(axis=0)[:2] / turns
    average = measure.sharing(experiment, data, workers, None)
    link = measure.link_between(experiment, workers, workers - 1)
    beside = next((rank for rank, seat in enumerate(experiment.placement.seats) if seat == 1), workers - 1)
    local = link if machines == 1 else measure.link_between(experiment, workers, beside)
    here = Cluster(link, cores, machines)

    def of_one(sharing: Sharing) -> Sharing:
        """What a worker of one machine has to do, the links between machines left out."""
        exchange = all_gather_s if sharing.gathered else all_reduce_s
        alone = max(sharing.local_s - exchange(here, here.place(workers), sharing.size), 0.1 * sharing.local_s)
        return replace(sharing, local_s=alone / turns)

    gradients = measure.sharing(experiment, data, workers, GradientSharing())
    epochs = -(-settings.images // len(data.train))
    encoded = measure.sharing(experiment, data, workers, GradientSharing("threshold"), epochs=epochs, gathered=True)
    weights = sum(size for _, size in measure.sizes(experiment))
    return Costs(
        batch_size=settings.batch_size,
        alone_s=alone_s,
        busy_s=busy_s if cores > 1 else alone_s,
        step_s=float(step_s),
        spread_s=float(spread_s),
        cores=cores,
        local=local,
        average=of_one(average),
        gradients=of_one(gradients),
        threshold=replace(of_one(encoded), decode_s=measure.decode_s(int(encoded.size), weights)),
        steps=measure.steps_of(experiment, settings.micro_batches) if first else (),
        micro_batches=settings.micro_batches,
        across=link if machines > 1 else None,
    )


def middle(found: Sequence[Any]) -> Any:
    """One of them, with the median in place of each floating-point number, at any depth of it."""
    first = found[0]
    if isinstance(first, float):
        return statistics.median(found)
    if isinstance(first, list | tuple):
        return [middle(each) for each in zip(*found, strict=True)]
    if is_dataclass(first) and not isinstance(first, type):
        values = {each.name: middle([getattr(one, each.name) for one in found]) for each in fields(first)}
        return type(first)(**values)
    return first


def workers_at_hand(experiment: Experiment) -> tuple[int, int]:
    """How many machines there are, and how many of the workers started to measure each runs without taking turns."""
    from cupynet.backend import available_cores

    machines = max(experiment.placement.seats.count(0), 1)
    each = -(-experiment.placement.workers // machines)
    return machines, min(len(experiment.placement.devices) or available_cores(), each)


def cluster(settings: PlanSettings, costs: Costs) -> Cluster:
    """What the forecast is for."""
    from cupynet.parallel.forecast import Cluster, Link

    machines, cores = settings.machines, settings.cores_per_machine or costs.cores
    if settings.link != "measured":
        return Cluster(Link.of(settings.link), cores, machines, settings.all_reduce)
    if costs.across is None:
        return Cluster(costs.local, cores, machines or 1, settings.all_reduce)
    return Cluster(costs.across, cores, machines, settings.all_reduce)


def forecasts(settings: PlanSettings, costs: Costs, here: Cluster) -> dict[int, list[Forecast]]:
    """Number of workers -> what each mode comes to with them."""
    from cupynet.parallel import forecast

    return {
        workers: forecast.forecasts(costs, here, workers, settings.compared, settings.every, settings.stages)
        for workers in settings.asked
    }


# against real runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """One forecast beside the run it is of.

    Attributes:
        kind: what the workers are, `threads` or `ranks`.
        workers, mode: of the forecast.
        predicted, measured: images per second.
    """

    kind: str
    workers: int
    mode: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def check(asked: Plan, folder: Path) -> tuple[list[Checked], dict[str, Costs]]:
    """Forecasts for this machine beside runs of `cupynet.train`, in turn; and the costs, by kind of workers."""
    from cupynet import measure

    settings = replace(asked.settings, link="measured", machines=1)
    command = measure.overrides(folder, PlanSettings, *measure.CHOSEN_BY_MODE, "epochs")
    epochs = -(-settings.images // len(asked.experiment.load().train))
    command += [f"epochs={epochs}", f"evaluate_every_epochs={epochs}"]
    kinds: dict[str, Callable[[], Costs]] = {"threads": partial(sitting, asked)}
    if reason := measure.without_ranks():
        print(f"not checked under mpiexec: {reason}")
    else:
        kinds["ranks"] = partial(sitting_of_ranks, asked, folder)
    costs: dict[str, list[Costs]] = {kind: [] for kind in kinds}
    rates: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(settings.repeats):
        for kind, sit in kinds.items():
            costs[kind].append(sit())
            here = cluster(settings, costs[kind][-1])
            for workers, rows in forecasts(settings, costs[kind][-1], here).items():
                for each in rows:
                    run = [*command, *measure.started(each, settings.micro_batches)]
                    rate = measure.trained(run, ranks=workers if kind == "ranks" else 0)[0].images_per_s
                    rates.setdefault((kind, workers, each.name), []).append(rate)
    medians = {kind: middle(some) for kind, some in costs.items()}
    checked = []
    for kind, cost in medians.items():
        for workers, rows in forecasts(settings, cost, cluster(settings, cost)).items():
            for each in rows:
                rate = statistics.median(rates[kind, workers, each.name])
                checked.append(Checked(kind, workers, each.name, each.images_per_s, rate))
    return checked, medians


def sitting_of_ranks(asked: Plan, folder: Path) -> Costs:
    """`sitting` under mpiexec, by this command: a rank for each of the workers that are measured here as threads."""
    from cupynet import measure
    from cupynet.parallel.forecast import Costs

    settings = asked.settings
    own = [f"images={settings.images}", f"micro_batches={settings.micro_batches}", "repeats=1", "link=measured"]
    command = [*measure.overrides(folder, PlanSettings, *measure.CHOSEN_BY_MODE), *own]
    with measure.job("plan", command, asked.experiment.placement.workers) as (found, _):
        return Costs.of(json.loads((found / "plan.json").read_text("utf-8"))["costs"])


def check_table(rows: Sequence[Checked]) -> Any:
    """A line for each."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("workers", "mode", "predicted, images/s", "measured", "predicted / measured"):
        made.add_column(heading, justify="left" if heading in ("workers", "mode") else "right", no_wrap=True)
    for each in rows:
        rates = (f"{each.predicted:,.0f}", f"{each.measured:,.0f}", f"{each.ratio:.2f}")
        made.add_row(f"{each.workers} {each.kind}", each.mode, *rates)
    return made


def verdict(rows: Sequence[Checked]) -> str:
    """How far the forecasts can be trusted, in one sentence."""
    near = [each for each in rows if abs(each.ratio - 1) <= NEAR]
    worst = max(rows, key=lambda each: abs(each.ratio - 1))
    furthest = (
        f"the furthest, {worst.mode} with {worst.workers} {worst.kind}, is off by {100 * (worst.ratio - 1):+.0f} %"
    )
    return f"{len(near)} of {len(rows)} forecasts are within {percent(NEAR, 0)} of what was measured; {furthest}."


# telling --------------------------------------------------------------------------------------------------------------


def foundation(costs: Costs, here: Cluster) -> list[str]:
    """What the forecast stands on, in lines."""
    ms, link, average = 1e3, here.link, costs.average
    machines = (
        "as many machines as they fill"
        if here.machines is None
        else f"{here.machines} machine{'s' * (here.machines > 1)}"
    )
    decoded = "" if costs.threshold is None else f", threshold {ms * costs.threshold.local_s:.2f} ms"
    return [
        "",
        f"measured    one worker alone {costs.alone_images_per_s:,.0f} images/s, {ms * costs.alone_s:.1f} ms an "
        f"iteration; {costs.cores} at once {percent(costs.alone_s / costs.busy_s, 0)} of that each",
        f"            gradients and update {ms * costs.step_s:.1f} ms, give or take {ms * costs.spread_s:.2f} ms",
        f"            together: average of {average.size / 1e6:.1f} MB {ms * average.local_s:.2f} ms, gradients "
        f"{ms * costs.gradients.local_s:.2f} ms{decoded}",
        f"forecast    {here.cores} worker{'s' * (here.cores > 1)} to a machine, {machines}; all-reduce by "
        f"{here.algorithm}",
        f"            link {link.name}: {link.bandwidth / 1e6:,.1f} MB/s, {1e6 * link.latency_s:,.0f} us",
        "",
    ]


def table(found: dict[int, list[Forecast]], *, ascii_only: bool = False) -> Any:
    """A line for every forecast: how fast, how well the workers are used, and where their time goes."""
    from rich.table import Table
    from rich.text import Text

    legend = Text()
    for (block, letter, colour), name in zip(MARKS, ("work", "wait", "talk"), strict=True):
        legend.append(letter if ascii_only else block, colour).append(f" {name} ")
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("workers", "mode", "images/s", "use", legend, "talk", "MB sent"):
        left = heading in ("mode", legend)
        made.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for workers, rows in found.items():
        for number, each in enumerate(rows):
            made.add_row(
                f"{workers:,}" if number == 0 else "",
                each.name,
                f"{each.images_per_s:,.0f}",
                percent(each.efficiency, 0),
                bar(each, ascii_only),
                percent(each.communication, 0),
                f"{each.bytes_sent / 1e6:.1f}",
                end_section=number == len(rows) - 1,
            )
    return made


def bar(each: Forecast, ascii_only: bool) -> Any:
    """Where an iteration's time goes, `BAR` columns in all."""
    from rich.text import Text

    parts, text, filled = (each.computing_s, each.waiting_s, each.communication_s), Text(), 0
    reached = 0.0
    for (block, letter, colour), part in zip(MARKS, parts, strict=True):
        reached += part / each.iteration_s * BAR
        text.append((letter if ascii_only else block) * (round(reached) - filled), colour)
        filled = round(reached)
    return text


def advice(best: dict[int, Forecast], here: Cluster) -> str:
    """What to do, in one sentence: numbers of workers that are best served alike are named together."""
    groups: list[tuple[str, list[int], Forecast]] = []
    for workers, each in best.items():
        mode = each.name.replace(", each iteration", " in each iteration")
        mode = mode if each.stages == 1 else f"{mode} (frequency {each.frequency})"
        if groups and groups[-1][0] == mode:
            groups[-1][1].append(workers)
            groups[-1] = (*groups[-1][:2], each)
        else:
            groups.append((mode, [workers], each))
    said = []
    for mode, alike, last in groups:
        several = f"{alike[0]:,}" if len(alike) == 1 else f"{alike[0]:,} to {alike[-1]:,}"
        said.append(
            f"{mode} with {several} workers ({last.images_per_s:,.0f} images/s, {percent(last.efficiency, 0)} of each)"
        )
    idle = [workers for workers in best if here.place(workers).turns > 1]
    more = f"; from {min(idle):,} workers on they take turns and nothing is gained" if idle else ""
    return f"Recommended over {here.link.name}: {'; '.join(said)}{more}."


if __name__ == "__main__":
    main()
