"""Measurements of training on this machine, shared by `cupynet bench` and `cupynet plan`.

On a shared machine only ratios within one run are meaningful. Whole runs are measured in their own processes, as users
start them.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cupynet import config
from cupynet.bench.torch_peer import OPTIMIZERS
from cupynet.config.schema import AS_RANKS, Settings
from cupynet.core.errors import ConfigError, CupynetError
from cupynet.core.files import write_whole
from cupynet.core.mpiexec import find_mpiexec
from cupynet.data import Batch, Data
from cupynet.data.augment import augmented
from cupynet.interop import torch_source
from cupynet.nn import INFERENCE, Context, Layer, Model, Sequential, SoftmaxNLL
from cupynet.parallel import parts
from cupynet.runs.run import Run
from cupynet.training import GraphReplica, History, Replica, Trainer

if TYPE_CHECKING:
    from cupynet.backend import Backend
    from cupynet.config.experiment import Experiment

Row: TypeAlias = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)
LARGE = 2048  # rows and columns of the product that sets the ceiling
PEER_S = 300  # timeout of one measurement of PyTorch, including its start


def timed(work: Callable[[], Any], backend: Backend, at_least_s: float = 0.4) -> float:
    """Return the median seconds of one `work()`, after a warm-up."""
    (seconds,) = timed_in_turn([work], backend, at_least_s)
    return seconds


def timed_in_turn(works: list[Callable[[], Any]], backend: Backend, at_least_s: float = 0.4) -> list[float]:
    """Return the median seconds of each function when they are called in turn, after a warm-up."""
    backend.synchronize()
    times: list[list[float]] = []
    while len(times) < 8 or sum(map(sum, times[3:])) < at_least_s:
        times.append([])
        for work in works:
            began = time.perf_counter()
            work()
            backend.synchronize()
            times[-1].append(time.perf_counter() - began)
    return [statistics.median(each) for each in zip(*times[3:], strict=True)]


def resident_batch(experiment: Experiment, backend: Backend, size: int | None = None) -> Batch:
    """Return a batch of random images on the device. size: by default that of the settings."""
    size, rng = size or experiment.settings.batch_size, np.random.default_rng(1)
    samples = np.arange(size)
    images = rng.integers(0, 256, (size, *experiment.source.image_shape)).astype(np.uint8)
    labels = backend.asarray(rng.integers(0, experiment.source.classes, size))
    loaded = backend.load_images(images, samples)
    return Batch(index=0, epoch=0, images=loaded, labels=labels, samples=samples, steady=True)


# the network ----------------------------------------------------------------------------------------------------------


def network_steps(model: Model) -> list[tuple[str, Layer, float]]:
    """Return the steps of a forward pass: names of its layers, the step, floating-point operations per image."""
    steps, network = [], model.network
    named = dict(network) if isinstance(network, Sequential) else {"network": network}
    for step in network.steps if isinstance(network, Sequential) else [network]:
        inside = [id(layer) for layer in step.walk()]
        names = [name for name, layer in named.items() if id(layer) in inside]
        steps.append((" + ".join(names), step, sum(2.0 * layer.multiply_adds() for layer in step.walk())))
    return steps


def passes(backend: Backend, layer: Layer, x: Any, at_least_s: float = 0.4) -> tuple[float, float, Any]:
    """Return the seconds of a layer's forward pass and of both passes, as in training, and its output for x."""
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

    seconds = timed_in_turn([forward, backward], backend, 2 * at_least_s)
    return seconds[0], sum(seconds), y


# operations -----------------------------------------------------------------------------------------------------------


def ceiling(experiment: Experiment) -> Row:
    """Return the GFLOP/s of a large product in the run's precision, on one core and on all."""
    from cupynet.backend import available_cores, blas

    backend = experiment.model().backend
    backend.synchronize()  # the model was made on another stream
    backend.activate()
    a, b, out = (backend.allocate((LARGE, LARGE), backend.policy.compute) for _ in range(3))
    a[...], b[...] = 0.5, 0.25
    found = {}
    for name, threads in (("one core", 1), ("all cores", available_cores())):
        with blas.Limit(threads):
            seconds = timed(lambda: backend._gemm(a, b, out), backend, 1.5)
        found[name] = 2 * LARGE**3 / seconds / 1e9
    return found


