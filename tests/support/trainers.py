"""Trainers for workers on threads, and the buffers that they have borrowed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cupynet.backend import Workspace, create_backend, device_count
from cupynet.data import Loader
from cupynet.nn import Model
from cupynet.optim import Optimizer
from cupynet.parallel import Communicator, Groups, Synchronizer
from cupynet.runs.checkpoints import Checkpoints
from cupynet.training import Callback, Checkpoint, ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.training import Recorder, on_threads, small_dataset, small_network

C = TypeVar("C", bound=Callback)
# rows of a history that differ between equal runs; a resumed fit sends its weights once more
TIMES = ("images_per_s", "compute_s", "data_s", "averaging_s", "waiting_s", "train_s", "bytes_sent")


def trainer_of(
    communicator: Communicator, replica: Replica, synchronizer: Synchronizer, *callbacks: Callback, **options: Any
) -> Trainer:
    """Return a worker's trainer with its own copy of the synchronizer."""
    own = copy.deepcopy(synchronizer)
    return Trainer(replica, groups=Groups.of(communicator), synchronizer=own, callbacks=callbacks, **options)


def fit_on_threads(
    workers: int,
    replica: Callable[[Communicator], Replica],
    synchronizer: Synchronizer,
    loader: Loader,
    *callbacks: Callback,
    epochs: int = 1,
    evaluate_on: Loader | None = None,
    **options: Any,
) -> list[Trainer]:
    """Train on threads with their own replica, synchronizer and callbacks, and return the trainers in rank order."""

    def task(communicator: Communicator) -> Trainer:
        trainer = trainer_of(communicator, replica(communicator), synchronizer, *copy.deepcopy(callbacks), **options)
        trainer.fit(Fit(loader, epochs, evaluate_on))
        return trainer

    return on_threads(workers, task)


def callback_of(trainer: Trainer, kind: type[C]) -> C:
    return next(each for each in trainer.callbacks if isinstance(each, kind))


@dataclass
class Trained:
    trainers: list[Trainer]

    @property
    def recorders(self) -> list[Recorder]:
        return [callback_of(trainer, Recorder) for trainer in self.trainers]

    @property
    def master(self) -> np.ndarray:
        model = self.trainers[0].model
        return np.array(model.backend.to_host(model.params.master))


def train(
    workers: int,
    optimizer: Optimizer,
    synchronizer: Synchronizer,
    *,
    samples: int = 60,
    batch_size: int = 4,
    epochs: int = 1,
    dtype: str = "double",
    backend: str = "numpy",
) -> Trained:
    """Train the small network with `workers` threads, which take devices in turn."""

    def replica(communicator: Communicator) -> Replica:
        own = create_backend(backend, dtype, communicator.rank % (device_count(backend) or 1))
        own.activate()
        communicator.attach(own)
        return Replica(Model(small_network(), (8, 8, 1), own, seed=1), copy.deepcopy(optimizer))

    data = small_dataset(samples)
    options: dict[str, Any] = {"evaluate_on": Loader(data, 20, shuffle=False), "prefetch_buffer": 2, "log_every": 2}
    loader = Loader(data, batch_size, seed=3)
    return Trained(fit_on_threads(workers, replica, synchronizer, loader, Recorder(), epochs=epochs, **options))


def fitted(
    model: Model, data: Any, workers: int = 1, *, epochs: int = 1, batch_size: int | None = None, **options: Any
) -> Model:
    """Train a model on any single argument of `ParallelWrapper.fit`, and return it."""
    with ParallelWrapper(model, workers, **options) as wrapper:
        wrapper.fit(data, epochs=epochs, batch_size=batch_size)
    return model


def assert_resumes(
    wrapper_of: Callable[..., ParallelWrapper], iteration: int, folder: Path, loader: Loader, **fit: Any
) -> None:
    """Train two epochs without interruption, and again from an iteration's checkpoint. Compare both bit for bit."""
    with wrapper_of(Checkpoint(every_iterations=iteration, keep_last=99, path=folder)) as whole:
        whole.fit(loader, epochs=2, **fit)
    with wrapper_of() as rest:
        rest.restore(Checkpoints(folder).path(iteration))
        assert rest.trainer.iteration == iteration
        rest.fit(loader, epochs=2 - rest.trainer.epoch, **fit)
    np.testing.assert_equal(rest.model.weights(), whole.model.weights())
    for found, expected in ((rest.history.epochs, whole.history.epochs), (rest.history.reports, whole.history.reports)):
        assert {**found, **dict.fromkeys(TIMES)} == {**expected, **dict.fromkeys(TIMES)}


def workspaces(wrapper: ParallelWrapper) -> list[Workspace]:
    found: dict[int, Workspace] = {}
    wrapper.on_workers(lambda trainer: found.update({trainer.rank: trainer.backend.workspace}))
    return [found[rank] for rank in sorted(found)]


def on_loan(wrapper: ParallelWrapper) -> list[int]:
    """Return the number of buffers that each worker has on loan, in rank order: zeros between tasks."""
    return [workspace.on_loan for workspace in workspaces(wrapper)]
