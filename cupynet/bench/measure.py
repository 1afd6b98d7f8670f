"""Measurements of training on this machine, shared by `cupynet bench` and `cupynet plan`.

On a shared machine only ratios within one run are meaningful.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from cupynet.bench.torch_peer import OPTIMIZERS
from cupynet.core.errors import ConfigError
from cupynet.core.files import write_whole
from cupynet.data import Batch, Data
from cupynet.interop import torch_source
from cupynet.nn import INFERENCE, Context, Layer, Model, Sequential, SoftmaxNLL
from cupynet.runs.run import Run
from cupynet.training import GraphReplica, History, Replica, Trainer

if TYPE_CHECKING:
    from cupynet.backend import Backend
    from cupynet.config.experiment import Experiment

Row: TypeAlias = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)
LARGE = 2048  # rows and columns of the product that sets the ceiling
WARM_UP = 3  # untimed calls
PEER_S = 300  # timeout of one measurement of PyTorch, including its start


def medians(measurements: Mapping[Key, Callable[[], float]], repeats: int) -> dict[Key, float]:
    """Return the median of each measurement. They alternate, so that drift of the machine affects all of them."""
    rounds = [{name: measure() for name, measure in measurements.items()} for _ in range(repeats)]
    return {name: statistics.median(each[name] for each in rounds) for name in measurements}


def resident_batch(experiment: Experiment, backend: Backend) -> Batch:
    """Return a batch of random images on the device."""
    size, rng = experiment.settings.batch_size, np.random.default_rng(1)
    samples = np.arange(size)
    images = rng.integers(0, 256, (size, *experiment.source.image_shape)).astype(np.uint8)
    labels = backend.asarray(rng.integers(0, experiment.source.classes, size))
    loaded = backend.load_images(images, samples)
    return Batch(index=0, epoch=0, images=loaded, labels=labels, samples=samples, steady=True)


# operations -----------------------------------------------------------------------------------------------------------


def timed(backend: Backend, *works: Callable[[], Any], at_least_s: float = 0.4) -> list[float]:
    """Return the median milliseconds of each function when they are called in turn, after a warm-up."""
    backend.synchronize()
    times: list[list[float]] = []
    while len(times) < WARM_UP + 5 or sum(map(sum, times[WARM_UP:])) < 1e3 * at_least_s:
        times.append([])
        for work in works:
            began = time.perf_counter()
            work()
            backend.synchronize()
            times[-1].append(1e3 * (time.perf_counter() - began))
    return [statistics.median(each) for each in zip(*times[WARM_UP:], strict=True)]


def ceiling(experiment: Experiment) -> float:
    """Return the GFLOP/s of a large product in the run's precision, on one core."""
    from cupynet.backend import blas

    with blas.Limit(1):
        backend = experiment.model().backend
        backend.synchronize()  # the model was made on another stream
        backend.activate()
        a, b, out = (backend.allocate((LARGE, LARGE), backend.policy.compute) for _ in range(3))
        a[...], b[...] = 0.5, 0.25
        (ms,) = timed(backend, lambda: backend._gemm(a, b, out), at_least_s=1.5)
    return 2 * LARGE**3 / ms / 1e6


def operations(experiment: Experiment, ceiling: float) -> list[Row]:
    """Measure each step of the network, the loss, the update and the loading of a batch, on one core."""
    from cupynet.backend import blas

    with blas.Limit(1):
        model, optimizer = experiment.model(), copy.deepcopy(experiment.optimizer)
        backend = model.backend
        backend.synchronize()  # the model was made on another stream
        backend.activate()
        batch, rows = resident_batch(experiment, backend), []
        x = batch.images
        for name, layer in network_steps(model):
            found, x = layer_rows(backend, name, layer, x)
            rows += found
        optimizer.init(model.params, backend)
        optimizer.learning_rate.span(0, 2, epoch=2, epochs=1)
        pixels = np.zeros((len(batch), *experiment.source.image_shape), np.uint8)
        works: dict[str, Callable[[], Any]] = {
            "loss": lambda: backend.give_back(model.loss(backend, x, batch.labels)[1]),
            "update": lambda: optimizer.step(model.params, 0),
            "load batch": lambda: backend.load_images(pixels, batch.samples),
        }
        rows += [{"operation": name, "ms": timed(backend, work)[0]} for name, work in works.items()]
    for row in rows:
        if "mflop" in row:
            row["gflop_per_s"] = row["mflop"] / row["ms"]
            row["share_of_ceiling"] = row["gflop_per_s"] / ceiling
    return rows


def network_steps(model: Model) -> list[tuple[str, Layer]]:
    """Return the steps of a forward pass, each with the names of its layers: a fused step has several."""
    network = model.network
    if not isinstance(network, Sequential):
        return [("network", network)]
    return [(" + ".join(names), step) for names, step in network.steps]


