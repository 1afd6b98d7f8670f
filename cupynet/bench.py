"""Measure: `python -m cupynet.bench [peers=torch] [key=value ...]`.

Each operation against the ceiling that a large product sets on this machine; the training step on resident data; the
whole loop as `cupynet.train` runs it; with `peers=torch` PyTorch on the tutorials' LeNet, in turn with the loop.
Nothing is asserted: figures are for reading, and on a machine that others use too only ratios within one run count.
Long, over 300 lines: one measurement after the other.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cupynet import config
from cupynet.errors import ConfigError
from cupynet.settings import BenchSettings

if TYPE_CHECKING:
    from cupynet.backend import Backend
    from cupynet.data import Batch, Data
    from cupynet.experiment import Experiment
    from cupynet.nn import Layer, Model
    from cupynet.training import Trainer

Row: TypeAlias = dict[str, Any]
LARGE = 2048  # rows and columns of the product that sets the ceiling


def main() -> None:
    """The command."""
    config.run(bench, prepare, "bench", BenchSettings)


@dataclass(frozen=True)
class Bench:
    """What is measured, and how."""

    settings: BenchSettings
    experiment: Experiment


def prepare(settings: BenchSettings) -> Bench:
    """Refuse what cannot work, before anything is measured; ConfigError."""
    from cupynet.experiment import Experiment

    if settings.parallel.launcher == "mpi":
        raise ConfigError("launcher=mpi: the bench measures threads of one process; leave it out")
    if settings.peers == "torch" and find_spec("torch") is None:
        raise ConfigError("peers=torch: PyTorch is not installed; install torch, or leave peers=null")
    return Bench(settings, Experiment(settings))


def bench(asked: Bench, folder: Path) -> None:
    """All measurements, as a table and as bench.json in `folder`."""
    from cupynet.backend.environment import commit, environment
    from cupynet.files import write_json

    experiment, settings = asked.experiment, asked.settings
    experiment.announce()
    result: Row = {"backend": experiment.backend_name, "dtype": settings.dtype, "batch_size": settings.batch_size}
    result["commit"], result["environment"] = commit(), environment()
    result["ceiling_gflop_per_s"] = ceiling(experiment)
    result["operations"] = operations(experiment, result["ceiling_gflop_per_s"]["one core"])
    result["images_per_s"] = loops(experiment, settings)
    result["ratios"] = ratios(experiment, result)
    write_json(folder / "bench.json", result)
    print("\n".join(table(result)))
    print(f"written to {folder / 'bench.json'}")


# operations -----------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], Any], backend: Backend, at_least_s: float = 0.4) -> float:
    """The median seconds of one `work()`, after a warm-up."""
    for _ in range(3):
        work()
    backend.synchronize()
    times: list[float] = []
    while sum(times) < at_least_s or len(times) < 5:
        began = time.perf_counter()
        work()
        backend.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def ceiling(experiment: Experiment) -> Row:
    """GFLOP/s of a large product in the run's precision, on one core and on all of them."""
    from cupynet.backend import available_cores, blas

    backend = experiment.model().backend
    backend.activate()
    a, b, out = (backend.allocate((LARGE, LARGE), backend.policy.compute) for _ in range(3))
    a[...], b[...] = 0.5, 0.25
    found = {}
    for name, threads in (("one core", 1), ("all cores", available_cores())):
        with blas.limited(threads):
            seconds = timed(lambda: backend.xp.matmul(a, b, out=out), backend, 1.5)
        found[name] = 2 * LARGE**3 / seconds / 1e9
    return found


