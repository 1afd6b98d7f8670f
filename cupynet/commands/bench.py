"""Benchmark training on this machine: `cupynet bench [peers=torch] [gpu=true] [key=value ...]`.

Measures each operation relative to a large matrix product, the training step on resident data, the whole loop, and
whole runs with two threads and with two ranks. `peers=torch` adds PyTorch on the same network, alone and as two
averaged processes. `gpu=true` measures one GPU instead (bench/gpu.py). On a shared machine only ratios within one run
are meaningful.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cupynet import config
from cupynet.config.schema import BenchSettings
from cupynet.core.checks import percent
from cupynet.core.errors import ConfigError

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment

Row: TypeAlias = dict[str, Any]
PAIR = 2  # workers of a whole run, as threads and as ranks


def main() -> None:
    """Run the command."""
    config.run(bench, prepare, "bench", BenchSettings)


@dataclass(frozen=True)
class Bench:
    """A validated benchmark.

    Attributes:
        without_ranks: why nothing can be measured under mpiexec; "" if it can.
        network: source of the PyTorch module, if PyTorch is measured too.
    """

    settings: BenchSettings
    experiment: Experiment
    without_ranks: str
    network: str | None = None


def prepare(settings: BenchSettings) -> Bench:
    """Refuse what cannot work before anything is measured. ConfigError."""
    from cupynet.bench.measure import peer_network, without_ranks
    from cupynet.config.experiment import Experiment

    if settings.parallel.launcher == "mpi":
        raise ConfigError("launcher=mpi: bench measures threads of one process; leave it out")
    if settings.peers == "torch" and find_spec("torch") is None:
        raise ConfigError("peers=torch: PyTorch is not installed; install torch, or use peers=null")
    experiment = Experiment(settings)
    experiment.check_memory()
    if settings.accumulate > 1 and (settings.gpu or settings.peers == "torch"):
        which = "gpu=true" if settings.gpu else "peers=torch"
        raise ConfigError(f"accumulate={settings.accumulate}: {which} compares with PyTorch on whole batches: use 1")
    if settings.gpu and not experiment.placement.devices:
        raise ConfigError(f"gpu=true: no GPU is used: {experiment.backend_reason or 'backend=cupy'}")
    network = peer_network(experiment) if settings.peers == "torch" else None
    return Bench(settings, experiment, without_ranks(), network)


def bench(prepared: Bench, folder: Path) -> None:
    """Run the benchmark: print a table, and write bench.json into `folder`, or a record of the GPU."""
    from cupynet.backend.environment import commit, environment
    from cupynet.bench import measure
    from cupynet.core.files import write_json

    experiment, settings = prepared.experiment, prepared.settings
    experiment.announce()
    if settings.gpu:
        from cupynet.bench import gpu

        record, path = gpu.record(settings, experiment.load(), folder)
        print("\n".join(gpu.table(record)), f"written to {path}", sep="\n")
        return
    if prepared.without_ranks:
        print(f"not measured under mpiexec: {prepared.without_ranks}")
    ceiling = measure.ceiling(experiment)
    result: Row = {
        "backend": experiment.backend_name,
        "dtype": settings.dtype,
        "batch_size": settings.batch_size,
        "accumulate": settings.accumulate,
        "commit": commit(),
        "environment": environment(),
        "model": experiment.model().summary().splitlines(),
        "optimizer": type(experiment.optimizer).__name__,
        "ceiling_gflop_per_s": ceiling,
        "operations": measure.operations(experiment, ceiling["one core"]),
        "images_per_s": loops(prepared, folder),
    }
    result["ratios"] = ratios(experiment, result)
    write_json(folder / "bench.json", result)
    print("\n".join(table(result)))
    print(f"written to {folder / 'bench.json'}")


# the loop -------------------------------------------------------------------------------------------------------------


def loops(prepared: Bench, folder: Path) -> Row:
    """Return the median images per second of the loop, the bare step, whole runs and the peers, measured in turn."""
    from cupynet.bench import measure

    experiment, settings = prepared.experiment, prepared.settings
    data, cores = experiment.load(), experiment.placement.workers
    measurements: dict[str, Callable[[], float]] = {}
    same = [] if prepared.network is None else measure.peer_options(experiment, prepared.network, folder)
    for workers in sorted({1, cores}):
        loop = partial(measure.loop_images_per_s, experiment, data, workers, settings.images, blas_threads=1)
        measurements[f"loop, workers={workers}"] = loop
        measurements[f"bare step, workers={workers}"] = partial(bare_steps, experiment, workers)
        if settings.peers == "torch":
            for layout in ("channels_last", "contiguous"):
                name = f"torch {layout}, threads={workers}"
                measurements[name] = partial(measure.peer, "--threads", workers, "--layout", layout, *same)
    epochs = -(-settings.images // len(data.train))
    overrides = measure.overrides(folder, BenchSettings, "workers")  # mpiexec decides the number of ranks
    run = [*overrides, f"epochs={epochs}", f"evaluate_every_epochs={epochs}"]
    measurements[f"train, threads={PAIR}"] = partial(measure.run_images_per_s, [*run, f"workers={PAIR}"])
    if not prepared.without_ranks:
        measurements[f"train, ranks={PAIR}"] = partial(measure.run_images_per_s, run, ranks=PAIR)
    if settings.peers == "torch":
        period = settings.parallel.averaging_frequency
        options = ["--processes", PAIR, "--average-every", period if isinstance(period, int) else 3]
        measurements[f"torch channels_last, processes={PAIR}"] = partial(measure.peer, *options, *same)
    return measure.medians(measurements, settings.repeats)


def bare_steps(experiment: Experiment, workers: int) -> float:
    """Return images per second of the training step alone: resident data, no averaging, `workers` replicas at once."""
    from cupynet.bench import measure

    means = measure.step_times(experiment, workers)[:, 0]
    return float((experiment.settings.batch_size / means).sum())


# the result -----------------------------------------------------------------------------------------------------------


def ratios(experiment: Experiment, result: Row) -> Row:
    """Return the ratios, which are meaningful on any machine."""
    rates, workers = result["images_per_s"], experiment.placement.workers
    mflop = sum(row.get("mflop", 0.0) for row in result["operations"]) / result["batch_size"]
    best = rates[f"loop, workers={workers}"]
    found = {
        "loop as dense arithmetic / ceiling of all cores": best
        * mflop
        / 1e3
        / result["ceiling_gflop_per_s"]["all cores"],
        f"loop, workers={workers} / bare step": best / rates[f"bare step, workers={workers}"],
    }
    if workers > 1:
        found[f"loop, workers={workers} / workers=1"] = best / rates["loop, workers=1"]
    threads, ranks = (f"train, {kind}={PAIR}" for kind in ("threads", "ranks"))
    if ranks in rates:
        found[f"{ranks} / {threads}"] = rates[ranks] / rates[threads]
    for name, rate in rates.items():
        if name.startswith("torch"):
            kinds = (threads, ranks) if "processes=" in name else (f"loop, workers={name.rpartition('=')[2]}",)
            found |= {f"{own} / {name}": rates[own] / rate for own in kinds if own in rates}
    return found


def table(result: Row) -> list[str]:
    """Return the result as lines."""
    lines = [
        f"{'product of 2048 x 2048, ' + name:<48}{rate:>10,.0f} GFLOP/s"
        for name, rate in result["ceiling_gflop_per_s"].items()
    ]
    batch = f"one core, batch of {result['batch_size']}"
    batch += f" in {result['accumulate']} parts" * (result["accumulate"] > 1)
    lines += ["", f"{batch:<48}{'ms':>10}{'GFLOP/s':>10}{'ceiling':>10}"]
    for row in result["operations"]:
        arithmetic = f"{row['gflop_per_s']:>10.0f}{percent(row['share_of_ceiling'], 0):>10}" if "mflop" in row else ""
        lines.append(f"{row['operation']:<48}{row['ms']:>10.3f}{arithmetic}")
    total = sum(row["ms"] for row in result["operations"])
    lines += [f"{'sum':<48}{total:>10.3f}", "", f"{'':<48}{'images/s':>10}"]
    lines += [f"{name:<48}{rate:>10,.0f}" for name, rate in result["images_per_s"].items()]
    lines += ["", *(f"{name:<60}{ratio:>8.2f}" for name, ratio in result["ratios"].items())]
    return lines
