"""Small networks and data sets, and helpers that train them with any number of workers."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from cupynet import parallel
from cupynet.backend import Backend, create_backend
from cupynet.data import Dataset
from cupynet.nn import Backward, Context, Conv2D, Dense, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.nn.layer import no_backward
from cupynet.optim import Optimizer
from cupynet.parallel import Communicator, ElasticAveraging, GradientSharing, ParameterAveraging, Synchronizer
from cupynet.training import Callback, EpochRecord, IterationRecord, Replica, StopReason, Trainer
from tests.support.backends import WORKING


def on_backends(*names: str) -> pytest.MarkDecorator:
    """Parametrize `backend`; "cupy" is the stand-in, and GPUs if there are any."""
    return pytest.mark.parametrize("backend", [each for each in WORKING if each.values[0] in names])


def small_dataset(samples: int, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    labels = np.arange(samples, dtype=np.int64) % 3
    images = rng.integers(0, 120, (samples, 8, 8, 1)).astype(np.uint8)
    images[np.arange(samples), labels * 2] += 100  # a bright row encodes the class
    return Dataset("bright rows", images, labels, 3)


def numbered_dataset(samples: int) -> Dataset:
    images = (np.arange(samples * 4) % 251).astype(np.uint8).reshape(samples, 2, 2, 1)
    return Dataset("numbered", images, np.arange(samples) % 10, 10)


def small_network() -> Sequential:
    return Sequential({"conv1": Conv2D(3, 3), "pool1": MaxPool2D(2), "dense1": Dense(8, "relu"), "output": Dense(3)})


def small_model(dtype: str = "double", backend: str = "numpy", seed: int = 1) -> Model:
    return Model(small_network(), Image(8, 8, 1), create_backend(backend, dtype), seed)


def fingerprint(model: Model) -> str:
    return hashlib.sha256(model.backend.to_host(model.params.master).tobytes()).hexdigest()


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 1e-10) -> None:
    """Compare weights by name. The tolerance is relative to each weight's largest entry if that exceeds 1."""
    for name, weight in expected.items():
        bound = tolerance * max(1.0, float(np.abs(weight).max()))
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=bound, err_msg=name)


def stripes(count: int) -> Dataset:
    """Return images of 8 x 8 pixels in which a bright stripe encodes the class."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, count)
    pixels = rng.integers(0, 100, (count, 8, 8, 1)) + 70 * (np.arange(8) // 3 == labels[:, None])[:, :, None, None]
    return Dataset("stripes", pixels.astype(np.uint8), labels, 3)


def stripes_network() -> Sequential:
    return Sequential([Conv2D(3, 3, activation="relu"), MaxPool2D(2), Dense(12, activation="relu"), Dense(3)])


class Identity(Layer):
    """Returns its input. Base class of layers that fail, wait or record something."""

    capturable = True

    def build(self, input: Any, params: Any, backend: Backend) -> Any:
        return input

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        return x, lambda dy: dy


class Poisoned(Identity):
    """The identity, except that the outputs of some samples are NaN, or their gradients infinite."""

    capturable = False

    def __init__(self, *samples: int, backwards: bool = False) -> None:
        self.samples, self.backwards = samples, backwards

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y = x.copy()
        bad = np.flatnonzero(np.isin(() if context.samples is None else context.samples, self.samples))
        if not self.backwards:
            y[bad] = np.nan

        def backward(dy: Any) -> Any:
            if self.backwards:
                dy[bad] = np.inf
            return dy

        return y, backward if context.train else no_backward


def network_with(layer: Layer, dtype: str = "double") -> Model:
    """Return the small model with `layer`, named `poisoned`, before its output layer."""
    layers = {"conv1": Conv2D(3, 3), "pool1": MaxPool2D(2), "dense1": Dense(8, "relu")}
    return Model({**layers, "poisoned": layer, "output": Dense(3)}, (8, 8, 1), "numpy", 1, dtype=dtype)


class Recorder(Callback):
    """Records reports and epochs on every worker."""

    every_rank = True

    def __init__(self) -> None:
        self.reports: list[IterationRecord] = []
        self.epochs: list[EpochRecord] = []

    def on_log(self, trainer: Trainer, report: IterationRecord) -> None:
        self.reports.append(report)

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self.epochs.append(record)


class Seen(Callback):
    """Records a function's result, by default a fingerprint, after each iteration and epoch, on every worker."""

    every_rank = True

    def __init__(self, find: Callable[[Trainer], Any] | None = None) -> None:
        self.find = find or (lambda trainer: fingerprint(trainer.model))
        self.iterations: list[Any] = []
        self.epochs: list[Any] = []

    def on_iteration_end(self, trainer: Trainer) -> None:
        self.iterations.append(self.find(trainer))

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self.epochs.append(self.find(trainer))