def operations(experiment: Experiment, one_core: float) -> list[Row]:
    """Each step of the network forwards and backwards, the loss and the update, on one core."""
    import numpy as np

    from cupynet.backend import blas

    with blas.limited(1):
        model, optimizer = experiment.model(), copy.deepcopy(experiment.optimizer)
        backend = model.backend
        backend.activate()
        batch, rows = resident_batch(experiment, backend), []
        x = batch.images
        for name, layer, flop in network_steps(model):
            found, x = layer_rows(backend, name, layer, x, flop * len(batch))
            rows += found
        loss = timed(lambda: backend.give_back(model.loss(backend, x, batch.labels)[1]), backend)
        optimizer.init(model.params, backend)
        optimizer.learning_rate.span(0, 2)
        update = timed(lambda: optimizer.step(model.params, 0), backend)
        pixels = np.zeros((len(batch), *experiment.source.image_shape), np.uint8)
        images = timed(lambda: backend.load_images(pixels, batch.samples), backend)
    rows += [{"operation": n, "ms": 1e3 * s} for n, s in (("loss", loss), ("update", update), ("load batch", images))]
    for row in rows:
        if "mflop" in row:
            row["gflop_per_s"] = row["mflop"] / row["ms"]
            row["share_of_ceiling"] = row["gflop_per_s"] / one_core
    return rows


def resident_batch(experiment: Experiment, backend: Backend) -> Batch:
    """One batch of random images on the device."""
    import numpy as np

    from cupynet.data import Batch

    size, rng = experiment.settings.batch_size, np.random.default_rng(1)
    samples = np.arange(size)
    images = rng.integers(0, 256, (size, *experiment.source.image_shape)).astype(np.uint8)
    labels = backend.asarray(rng.integers(0, experiment.source.classes, size))
    loaded = backend.load_images(images, samples)
    return Batch(index=0, epoch=0, images=loaded, labels=labels, samples=samples)


def network_steps(model: Model) -> list[tuple[str, Layer, float]]:
    """The steps of a forward pass: names of its layers, the step, its floating-point operations per image."""
    from cupynet.nn import Sequential

    steps, network = [], model.network
    named = dict(network) if isinstance(network, Sequential) else {"network": network}
    for step in network.steps if isinstance(network, Sequential) else [network]:
        inside = [id(layer) for layer in step.walk()]
        names = [name for name, layer in named.items() if id(layer) in inside]
        steps.append((" + ".join(names), step, sum(2.0 * layer.multiply_adds() for layer in step.walk())))
    return steps


def layer_rows(backend: Backend, name: str, layer: Layer, x: Any, flop: float) -> tuple[list[Row], Any]:
    """The time of a layer forwards, and backwards (both passes less the forward one); and its output."""
    from cupynet.nn import INFERENCE, Context

    training = Context(train=True)
    y, _ = layer.forward(x, INFERENCE)
    gradient = backend.allocate(y.shape, y.dtype)
    gradient[...] = 1e-3

    def both() -> None:
        output, backward = layer.forward(x, training)
        dy = backend.borrow(output.shape)
        dy[...] = gradient
        backend.give_back(backward(dy))

    forward = timed(lambda: backend.give_back(layer.forward(x, INFERENCE)[0]), backend)
    backward = max(timed(both, backend) - forward, 1e-9)
    rows: list[Row] = [
        {"operation": f"{name} forward", "ms": 1e3 * forward},
        {"operation": f"{name} backward", "ms": 1e3 * backward},
    ]
    if flop:  # backwards: as much for the weights, and again for the input where dx is needed
        both_ways = sum(2.0 * each.multiply_adds() * (1 + each.needs_dx) for each in layer.walk())
        rows[0]["mflop"], rows[1]["mflop"] = flop / 1e6, both_ways * len(x) / 1e6
    return rows, y


# the loop -------------------------------------------------------------------------------------------------------------


def loops(experiment: Experiment, settings: BenchSettings) -> Row:
    """Images per second of the loop, of the bare step, and of the peers: medians of measurements in turn."""
    data, cores = experiment.load(), experiment.placement.workers
    measurements: dict[str, Callable[[], float]] = {}
    for workers in sorted({1, cores}):
        measurements[f"loop, workers={workers}"] = partial(loop, experiment, data, workers, settings.images)
        measurements[f"bare step, workers={workers}"] = partial(bare_steps, experiment, workers)
        if settings.peers == "torch":
            for layout in ("channels_last", "contiguous"):
                name = f"torch {layout}, threads={workers}"
                measurements[name] = partial(peer, workers, layout, settings.batch_size)
    found: dict[str, list[float]] = {name: [] for name in measurements}
    for _ in range(settings.repeats):
        for name, measure in measurements.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