def layer_rows(backend: Backend, name: str, layer: Layer, x: Any) -> tuple[list[Row], Any]:
    """Return the times of a layer's forward and backward pass, and its output."""
    training, held = Context(train=True), []
    y, _ = layer.forward(x, INFERENCE)
    gradient = backend.allocate(y.shape, y.dtype)
    gradient[...] = 1e-3

    def forward() -> None:
        held.append(layer.forward(x, training))

    def backward() -> None:
        output, backward = held.pop()
        dy = backend.borrow(output.shape)
        dy[...] = gradient
        backend.give_back(backward(dy))

    rows: list[Row] = [
        {"operation": f"{name} {way.__name__}", "ms": ms}
        for way, ms in zip((forward, backward), timed(backend, forward, backward, at_least_s=0.8), strict=True)
    ]
    products = [2e-6 * len(x) * each.multiply_adds() for each in layer.walk()]
    if any(products):  # backward: as much for the weights, and again for the input if dx is needed
        needs_dx = [each.needs_dx for each in layer.walk()]
        rows[0]["mflop"] = sum(products)
        rows[1]["mflop"] = sum(mflop * (1 + dx) for mflop, dx in zip(products, needs_dx, strict=True))
    return rows, y


# the step and the loop ------------------------------------------------------------------------------------------------


def step_images_per_s(experiment: Experiment, workers: int, seconds: float = 2.0) -> float:
    """Return images per second of the training step, from each worker's median step.

    All workers train at once: resident data, no averaging, one BLAS thread each.
    """

    def task(trainer: Trainer) -> float:
        replica, world = trainer.replica, trainer.groups.world
        replica.optimizer.learning_rate.span(0, 10**6, epoch=10**6, epochs=1)
        batch, times = resident_batch(experiment, replica.backend), list[float]()
        replica.begin(run_ahead=True)  # as in training without averages
        with np.errstate(over="ignore", invalid="ignore"):  # always the same batch: it may diverge
            for number in range(WARM_UP):
                one_step(replica, batch, number)
            replica.backend.synchronize()
            world.barrier()
            while sum(times) < seconds:
                began = time.perf_counter()
                one_step(replica, batch, WARM_UP + len(times))
                replica.backend.synchronize()
                times.append(time.perf_counter() - began)
        replica.settle()
        if isinstance(replica, GraphReplica) and replica.refused:
            raise ConfigError(f"{replica.refused}: the step cannot be captured as a graph")
        rates = world.gather_numbers(experiment.settings.batch_size / statistics.median(times))
        return float(rates.sum())

    with experiment.wrapper(callbacks=(), workers=workers, blas_threads=1) as wrapper:
        rate = wrapper.on_workers(task)
    assert rate is not None
    return rate


def one_step(replica: Replica, batch: Batch, number: int) -> None:
    """Make one training step, as the training loop does."""
    step = replica.gradient(batch)
    replica.update(number, step.squared_norm)


def loop_images_per_s(experiment: Experiment, data: Data, workers: int, images: int, **changes: Any) -> float:
    """Return images per second of the whole loop, with loading, averaging and logging.

    changes: arguments of the wrapper that replace those of the experiment.
    """
    epochs = -(-images // len(data.train))
    with (
        tempfile.TemporaryDirectory() as folder,
        experiment.wrapper(Run(folder), [History()], workers=workers, **changes) as wrapper,
    ):
        wrapper.fit(experiment.train_loader(data), epochs)
        return wrapper.trainer.statistics.clock.images_per_s


# PyTorch --------------------------------------------------------------------------------------------------------------


def torch_network(experiment: Experiment) -> str:
    """Return the source of the PyTorch module to measure: see `torch_source`.

    Raises:
        ConfigError: a layer, the loss or the optimizer has no equivalent.
    """
    model, optimizer = experiment.model(), type(experiment.optimizer).__name__
    if optimizer not in OPTIMIZERS or type(model.loss) is not SoftmaxNLL:
        raise ConfigError(
            f"peers=torch: PyTorch is measured with softmax and cross-entropy and one of {', '.join(OPTIMIZERS)}, not "
            f"with {type(model.loss).__name__} and {optimizer}"
        )
    return torch_source(model)


def torch_images_per_s(experiment: Experiment, *options: object) -> float:
    """Return images per second of PyTorch's training step, measured in a process of its own. ConfigError.

    options: of `cupynet.bench.torch_peer`, besides the network, the optimizer and the batch size.
    """
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "network.py"
        write_whole(network, torch_network(experiment).encode())
        options = ("--network", network, "--optimizer", type(experiment.optimizer).__name__, *options)
        command = [
            sys.executable,
            "-m",
            "cupynet.bench.torch_peer",
            "--batch",
            experiment.settings.batch_size,
            *options,
        ]
        try:
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=PEER_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"peers=torch: PyTorch takes more than {PEER_S} s") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"it ended with status {done.returncode}"  # killed: silent
        raise ConfigError(f"peers=torch: PyTorch could not be measured: {reason}")
    return float(done.stdout)
