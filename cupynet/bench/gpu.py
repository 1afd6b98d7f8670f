"""The measurements of one GPU, `cupynet bench gpu=true`, and the record of them.

The training step on resident data in float and in half, in turn with PyTorch's on the same network: eager and as a
CUDA graph, in its own layout and channels_last. Both multiply floats in TF32, or neither does (backend.tf32). PyTorch
trains half under autocast with a GradScaler, as cupynet keeps its weights in float and scales the loss. Also measured:
the operations of the step, each launched alone; an epoch; the time to an accuracy on the test images for several seeds;
the loop in each precision with several workers on the device. If a figure cannot be measured, the reason takes its
place.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet.bench import measure, records
from cupynet.bench.measure import Row
from cupynet.config.experiment import Experiment
from cupynet.config.schema import BenchSettings
from cupynet.core.checks import percent
from cupynet.core.errors import ConfigError, CupynetError
from cupynet.training import Callback, EpochRecord, Trainer

if TYPE_CHECKING:
    from cupynet.data import Data

TARGET = 0.99  # accuracy on the test images
DTYPES, WORKERS = ("float", "half", "bfloat16"), (1, 2, 4)
COMPARED = ("float", "half")  # precisions of the step, besides that of the settings
PEERS: dict[str, tuple[str, ...]] = {  # variants of PyTorch's step: options of `cupynet.bench.torch_peer`
    "torch": ("--layout", "contiguous"),
    "torch channels_last": ("--layout", "channels_last"),
    "torch, CUDA graph": ("--layout", "contiguous", "--graph"),
    "torch channels_last, CUDA graph": ("--layout", "channels_last", "--graph"),
}
NARROW = {"half": "autocast to float16 with a GradScaler", "bfloat16": "autocast to bfloat16"}
STEP_S = 1.0  # duration of one measurement of the step


def record(settings: BenchSettings, data: Data, folder: Path) -> tuple[Row, Path]:
    """Measure everything. Return the record and its file. folder: for the PyTorch module."""
    one = _on_one_device(settings)
    step, torch = steps(one, settings, folder)
    gflop_per_s = measure.ceiling(one)["one core"]
    result: Row = {
        **records.where(one.placement.devices[0]),
        "dataset": data.name,
        "fallback": data.fallback,
        "batch_size": settings.batch_size,
        "dtype": settings.dtype,
        "tf32": settings.backend.tf32,
        "model": one.model().summary().splitlines(),
        "optimizer": type(one.optimizer).__name__,
        "step": step,
        "torch": torch,
        "gflop_per_s": gflop_per_s,
        "operations": measure.operations(one, gflop_per_s),
        "epoch": epochs(one, data, settings.repeats),
        "to_accuracy": [seconds_to_accuracy(settings, data, seed) for seed in range(settings.seeds)],
        "loop_images_per_s": loops(settings, data),
    }
    return result, records.write(result)


def _on_one_device(settings: BenchSettings, **changes: Any) -> Experiment:
    """Return the experiment with one worker on its first device, with changes. Only float uses TF32."""
    devices = settings.devices[:1] if settings.devices else [0]
    chosen: dict[str, Any] = {"workers": 1, "devices": devices, **changes}
    made = replace(settings, **chosen)
    return Experiment(made if made.dtype == "float" else replace(made, backend=replace(made.backend, tf32=False)))


# the step -------------------------------------------------------------------------------------------------------------


def steps(one: Experiment, settings: BenchSettings, folder: Path) -> tuple[dict[str, Row], Row]:
    """Measure images per second of the training step on resident data, of cupynet and PyTorch in turn.

    Returns:
        The rates by precision and name, and the versions and modes of PyTorch.
    """
    dtypes = [*dict.fromkeys((*COMPARED, settings.dtype))]
    options, lacking = _same_network(one, folder)
    reasons = {(dtype, name): lacking for dtype in dtypes for name in PEERS if lacking}
    reasons |= {("double", name): "PyTorch is compared in float, half and bfloat16" for name in PEERS}
    found: dict[tuple[str, str], list[float]] = {(dtype, name): [] for dtype in dtypes for name in ("cupynet", *PEERS)}
    about: Row = {"not_measured": lacking} if lacking else {}

    def measured(dtype: str, name: str) -> float:
        if name == "cupynet":
            own = _on_one_device(settings, dtype=dtype)
            return settings.batch_size / float(measure.step_times(own, 1, STEP_S)[0, 1])
        tf32 = ["--tf32"] if settings.backend.tf32 and dtype == "float" else []
        row = measure.peer_row(*options, "--dtype", dtype, *PEERS[name], *tf32)
        about.update({key: row[key] for key in ("version", "cuda", "cudnn") if key in row})
        return float(row["images_per_s"])

    for _ in range(settings.repeats):
        for case in found:
            if case not in reasons:
                try:
                    found[case].append(measured(*case))
                except CupynetError as error:
                    reasons[case] = str(error)
    if not lacking:
        about |= {"tf32": settings.backend.tf32, **{each: NARROW[each] for each in dtypes if each in NARROW}}
    table: dict[str, Row] = {dtype: {} for dtype in dtypes}
    for (dtype, name), rates in found.items():
        why = reasons.get((dtype, name))
        table[dtype][name] = {"not_measured": why} if why else spread(rates)
    return table, about


def _same_network(one: Experiment, folder: Path) -> tuple[list[object], str]:
    """Return the peer's options for this network on this device, or the reason why there are none."""
    if find_spec("torch") is None:
        return [], "PyTorch is not installed"
    try:
        network = measure.peer_options(one, measure.peer_network(one), folder)
    except ConfigError as error:
        return [], str(error)
    device = ["--device", "cuda", "--number", one.placement.devices[0]]
    return [*device, *network, "--seconds", STEP_S], ""


