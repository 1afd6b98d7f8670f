"""Measurements for `cupynet bench` and `plan`. On a shared machine, only ratios within one run are comparable."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from cupynet.bench.torch_peer import OPTIMIZERS
from cupynet.core.errors import ConfigError
from cupynet.core.files import write_whole
from cupynet.data import Batch, Data
from cupynet.interop import torch_source
from cupynet.nn import Layer, SoftmaxNLL
from cupynet.runs.run import Run
from cupynet.training import GraphReplica, HistoryWriter, Trainer, TrainingOptions
from cupynet.training.callbacks import profile
from cupynet.training.callbacks.profile import Timer
from cupynet.training.finite_check import check_finite

if TYPE_CHECKING:
    from cupynet.backend import Backend
    from cupynet.config.experiment import Experiment

Row: TypeAlias = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)
LARGE = 2048  # size of the square matrices that measure peak throughput
WARM_UP, PROFILED = 3, 50  # numbers of untimed and of profiled steps
PEER_S = 300  # timeout of a PyTorch measurement in seconds, including startup


def medians(measurements: Mapping[Key, Callable[[], float]], repeats: int) -> dict[Key, float]:
    """Return the median of each measurement. They are interleaved, so that other load affects them equally."""
    rounds = [{name: measure() for name, measure in measurements.items()} for _ in range(repeats)]
    return {name: statistics.median(results[name] for results in rounds) for name in measurements}


def timed(work: Callable[[], object], backend: Backend, seconds: float) -> float:
    """Return the median time of `work()` after a warm-up, in seconds. seconds: minimum total of the timed calls."""
    for _ in range(WARM_UP):
        work()
    backend.synchronize()
    times: list[float] = []
    while sum(times) < seconds:
        began = time.perf_counter()
        work()
        backend.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# operations -----------------------------------------------------------------------------------------------------------


def peak_gflops(experiment: Experiment) -> float:
    """Return the GFLOP/s of a large matrix product in the run's precision, on one core or one GPU."""
    from cupynet.backend import blas

    with blas.Limit(1):
        backend = experiment.model().backend
        backend.synchronize()  # the model was created on another stream
        backend.activate()
        a, b = (backend.allocate((LARGE, LARGE), backend.policy.storage) for _ in range(2))
        a[...], b[...] = 0.5, 0.25
        a, b, out = backend._operand(a), backend._operand(b), backend.allocate(a.shape, backend.policy.compute)
        seconds = timed(lambda: backend._gemm(a, b, out), backend, 1.5)
    return 2 * LARGE**3 / seconds / 1e9


def operations(experiment: Experiment, peak_gflops: float) -> list[Row]:
    """Profile the training step of one worker on a batch in memory. Return its operations, slowest first."""

    def task(trainer: Trainer) -> list[Row]:
        replica, step = trainer.replica, training_step(experiment, trainer)
        trainer.replica.launch_singly(True)
        for _ in range(WARM_UP):
            step()
        timer = Timer(replica.backend, trainer.statistics.clock, trainer.model)
        for _ in range(PROFILED):
            step()
        timer.end()
        pieces: list[Row] = profile.table([("", timer.spans)], 0, PROFILED)["pieces"]
        layers = {layer.path: layer for layer in trainer.model.network.walk()}
        return [operation(piece, layers.get(piece["name"].partition("+")[0])) for piece in pieces]

    def operation(piece: Row, layer: Layer | None) -> Row:
        name, kind = piece["name"], piece["kind"]
        row = {"operation": f"{name} {kind}" if kind in ("forward", "backward") else name, "ms": piece["mean_ms"]}
        if layer is not None and layer.multiply_adds():  # backward: weight gradients, and input gradients if needed
            times = 1 + layer.needs_dx if kind == "backward" else 1
            row["mflop"] = 2e-6 * times * layer.multiply_adds() * experiment.settings.batch_size
            row["gflop_per_s"] = row["mflop"] / row["ms"]
            row["share_of_ceiling"] = row["gflop_per_s"] / peak_gflops
        return row

    options = replace(experiment.options, workers=1, blas_threads=1)
    with experiment.wrapper(callbacks=(), options=options) as wrapper:
        return wrapper.on_workers(task) or []