class At(Callback):
    """Calls a function after a given iteration of the whole training, on one worker, after the other callbacks."""

    last = True

    def __init__(self, iteration: int, work: Callable[[], object], rank: int = 0) -> None:
        self.iteration, self.work, self.rank = iteration, work, rank
        self.every_rank = rank > 0

    def on_iteration_end(self, trainer: Trainer) -> None:
        if (trainer.iteration, trainer.rank) == (self.iteration, self.rank):
            self.work()


class On(Callback):
    """Calls a function, shared by all workers, with the arguments of one event, the trainer first."""

    def __init__(
        self, event: str, work: Callable[..., object], *, every_rank: bool = False, last: bool = False
    ) -> None:
        self.every_rank, self.last = every_rank, last
        setattr(self, event, work)


class StopAfter(Callback):
    """Requests a stop after a given iteration of the whole training, on one worker."""

    def __init__(
        self, iteration: int, rank: int = 0, text: str = "enough", reason: StopReason = StopReason.REQUEST
    ) -> None:
        self.iteration, self.rank, self.text, self.reason = iteration, rank, text, reason
        self.every_rank = rank > 0

    def on_iteration_end(self, trainer: Trainer) -> None:
        if (trainer.iteration, trainer.rank) == (self.iteration, self.rank):
            trainer.stop(self.text, self.reason)


def on_threads(workers: int, task: Callable[[Communicator], Any]) -> list[Any]:
    """Run `task(communicator)` on threads and return its results in rank order."""
    results: list[Any] = [None] * workers

    def keep(communicator: Communicator) -> None:
        results[communicator.rank] = task(communicator)

    with parallel.ThreadLauncher(workers, timeout_s=60) as launcher:
        launcher.run(keep)
    return results


def alone(model: Model, optimizer: Optimizer, **options: Any) -> Trainer:
    """Return a trainer without any parallel code."""
    return Trainer(Replica(model, optimizer), **options)


# All synchronizers, with the arguments that a configuration may give them. Each worker needs a copy.
WAYS: dict[str, Synchronizer] = {
    "every 3": ParameterAveraging(3),
    "weights every 4": ParameterAveraging(4, average_updaters=False),
    "end": ParameterAveraging("end"),
    "half": ParameterAveraging(3, transfer_dtype="half"),
    "post-local": ParameterAveraging(parallel.PostLocal(1, 3)),
    "adaptive": ParameterAveraging(parallel.Adaptive(0.02, 1, 4)),
    "slowmo": ParameterAveraging(3, outer_optimizer=parallel.SlowMo(0.9, 0.5)),
    "diloco": ParameterAveraging(3, outer_optimizer="diloco"),
    "diloco, half": ParameterAveraging("epoch", outer_optimizer=parallel.DiLoCo(0.8, 0.3), transfer_dtype="half"),
    "elastic": ElasticAveraging(2),
    "elastic, half": ElasticAveraging(3, 0.1, transfer_dtype="half", average_updaters=False),
    "gradients": GradientSharing(),
    "gradients, half": GradientSharing(transfer_dtype="half", score_every=3),
    "gradients, sum": GradientSharing(reduce="sum"),
    "threshold": GradientSharing("threshold", score_every=1),
    "threshold, fixed": GradientSharing(parallel.ThresholdEncoding(parallel.FixedThreshold(0.01), 2), reduce="sum"),
    "threshold, target": GradientSharing(parallel.ThresholdEncoding(parallel.TargetSparsity(0.05, 0.01))),
}

# One synchronizer of each kind.
KINDS_OF_WAYS = {name: WAYS[name] for name in ("every 3", "diloco, half", "elastic", "gradients, half", "threshold")}
