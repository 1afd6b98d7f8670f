"""Benchmark training on this machine: `cupynet bench [peers=torch] [gpu=true] [key=value ...]`.

Measures the bare training step (with the data already on the device), the complete training loop, and the speed of each
operation relative to a large matrix product. On a shared machine, compare only ratios within one run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config
from cupynet.config.schema import BenchSettings
from cupynet.core.errors import ConfigError
from cupynet.core.wording import percent

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment


def main() -> None:
    config.run(bench, prepare, "bench", BenchSettings)


def prepare(settings: BenchSettings) -> tuple[BenchSettings, Experiment]:
    from cupynet.bench.measure import torch_network
    from cupynet.config.experiment import Experiment

    if settings.parallel.launcher == "mpi":
        raise ConfigError("bench only supports threads. Remove this setting", "parallel.launcher", "mpi")
    if settings.accumulation_steps > 1:
        raise ConfigError(
            "bench does not support gradient accumulation. Use 1",
            "accumulation_steps",
            str(settings.accumulation_steps),
        )
    experiment = Experiment(settings)
    if settings.gpu and not experiment.placement.devices:
        reason = experiment.backend_reason or f"the backend is {experiment.backend_name}; use backend=cupy"
        raise ConfigError(f"no GPU is used: {reason}", "gpu", "true")
    if settings.peers == "torch":
        if find_spec("torch") is None:
            raise ConfigError("PyTorch is not installed. Install torch, or use peers=null", "peers", "torch")
        torch_network(experiment)
    return settings, experiment


def bench(prepared: tuple[BenchSettings, Experiment], folder: Path) -> None:
    from cupynet.backend.environment import commit, environment
    from cupynet.bench import gpu, measure
    from cupynet.config.announcement import announce
    from cupynet.core.files import write_json

    settings, experiment = prepared
    announce(experiment)
    if settings.gpu:
        record, path = gpu.record(settings, experiment.load())
        print("\n".join(gpu.table(record)), f"written to {path}", sep="\n")
        return
    ceiling = measure.peak_gflops(experiment)
    rates = images_per_s(settings, experiment)
    result = {
        "backend": experiment.backend_name,
        "dtype": settings.dtype,
        "batch_size": settings.batch_size,
        "commit": commit(),
        "environment": environment(),
        "model": experiment.model().summary().splitlines(),
        "optimizer": type(experiment.optimizer).__name__,
        "ceiling_gflop_per_s": ceiling,
        "operations": measure.operations(experiment, ceiling),
        "images_per_s": rates,
        "ratios": ratios(rates),
    }
    write_json(folder / "bench.json", result)
    print("\n".join(table(result)), f"written to {folder / 'bench.json'}", sep="\n")


def images_per_s(settings: BenchSettings, experiment: Experiment) -> dict[str, float]:
    """Return the median images per second of the loop, the bare step and PyTorch, from interleaved measurements."""
    from cupynet.bench import measure

    data, measurements = experiment.load(), dict[str, Callable[[], float]]()
    for workers in sorted({1, experiment.placement.workers}):
        options = replace(experiment.options, workers=workers, blas_threads=1)
        loop = partial(measure.loop_images_per_s, experiment, options, data, settings.images)
        measurements[f"loop, workers={workers}"] = loop
        measurements[f"bare step, workers={workers}"] = partial(measure.step_images_per_s, experiment, workers)
        for name, setup in torch_setups(settings).items():
            of_torch = partial(measure.torch_images_per_s, experiment, *setup)
            measurements[f"{name}, workers={workers}"] = partial(of_torch, "--threads", workers)
            if workers > 1:
                measurements[f"{name}, {workers} processes, workers={workers}"] = partial(
                    of_torch, "--processes", workers
                )
    return measure.medians(measurements, settings.repeats)


def torch_setups(settings: BenchSettings) -> dict[str, tuple[str, ...]]:
    """Return the options of `cupynet.bench.torch_peer` by measurement. 16-bit dtypes add measurements with autocast."""
    if settings.peers != "torch":
        return {}
    layouts: dict[str, tuple[str, ...]] = {
        f"torch {layout}": ("--layout", layout) for layout in ("channels_last", "contiguous")
    }
    if settings.dtype not in ("half", "bfloat16"):
        return layouts
    narrow = {f"{name} autocast": (*setup, "--dtype", settings.dtype) for name, setup in layouts.items()}
    return layouts | narrow


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Return the speed of the loop relative to the other rates for as many workers, and to the loop with one worker."""
    found = {}
    for name, rate in rates.items():
        loop = f"loop, {name.rpartition(', ')[2]}"
        if name != loop:
            found[f"{loop} / {name}"] = rates[loop] / rate
        elif name != "loop, workers=1":
            found[f"{loop} / loop, workers=1"] = rate / rates["loop, workers=1"]
    return found


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{'peak: 2048 x 2048 matrix product on one core':<48}{result['ceiling_gflop_per_s']:>10,.0f} GFLOP/s", ""]
    batch = f"batch of {result['batch_size']} on one core"
    lines.append(f"{batch:<48}{'ms':>10}{'GFLOP/s':>10}{'of peak':>10}")
    for row in result["operations"]:
        arithmetic = f"{row['gflop_per_s']:>10.0f}{percent(row['share_of_ceiling'], 0):>10}" if "mflop" in row else ""
        lines.append(f"{row['operation']:<48}{row['ms']:>10.3f}{arithmetic}")
    lines += ["", f"{'':<56}{'images/s':>10}"]
    lines += [f"{name:<56}{rate:>10,.0f}" for name, rate in result["images_per_s"].items()]
    return [*lines, "", *(f"{name:<72}{ratio:>8.2f}" for name, ratio in result["ratios"].items())]