# the step and the loop ------------------------------------------------------------------------------------------------


def step_images_per_s(experiment: Experiment, workers: int, seconds: float = 2.0) -> float:
    """Return the images per second of all workers together: median steps on a batch in memory, without averaging."""

    def task(trainer: Trainer) -> float:
        replica = trainer.replica
        step = training_step(experiment, trainer)
        rate = experiment.settings.batch_size / timed(step, replica.backend, seconds)
        replica.complete()
        if isinstance(replica, GraphReplica) and replica.graphs.refused:
            raise ConfigError(f"the training step cannot be captured as a CUDA graph: {replica.graphs.refused}")
        return float(trainer.world.gather_numbers(rate).sum())

    options = replace(experiment.options, workers=workers, blas_threads=1)
    with experiment.wrapper(callbacks=(), options=options) as wrapper:
        return wrapper.on_workers(task) or 0.0


def training_step(experiment: Experiment, trainer: Trainer) -> Callable[[], None]:
    """Return a function that runs one step of the training loop on a batch of random images in memory."""
    replica, iterations = trainer.replica, itertools.count()
    backend, size, rng = replica.backend, experiment.settings.batch_size, np.random.default_rng(1)
    pixels = rng.integers(0, 256, (size, *experiment.source.image_shape)).astype(np.uint8)
    labels = backend.asarray(rng.integers(0, experiment.source.classes, size))
    samples = np.arange(size)
    images = backend.load_images(pixels, samples)
    batch = Batch(index=0, epoch=0, images=images, labels=labels, samples=samples, steady=True)
    replica.optimizer.learning_rate.begin_fit(0, 10**6, epoch=10**6, epochs=1)
    replica.begin(lambda iteration: batch, 10**6)  # lets the host run ahead of a GPU
    measure = trainer.statistics.clock.measure

    def step() -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # may diverge, because the batch is always the same
            with measure("compute", "forward and backward"):
                gradient = replica.gradient(batch)
                check_finite(replica, gradient)
            with measure("compute", "update"):
                replica.update(next(iterations), gradient)

    return step


def loop_images_per_s(experiment: Experiment, options: TrainingOptions, data: Data, images: int) -> float:
    """Return images per second of the training loop, including loading, averaging and logging."""
    epochs = -(-images // len(data.train))
    with (
        tempfile.TemporaryDirectory() as folder,
        experiment.wrapper([HistoryWriter()], Run(folder), options) as wrapper,
    ):
        wrapper.fit(experiment.train_loader(data), epochs=epochs)
        return wrapper.trainer.statistics.clock.images_per_s


# PyTorch --------------------------------------------------------------------------------------------------------------


def torch_network(experiment: Experiment) -> str:
    """Return the source code of the equivalent PyTorch module (`torch_source`). Raise ConfigError if there is none."""
    model, optimizer = experiment.model(), type(experiment.optimizer).__name__
    if optimizer not in OPTIMIZERS or type(model.loss) is not SoftmaxNLL:
        raise ConfigError(
            f"PyTorch can be measured only with softmax cross-entropy and one of {', '.join(OPTIMIZERS)}, not with "
            f"{type(model.loss).__name__} and {optimizer}",
            setting="peers",
            value="torch",
        )
    return torch_source(model)


def torch_images_per_s(experiment: Experiment, *options: object) -> float:
    """Run `torch_peer` with these options, and return its images per second. Raise ConfigError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "network.py"
        write_whole(network, torch_network(experiment).encode())
        options = ("--network", network, "--optimizer", type(experiment.optimizer).__name__, *options)
        options = ("--batch", experiment.settings.batch_size, *options)
        command = [sys.executable, "-m", "cupynet.bench.torch_peer", *map(str, options)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PEER_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"PyTorch did not finish within {PEER_S} s", "peers", "torch") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"  # no output if killed
        raise ConfigError(f"the PyTorch measurement failed: {reason}", "peers", "torch")
    return float(done.stdout)
