"""Benchmark of one GPU (`cupynet bench gpu=true`), compared with PyTorch on the same network.

backend.tf32 applies to both libraries. With half, both keep float weights and scale the loss; PyTorch uses autocast
and a GradScaler.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet.bench import measure, records
from cupynet.bench.measure import Row
from cupynet.config.experiment import Experiment
from cupynet.config.schema import BenchSettings
from cupynet.core.wording import one_line, percent

if TYPE_CHECKING:
    from cupynet.data import Data

TARGET = 0.99  # test accuracy
STEP_S = 1.0  # duration of a step measurement in seconds
PEERS: dict[str, tuple[str, ...]] = {  # variants of PyTorch -> options of `cupynet.bench.torch_peer`
    "torch": ("--layout", "contiguous"),
    "torch channels_last": ("--layout", "channels_last"),
    "torch, CUDA graph": ("--layout", "contiguous", "--graph"),
    "torch channels_last, CUDA graph": ("--layout", "channels_last", "--graph"),
    "torch, compiled, CUDA graph": ("--layout", "contiguous", "--compile", "--graph"),
    "torch channels_last, compiled, CUDA graph": ("--layout", "channels_last", "--compile", "--graph"),
}
RUNS = (("float", 1), ("half", 1), ("bfloat16", 1), ("float", 4), ("half", 4))  # precision, workers on the device


def record(settings: BenchSettings, data: Data) -> tuple[Row, Path]:
    experiment = on_one_device(settings)
    result: Row = {
        **records.where(experiment.placement.devices[0]),
        "dataset": data.name,
        "fallback": data.fallback,
        "batch_size": settings.batch_size,
        "tf32": settings.backend.tf32,
        "model": experiment.model().summary().splitlines(),
        "optimizer": type(experiment.optimizer).__name__,
        "step_images_per_s": {dtype: steps(settings, dtype) for dtype in ("float", "half")},
        "operations": attempted(lambda: measure.operations(experiment, measure.peak_gflops(experiment))),
        "training": {
            f"{dtype}, workers={workers}": [
                attempted(partial(training, settings, data, dtype=dtype, workers=workers, seed=seed))
                for seed in range(settings.seeds)
            ]
            for dtype, workers in RUNS
        },
    }
    return result, records.write(result)


def on_one_device(settings: BenchSettings, **changes: Any) -> Experiment:
    """Return the experiment on its first device, by default with one worker. TF32 is used only with float."""
    devices = settings.devices[:1] if settings.devices else [0]
    overrides: dict[str, Any] = {"workers": 1, "devices": devices, **changes}
    changed = replace(settings, **overrides)
    return Experiment(
        changed if changed.dtype == "float" else replace(changed, backend=replace(changed.backend, tf32=False))
    )


def attempted(measurement: Callable[[], Any]) -> Any:
    """Return the result of a measurement, or its error as text."""
    try:
        return measurement()
    except Exception as error:  # CuPy and PyTorch raise various errors; the other measurements continue
        return f"{type(error).__name__}: {one_line(error)}"


def steps(settings: BenchSettings, dtype: str) -> dict[str, list[float | str]]:
    """Measure images per second of the training step on one batch in memory, alternating cupynet and PyTorch."""
    experiment = on_one_device(settings, dtype=dtype)
    common = ["--dtype", dtype, "--device", f"cuda:{experiment.placement.devices[0]}", "--seconds", STEP_S]
    common += ["--tf32"] * experiment.settings.backend.tf32
    cases: dict[str, Callable[[], float]] = {"cupynet": partial(measure.step_images_per_s, experiment, 1, STEP_S)}
    cases |= {
        name: partial(measure.torch_images_per_s, experiment, *options, *common) for name, options in PEERS.items()
    }
    rounds = [{name: attempted(case) for name, case in cases.items()} for _ in range(settings.repeats)]
    return {name: [results[name] for results in rounds] for name in cases}


def training(settings: BenchSettings, data: Data, **changes: Any) -> Row:
    """Train and evaluate. Return the results by epoch, the throughput, and the seconds to `TARGET`, or None."""
    experiment = on_one_device(settings, **changes)
    with experiment.wrapper(callbacks=[]) as wrapper:
        wrapper.warm_up(settings.batch_size)
        wrapper.fit(
            experiment.train_loader(data), epochs=settings.epochs, evaluate_on=experiment.evaluation_loader(data.test)
        )
        epochs, clock = wrapper.history.epochs, wrapper.trainer.statistics.clock
    reached = zip(accumulate(epochs["train_s"]), epochs["test_accuracy"], strict=True)
    return {
        "epoch_s": epochs["train_s"],
        "accuracy": epochs["test_accuracy"],
        "to_target_s": next((seconds for seconds, accuracy in reached if accuracy >= TARGET), None),
        "images_per_s": clock.images_per_s,
        "spent_s": {name: getattr(clock, name) for name in ("compute_s", "data_s", "averaging_s")},
    }


# the result -----------------------------------------------------------------------------------------------------------


def table(result: Row) -> list[str]:
    lines = [f"{result['device']['name']}, {result['dataset']}, batch of {result['batch_size']}, {result['optimizer']}"]
    lines += ["", f"{'training step, one batch in memory':<44}{'images/s':>12}{'cupynet/row':>12}"]
    for dtype, rates in result["step_images_per_s"].items():
        cupynet_rate = middle(rates["cupynet"])
        for name, measured in rates.items():
            rate = middle(measured)
            figures = f"{rate:>12,.0f}{cupynet_rate / rate:>12.2f}" if rate else measured[-1]
            lines.append(f"{f'{name}, {dtype}':<44}{figures}")
    lines += ["", f"{'operations, launched one by one':<44}{'ms':>12}"]
    if isinstance(result["operations"], str):
        lines.append(result["operations"])
    else:
        lines += [f"{row['operation']:<44}{row['ms']:>12.3f}" for row in result["operations"]]
    to_target = f"s to {percent(TARGET, 0)}"
    lines += ["", f"{'training':<20}{'s/epoch':>12}{'images/s':>12}{'accuracy':>12}{to_target:>12}"]
    for name, runs in result["training"].items():
        done = [run for run in runs if isinstance(run, dict)]
        if not done:
            lines.append(f"{name:<20}{runs[-1]}")
            continue
        epoch = middle([seconds for run in done for seconds in run["epoch_s"][1:] or run["epoch_s"]])
        rate, accuracy = middle([run["images_per_s"] for run in done]), middle([run["accuracy"][-1] for run in done])
        reached = [run["to_target_s"] for run in done if run["to_target_s"] is not None]
        seconds = f"{statistics.median(reached):.2f}" if reached else "-"
        lines.append(f"{name:<20}{epoch:>12.3f}{rate:>12,.0f}{percent(accuracy):>12}{seconds:>12}")
    return lines


def middle(figures: Sequence[float | str]) -> float:
    """Return the median of the successful measurements, or 0 if there are none."""
    return statistics.median([figure for figure in figures if not isinstance(figure, str)] or [0.0])