def operations(experiment: Experiment, one_core: float) -> list[Row]:
    """Measure each step of the network, the loss, the update and the loading of a batch, on one core.

    With gradient accumulation the network is measured on part of a batch, and its times are scaled to the whole batch.
    """
    from cupynet.backend import blas

    settings = experiment.settings
    size = max(part.stop - part.start for part in parts(settings.batch_size, settings.accumulate))
    times = settings.batch_size / size
    with blas.Limit(1):
        model, optimizer = experiment.model(), copy.deepcopy(experiment.optimizer)
        backend = model.backend
        backend.synchronize()  # the model was made on another stream
        backend.activate()
        batch, rows = resident_batch(experiment, backend, size), []
        x = batch.images
        for name, layer, flop in network_steps(model):
            found, x = layer_rows(backend, name, layer, x, flop * len(batch))
            rows += found
        loss = timed(lambda: backend.give_back(model.loss(backend, x, batch.labels)[1]), backend)
        rows.append({"operation": "loss", "ms": 1e3 * loss})
        rows = [{name: v if name == "operation" else times * v for name, v in row.items()} for row in rows]
        optimizer.init(model.params, backend)
        optimizer.learning_rate.span(0, 2, epoch=2, epochs=1)
        update = timed(lambda: optimizer.step(model.params, 0), backend)
        pixels = np.zeros((settings.batch_size, *experiment.source.image_shape), np.uint8)
        images = timed(lambda: backend.load_images(pixels, np.arange(len(pixels))), backend)
        for part in experiment.source.augment:
            seconds = timed(partial(augmented, [part], pixels, 0, 0, np.arange(len(pixels))), backend)
            rows.append({"operation": f"augment {type(part).__name__}", "ms": 1e3 * seconds})
    rows += [{"operation": name, "ms": 1e3 * s} for name, s in (("update", update), ("load batch", images))]
    for row in rows:
        if "mflop" in row:
            row["gflop_per_s"] = row["mflop"] / row["ms"]
            row["share_of_ceiling"] = row["gflop_per_s"] / one_core
    return rows


def layer_rows(backend: Backend, name: str, layer: Layer, x: Any, flop: float) -> tuple[list[Row], Any]:
    """Return the times of a layer's forward and backward pass, and its output."""
    forward, both, y = passes(backend, layer, x)
    rows: list[Row] = [
        {"operation": f"{name} forward", "ms": 1e3 * forward},
        {"operation": f"{name} backward", "ms": 1e3 * max(both - forward, 1e-9)},
    ]
    if flop:  # backward: as much for the weights, and again for the input if dx is needed
        both_ways = sum(2.0 * each.multiply_adds() * (1 + each.needs_dx) for each in layer.walk())
        rows[0]["mflop"], rows[1]["mflop"] = flop / 1e6, both_ways * len(x) / 1e6
    return rows, y


# the step and the loop ------------------------------------------------------------------------------------------------


def step_times(experiment: Experiment, workers: int, seconds: float = 2.0) -> NDArray[Any]:
    """Return (workers, 2): the mean and the median seconds of a training step.

    All workers train at once: resident data, no averaging, one BLAS thread each.
    """

    def task(trainer: Trainer) -> NDArray[Any]:
        replica, world = trainer.replica, trainer.groups.world
        replica.optimizer.learning_rate.span(0, 10**6, epoch=10**6, epochs=1)
        batch = resident_batch(experiment, replica.backend)
        times: list[float] = []
        replica.begin(run_ahead=True)  # as in training without averages
        with np.errstate(over="ignore", invalid="ignore"):  # always the same batch: it may diverge
            for number in range(3):
                one_step(replica, batch, number)
            replica.backend.synchronize()
            world.barrier()
            began = last = time.perf_counter()
            while last - began < seconds or not times:
                one_step(replica, batch, len(times) + 3)
                replica.backend.synchronize()
                now = time.perf_counter()
                times.append(now - last)
                last = now
        if isinstance(replica, GraphReplica) and replica.refused:
            raise ConfigError(f"{replica.refused}: the step cannot be captured as a graph")
        halted = (found := replica.settle()) is not None and found.halted is not None
        if any(world.gather_numbers(halted)[:, 0]):
            raise ConfigError("the training step is not finite: use a lower learning rate")
        return world.gather_numbers(statistics.fmean(times), statistics.median(times))

    with experiment.wrapper(callbacks=(), workers=workers, blas_threads=1) as wrapper:
        found = wrapper.on_workers(task)
    return np.zeros((workers, 2)) if found is None else found


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