def spread(values: list[float]) -> Row:
    """Return the median, the minimum, the maximum and all values."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "all": values}


# training -------------------------------------------------------------------------------------------------------------


def epochs(one: Experiment, data: Data, repeats: int) -> Row:
    """Return the seconds of an epoch after the first, without evaluation."""
    ends = _Ends()
    with one.wrapper(callbacks=[ends]) as wrapper:
        wrapper.warm_up(one.settings.batch_size)
        wrapper.fit(one.train_loader(data), repeats + 1)
        clock, images = wrapper.trainer.statistics.clock, len(data.train) * (repeats + 1)
        shares = {name: getattr(clock, name) for name in ("compute_s", "data_s", "averaging_s")}
    times = [after - before for before, after in pairwise(ends.at_s)]
    return {"images": len(data.train), "seconds": spread(times), "spent": shares, "of_images": images}


class _Ends(Callback):
    """Records the times at which the epochs of a fit ended. The device has finished its work then."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self.at_s.append(time.perf_counter())


class _Reached(Callback):
    """Stops a fit after the first epoch that reaches an accuracy. Records its time, and all accuracies."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy, self.at_s, self.found = accuracy, 0.0, list[float]()

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        assert record.evaluation is not None
        self.found.append(record.evaluation.accuracy)
        if self.found[-1] >= self.accuracy and not self.at_s:
            self.at_s = time.perf_counter()
            trainer.stop("the accuracy is reached")


def seconds_to_accuracy(settings: BenchSettings, data: Data, seed: int) -> Row:
    """Return the seconds of training and evaluating until `TARGET` is reached; None if it is not reached.

    seed: of the weights and of the order of the images.
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
    """Return images per second of the loop on one device: dtype -> workers -> the rate, or why there is none."""
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
    """Return the record as lines."""
    title = f"{result['device']['name']}, {result['dataset']}, batch of {result['batch_size']}, {result['optimizer']}"
    lines = [title, "", *_step_table(result)]
    lines += ["", f"{'its operations, each launched alone':<40}{'ms':>12}{'GFLOP/s':>12}"]
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


def _step_table(result: Row) -> list[str]:
    """Return the rates of the step, and the ratios of cupynet's to PyTorch's."""
    lines = [f"{'training step on resident data':<40}{'images/s':>12}{'least':>12}{'most':>12}{'cupynet/it':>12}"]
    for dtype, rates in result["step"].items():
        for name, found in rates.items():
            figures = "".join(f"{found[key]:>12,.0f}" for key in ("median", "least", "most") if key in found)
            own = rates["cupynet"].get("median")
            if name != "cupynet" and figures and own:
                figures += f"{own / found['median']:>12.2f}"
            lines.append(f"{f'{name}, {dtype}':<40}{figures or found['not_measured']}")
    if "version" in result["torch"]:
        tf32 = "in TF32" if result["torch"]["tf32"] else "without TF32"
        lines.append(f"PyTorch {result['torch']['version']}, floats {tf32}, half as {NARROW['half']}")
    return lines
