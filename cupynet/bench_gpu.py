"""What `cupynet.bench gpu=true` measures on one GPU, and the record that it writes.

The training step on resident data, alone and in turn with PyTorch's, eager and replayed as a CUDA graph; its
operations, each launched by itself, which a recorded step is not; an epoch; the time to an accuracy on the test images,
for several seeds; the loop in each precision with several workers on the one device. What cannot be measured is in the
record with the reason, in words.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import measure
from cupynet.backend import cuda
from cupynet.backend.environment import commit, environment
from cupynet.checks import percent
from cupynet.errors import ConfigError, CupynetError
from cupynet.experiment import Experiment
from cupynet.files import write_json
from cupynet.measure import Row
from cupynet.settings import BenchSettings
from cupynet.training import Callback, EpochRecord, TrainerView

if TYPE_CHECKING:
    from cupynet.data import Data

RECORDS = Path("outputs/records")
TARGET = 0.99  # accuracy on the test images
DTYPES, WORKERS = ("float", "half", "bfloat16"), (1, 2, 4)
STEP_S = 1.0  # of one measurement of the step


def record(settings: BenchSettings, data: Data) -> tuple[Row, Path]:
    """Measure everything; the record and the file that it was written to."""
    one = _on_one_device(settings)
    there = cuda.inventory()
    device = one.placement.devices[0]
    result: Row = {
        "device": there["devices"][device],
        "cuda": {name: there[name] for name in ("cupy", "driver", "runtime", "nccl")},
        "commit": commit(),
        "environment": environment(),
        "date": date.today().isoformat(),
        "dataset": data.name,
        "fallback": data.fallback,
        "batch_size": settings.batch_size,
    }
    result["step"] = steps(one, settings)
    result["gflop_per_s"] = measure.ceiling(one)["one core"]
    result["operations"] = measure.operations(one, result["gflop_per_s"])
    result["epoch"] = epochs(one, data, settings.repeats)
    result["to_accuracy"] = [seconds_to_accuracy(settings, data, seed) for seed in range(settings.seeds)]
    result["loop_images_per_s"] = loops(settings, data)
    return result, write(result)


def write(result: Row) -> Path:
    """The record, in a file of its own: one of the same day is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", result["device"]["name"].lower()).strip("-")
    RECORDS.mkdir(parents=True, exist_ok=True)
    stem, number = f"gpu-{name}-{result['date']}", 1
    path = RECORDS / f"{stem}.json"
    while path.exists():
        number += 1
        path = RECORDS / f"{stem}-{number}.json"
    write_json(path, result)
    return path


def _on_one_device(settings: BenchSettings, **changes: Any) -> Experiment:
    """The experiment with one worker on the first of its devices, or with the changes."""
    devices = settings.devices[:1] if settings.devices else [0]
    chosen: dict[str, Any] = {"workers": 1, "devices": devices, **changes}
    return Experiment(replace(settings, **chosen))


# the step -------------------------------------------------------------------------------------------------------------


def steps(one: Experiment, settings: BenchSettings) -> Row:
    """Images per second of the training step on resident data, of cupynet and of PyTorch, measured in turn."""
    peer = ("--device", "cuda", "--batch", settings.batch_size, "--seconds", STEP_S)
    measured: dict[str, Callable[[], float]] = {
        "cupynet": lambda: settings.batch_size / float(measure.step_times(one, 1, STEP_S)[0, 3]),
        "torch": lambda: measure.peer(*peer),
        "torch, CUDA graph": lambda: measure.peer(*peer, "--graph"),
    }
    reasons: dict[str, str] = {}
    if find_spec("torch") is None:
        reasons = {name: "PyTorch is not installed" for name in measured if name.startswith("torch")}
    elif settings.dtype != "float":
        reasons = {name: "compared in float alone" for name in measured if name.startswith("torch")}
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(settings.repeats):
        for name, work in measured.items():
            if name not in reasons:
                try:
                    found[name].append(work())
                except ConfigError as error:
                    reasons[name] = str(error)
    return {name: {"not_measured": reasons[name]} if name in reasons else spread(found[name]) for name in measured}


def spread(values: list[float]) -> Row:
    """The median, the least and the greatest, and all of them."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "all": values}


# training -------------------------------------------------------------------------------------------------------------


def epochs(one: Experiment, data: Data, repeats: int) -> Row:
    """Seconds of an epoch amid others, as `cupynet.train` goes through it, without its evaluation; not of the first."""
    ends = _Ends()
    with one.wrapper(callbacks=[ends]) as wrapper:
        wrapper.warm_up(one.settings.batch_size)
        wrapper.fit(one.train_loader(data), repeats + 1)
        clock, images = wrapper.trainer.clock, len(data.train) * (repeats + 1)
        shares = {name: getattr(clock, name) for name in ("compute_s", "data_s", "averaging_s")}
    times = [after - before for before, after in pairwise(ends.at_s)]
    return {"images": len(data.train), "seconds": spread(times), "spent": shares, "of_images": images}


class _Ends(Callback):
    """When each epoch of a fit ended: all that was asked of the device for it is done then."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        self.at_s.append(time.perf_counter())