def averaged_bytes(experiment: Experiment) -> int:
    """Return the bytes that are averaged: the weights and, if it is averaged too, the optimizer's state."""
    model, optimizer = experiment.model(), copy.deepcopy(experiment.optimizer)
    optimizer.init(model.params, model.backend)
    states = optimizer.state.values() if experiment.settings.parallel.average_updaters else ()
    return sum(int(vector.nbytes) for vector in (model.params.master, *states))


def medians(measurements: Mapping[Key, Callable[[], float]], repeats: int) -> dict[Key, float]:
    """Return the median of each measurement. They alternate, so that drift of the machine affects all of them."""
    found: dict[Key, list[float]] = {name: [] for name in measurements}
    for _ in range(repeats):
        for name, measured in measurements.items():
            found[name].append(measured())
    return {name: statistics.median(values) for name, values in found.items()}


# PyTorch --------------------------------------------------------------------------------------------------------------


def peer_network(experiment: Experiment) -> str:
    """Return the source of the PyTorch module to measure: see `torch_source`.

    Raises:
        ConfigError: a layer, the loss or the optimizer has no equivalent.
    """
    model, name = experiment.model(), type(experiment.optimizer).__name__
    if name not in OPTIMIZERS:
        raise ConfigError(f"peers=torch: PyTorch has no {name}: choose one of {', '.join(OPTIMIZERS)}, or peers=null")
    if type(model.loss) is not SoftmaxNLL:
        raise ConfigError(
            f"peers=torch: PyTorch is measured with softmax and cross-entropy, not with {type(model.loss).__name__}: "
            "leave out loss=, or peers=torch"
        )
    try:
        return torch_source(model)
    except ConfigError as error:
        raise ConfigError(f"peers=torch: {error}") from error


def peer_options(experiment: Experiment, network: str, folder: Path) -> list[object]:
    """Write the source of the PyTorch module to `folder`; return the options to measure it."""
    path, optimizer = folder / "network.py", type(experiment.optimizer).__name__
    write_whole(path, network.encode())
    return ["--network", path, "--optimizer", optimizer, "--batch", experiment.settings.batch_size]


def peer(*options: object) -> float:
    """Return PyTorch's images per second: see `peer_row`."""
    rate: float = peer_row(*options)["images_per_s"]
    return rate


def peer_row(*options: object) -> Row:
    """Return PyTorch's result and version, measured in a separate process. ConfigError.

    options: of `cupynet.bench.torch_peer`.
    """
    command = [sys.executable, "-m", "cupynet.bench.torch_peer", *map(str, options)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PEER_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"peers=torch: PyTorch could not be measured: it takes more than {PEER_S} s") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]  # killed: silent
        raise ConfigError(f"peers=torch: PyTorch could not be measured: {reason}")
    row: Row = json.loads(done.stdout)
    return row


# whole runs -----------------------------------------------------------------------------------------------------------


def without_ranks() -> str:
    """Return why nothing can be measured under mpiexec; "" if it can."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'cupynet[mpi]'"
    try:
        find_mpiexec()
    except ConfigError as error:
        return str(error)
    return ""


def run_images_per_s(overrides: Sequence[str], *, ranks: int = 0) -> float:
    """Return images per second of `cupynet train`, run in its own process.

    Args:
        ranks: of mpiexec; 0 for workers that are threads.

    Raises:
        CupynetError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [find_mpiexec(), "-n", str(ranks)] if ranks else []
        command += [sys.executable, "-m", "cupynet.train", *overrides, *([AS_RANKS] if ranks else [])]
        done = subprocess.run(
            [*command, f"hydra.run.dir={folder}/run"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            raise CupynetError(f"{' '.join(command)} ended with {done.returncode}: {last}")
        return Run(f"{folder}/run").summary().cost.images_per_s


def overrides(folder: Path, kind: type[Settings], *without: str) -> list[str]:
    """Return the overrides of a run from the command line of `bench` or `plan`.

    Args:
        folder: of the command's job.
        kind: the settings of the command.
        without: settings and groups that the run sets itself.
    """
    found = config.arguments_of(folder, kind, *without)
    if not any(each.startswith("data=") for each in found):
        found.insert(sum(each.startswith("--") for each in found), "data=synthetic")  # options come first
    return found