def loop(experiment: Experiment, data: Data, workers: int, images: int) -> float:
    """Training as `cupynet.train` does it: loading, prefetching, averaging, logging; one BLAS thread per worker."""
    import tempfile

    from cupynet.runs import Run
    from cupynet.training import History

    epochs = -(-images // len(data.train))
    with (
        tempfile.TemporaryDirectory() as folder,
        experiment.wrapper(Run(folder), [History()], workers=workers, blas_threads=1) as wrapper,
    ):
        wrapper.fit(experiment.train_loader(data), epochs)
        return wrapper.trainer.clock.images_per_s


def bare_steps(experiment: Experiment, workers: int, seconds: float = 2.0) -> float:
    """The training step alone, on resident data and without averaging, of `workers` replicas at once."""

    def task(trainer: Trainer) -> float:
        replica, world = trainer.replica, trainer.groups.world
        replica.optimizer.learning_rate.span(0, 10**6)
        batch = resident_batch(experiment, replica.backend)
        for step in range(3):
            replica.gradient(batch)
            replica.update(step)
        world.barrier()
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            replica.gradient(batch)
            replica.update(steps)
            replica.backend.synchronize()
            steps += 1
        rate = steps * len(batch) / (time.perf_counter() - began)
        return float(world.gather_numbers(rate).sum())

    with experiment.wrapper(callbacks=(), workers=workers, blas_threads=1) as wrapper:
        return wrapper.on_workers(task) or 0.0


def peer(threads: int, layout: str, batch_size: int) -> float:
    """PyTorch's images per second, in a process of its own."""
    command = [sys.executable, "-m", "cupynet.peer", "--threads", str(threads), "--layout", layout]
    done = subprocess.run([*command, "--batch", str(batch_size)], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]  # killed: silent
        raise ConfigError(f"peers=torch: PyTorch could not be measured: {reason}")
    rate: float = json.loads(done.stdout)["images_per_s"]
    return rate


# the result -----------------------------------------------------------------------------------------------------------


def ratios(experiment: Experiment, result: Row) -> Row:
    """The figures that mean something on any machine."""
    rates, workers, found = result["images_per_s"], experiment.placement.workers, {}
    mflop = sum(row.get("mflop", 0.0) for row in result["operations"]) / result["batch_size"]
    best = rates[f"loop, workers={workers}"]
    dense = best * mflop / 1e3
    found["loop as dense arithmetic / ceiling of all cores"] = dense / result["ceiling_gflop_per_s"]["all cores"]
    found[f"loop, workers={workers} / bare step"] = best / rates[f"bare step, workers={workers}"]
    if workers > 1:
        found[f"loop, workers={workers} / workers=1"] = best / rates["loop, workers=1"]
    for name, rate in rates.items():
        if name.startswith("torch"):
            own = f"loop, workers={name.rpartition('=')[2]}"
            found[f"{own} / {name}"] = rates[own] / rate
    return found


def table(result: Row) -> list[str]:
    """The result in lines."""
    lines = [
        f"{'product of 2048 x 2048, ' + name:<48}{rate:>10,.0f} GFLOP/s"
        for name, rate in result["ceiling_gflop_per_s"].items()
    ]
    lines += ["", f"{'one core, batch of ' + str(result['batch_size']):<48}{'ms':>10}{'GFLOP/s':>10}{'ceiling':>10}"]
    for row in result["operations"]:
        arithmetic = f"{row['gflop_per_s']:>10.0f}{row['share_of_ceiling']:>10.0%}" if "mflop" in row else ""
        lines.append(f"{row['operation']:<48}{row['ms']:>10.3f}{arithmetic}")
    total = sum(row["ms"] for row in result["operations"])
    lines += [f"{'sum':<48}{total:>10.3f}", "", f"{'':<48}{'images/s':>10}"]
    lines += [f"{name:<48}{rate:>10,.0f}" for name, rate in result["images_per_s"].items()]
    lines += ["", *(f"{name:<60}{ratio:>8.2f}" for name, ratio in result["ratios"].items())]
    return lines


if __name__ == "__main__":
    main()