class _Reached(Callback):
    """Stops a fit at the first epoch whose evaluation is good enough; when that was, and how good each was."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy, self.at_s, self.found = accuracy, 0.0, list[float]()

    def on_epoch_end(self, trainer: TrainerView, record: EpochRecord) -> None:
        assert record.evaluation is not None
        self.found.append(record.evaluation.accuracy)
        if self.found[-1] >= self.accuracy and not self.at_s:
            self.at_s = time.perf_counter()
            trainer.stop("it is good enough")


def seconds_to_accuracy(settings: BenchSettings, data: Data, seed: int) -> Row:
    """Seconds of training and evaluating until `TARGET` is reached, from warm kernels; None where it was not.

    As many epochs as the settings say at most. The seed is of the weights and of the order of the images.
    """
    from cupynet.data import as_loader

    one, reached = _on_one_device(settings, seed=seed), _Reached(TARGET)
    loader = as_loader(data.train, settings.batch_size, seed=one.source.seed + seed)
    with one.wrapper(callbacks=[reached]) as wrapper:
        wrapper.warm_up(settings.batch_size)
        began = time.perf_counter()
        wrapper.fit(loader, settings.epochs, evaluate_on=one.evaluation_loader(data.test))
    seconds = reached.at_s - began if reached.at_s else None
    return {"seed": seed, "seconds": seconds, "epochs": len(reached.found), "accuracies": reached.found}


def loops(settings: BenchSettings, data: Data) -> dict[str, Row]:
    """Images per second of the loop on one device: dtype -> workers -> the rate, or why there is none."""
    table: dict[str, Row] = {}
    for dtype in DTYPES:
        table[dtype] = {}
        for workers in WORKERS:
            try:
                each = _on_one_device(settings, dtype=dtype, workers=workers)
                rate: Any = measure.loop_images_per_s(each, data, workers, settings.images)
            except CupynetError as error:
                rate = str(error)
            table[dtype][str(workers)] = rate
    return table


# the result -----------------------------------------------------------------------------------------------------------


def table(result: Row) -> list[str]:
    """The record in lines."""
    rates, size = result["step"], result["batch_size"]
    lines = [f"{result['device']['name']}, {result['dataset']}, batch of {size}", ""]
    lines.append(f"{'training step on resident data':<40}{'images/s':>12}{'least':>12}{'most':>12}")
    for name, found in rates.items():
        figures = "".join(f"{found[key]:>12,.0f}" for key in ("median", "least", "most") if key in found)
        lines.append(f"{name:<40}{figures or found['not_measured']}")
    for name, found in rates.items():
        if name != "cupynet" and "median" in found:
            lines.append(f"{'cupynet / ' + name:<40}{rates['cupynet']['median'] / found['median']:>12.2f}")
    lines += ["", f"{'its operations, each launched by itself':<40}{'ms':>12}{'GFLOP/s':>12}"]
    for row in result["operations"]:
        lines.append(
            f"{row['operation']:<40}{row['ms']:>12.3f}" + (f"{row['gflop_per_s']:>12,.0f}" if "mflop" in row else "")
        )
    seconds = result["epoch"]["seconds"]
    about = f"an epoch of {result['epoch']['images']:,} images"
    lines += ["", f"{about:<40}{seconds['median']:>12.3f} s, {seconds['least']:.3f} to {seconds['most']:.3f}"]
    reached = [each["seconds"] for each in result["to_accuracy"] if each["seconds"] is not None]
    about = f"{percent(TARGET, 1)} on the test images"
    if reached:
        between = f"{statistics.median(reached):>12.2f} s, {min(reached):.2f} to {max(reached):.2f}"
        lines.append(f"{about:<40}{between}, {len(reached)} of {len(result['to_accuracy'])} seeds")
    else:
        best = max((max(each["accuracies"]) for each in result["to_accuracy"]), default=0.0)
        lines.append(f"{about:<40}{'not reached':>12}, {percent(best)} at best")
    lines += ["", f"{'loop on one device, images/s':<40}" + "".join(f"{f'workers={each}':>12}" for each in WORKERS)]
    for dtype, row in result["loop_images_per_s"].items():
        rates = [row[str(workers)] for workers in WORKERS]
        words = [rate for rate in rates if isinstance(rate, str)]
        lines.append(f"{dtype:<40}" + (words[0] if words else "".join(f"{rate:>12,.0f}" for rate in rates)))
    return lines
