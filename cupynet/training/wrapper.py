"""Training in parallel replicas, as an object: the successor of Deeplearning4j's ParallelWrapper."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from cupynet.backend import Backend, create_backend
from cupynet.backend.blas import threads_per_worker
from cupynet.checks import instance
from cupynet.data import Loader
from cupynet.errors import ConfigError
from cupynet.nn import Model
from cupynet.optim import Nesterov, Optimizer
from cupynet.parallel import Communicator, ParameterAveraging, WorkerTeam, check_frequency
from cupynet.training.callbacks import Callback
from cupynet.training.metrics import Evaluation
from cupynet.training.trainer import Trainer

T = TypeVar("T")


class ParallelWrapper:
    """Trains a model as `workers` replicas that are averaged every `averaging_frequency` iterations.

    Replica 0 is the model itself, so after `fit` it holds the average. Replicas, optimizer state and counters live
    until the wrapper is closed: `fit` may be called again and goes on. A context manager.

        with ParallelWrapper(model, workers=2, averaging_frequency=3, prefetch_buffer=24) as wrapper:
            wrapper.fit(Loader(data.train, batch_size=128, seed=12345), epochs=2)
            print(wrapper.evaluate(Loader(data.test, 128, shuffle=False)).stats())

    Args:
        model: what to train.
        optimizer: Nesterov(0.01, 0.9) unless told; each replica gets its own.
        workers: how many replicas.
        averaging_frequency: iterations between averages, or `epoch`, or `end`.
        prefetch_buffer: batches made ahead, over all workers; 0 for none.
        report_score_after_averaging: compute the mean loss over all replicas at each average.
        average_updaters: average the optimizer state with the weights.
        devices: the GPUs, worker r on devices[r % len(devices)]; the first is the model's own, and the only one unless
            told. Not on a CPU.
        callbacks: told of events on rank 0, see `Callback`.
        report_every: iterations between reports to callbacks; 0 for none.
        timeout_s: how long a worker waits for the others before it takes them for dead.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(
        self,
        model: Model,
        workers: int = 2,
        averaging_frequency: int | str = 3,
        prefetch_buffer: int = 24,
        report_score_after_averaging: bool = True,
        average_updaters: bool = True,
        *,
        optimizer: Optimizer | None = None,
        devices: Sequence[int] | None = None,
        callbacks: Sequence[Callback] = (),
        report_every: int = 50,
        timeout_s: float = 300.0,
    ) -> None:
        if isinstance(prefetch_buffer, bool) or not isinstance(prefetch_buffer, int) or prefetch_buffer < 0:
            raise ConfigError(f"prefetch_buffer={prefetch_buffer!r}: must be an integer of at least 0")
        if devices and model.backend.name != "cupy":
            raise ConfigError(f"devices={list(devices)}: backend {model.backend.name} has none, leave it out")
        if devices and devices[0] != model.backend.device:
            raise ConfigError(
                f"devices={list(devices)}: replica 0 is the model itself, and that is on device {model.backend.device}"
            )
        self.model, self.callbacks, self.report_every = model, callbacks, report_every
        optimizer = Nesterov(0.01, 0.9) if optimizer is None else optimizer
        self._optimizer = instance("optimizer", optimizer, Optimizer, "Nesterov(0.01)")
        self._averaging = check_frequency(averaging_frequency)
        self._average_updaters, self._report_score = average_updaters, report_score_after_averaging
        self._devices = list(devices or [model.backend.device])
        most = threads_per_worker(model.backend.name, workers)
        self._team = WorkerTeam(workers, timeout_s, limit_blas=model.backend.name != "cupy", most_blas_threads=most)
        self._prefetch = -(-prefetch_buffer // workers)
        self._trainers: list[Trainer | None] = [None] * workers

    def __enter__(self) -> ParallelWrapper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker threads; the model stays usable."""
        self._team.close()
        self._trainers = [None] * self._team.workers

    def fit(
        self, train: Loader, epochs: int, *, evaluate_on: Loader | None = None, evaluate_every: int = 1
    ) -> ParallelWrapper:
        """Train for `epochs` more epochs; afterwards all replicas are identical.

        The first worker that fails stops the others and its exception is raised here.
        """

        def task(communicator: Communicator) -> None:
            trainer = self._trainer(communicator)
            trainer.stopped_by = 0
            trainer.fit(train, trainer.epoch + epochs, evaluate_on=evaluate_on, evaluate_every=evaluate_every)

        try:
            self._team.run(task)
        finally:
            self._team.stop(0)  # a stop is for one fit
        return self

    def evaluate(self, loader: Loader) -> Evaluation:
        """Evaluate in parallel over the replicas."""
        return self._team.run(lambda communicator: self._trainer(communicator).evaluate(loader))[0]

    def stop(self) -> None:
        """Let a running `fit` end at its next average, on all workers; from a callback or another thread."""
        self._team.stop(15)

    @property
    def trainer(self) -> Trainer:
        """Worker 0's trainer: its counters and clock. RuntimeError before the first task."""
        if self._trainers[0] is None:
            raise RuntimeError("nothing has been trained yet, or the wrapper is closed")
        return self._trainers[0]

    def replicas(self) -> list[Model]:
        """The replicas that exist so far, in rank order."""
        return [trainer.model for trainer in self._trainers if trainer is not None]

    def _trainer(self, communicator: Communicator) -> Trainer:
        """This worker's trainer, made in its own thread at its first task; with this task's communicator."""
        trainer = self._trainers[communicator.rank]
        if trainer is None:
            backend = self._backend(communicator.rank)
            backend.activate()
            model = self.model if backend is self.model.backend else self.model.replicate(backend)
            communicator.barrier()  # nobody trains the model while others still copy it
            trainer = Trainer(
                model,
                copy.deepcopy(self._optimizer),
                communicator=communicator,
                callbacks=self.callbacks,
                prefetch_buffer=self._prefetch,
                report_every=self.report_every,
            )
            self._trainers[communicator.rank] = trainer
        trainer.communicator = communicator
        trainer.synchronizer = ParameterAveraging(
            communicator, self._averaging, average_updaters=self._average_updaters, report_score=self._report_score
        )
        return trainer

    def _backend(self, rank: int) -> Backend:
        if rank == 0:
            return self.model.backend
        backend = self.model.backend
        return create_backend(backend.name, backend.policy.name, self._devices[rank % len(self._devices)])
