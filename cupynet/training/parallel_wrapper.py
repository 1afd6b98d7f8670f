"""Training in parallel replicas: the successor of Deeplearning4j's ParallelWrapper.

The wrapper validates the arguments, places the workers on devices, and runs tasks on them. Each worker builds its own
`Trainer` in its own thread.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from cupynet.backend import FRACTIONS, PixelScale, Shared, blas, create_backend
from cupynet.backend.array import Array
from cupynet.core.checks import flag, instance, integer, one_of
from cupynet.core.errors import ConfigError, CupynetError, DivergedError
from cupynet.core.shared_options import on_device
from cupynet.data import Dataset, Loader, Shards, as_loader
from cupynet.nn import Model
from cupynet.optim import Nesterov, Optimizer, Scaled, scale_factor
from cupynet.parallel import (
    AveragingSchedule,
    Communicator,
    Groups,
    MpiLauncher,
    ParameterAveraging,
    Pipeline,
    Placement,
    Synchronizer,
    ThreadLauncher,
    check_reduce,
    job,
    pipeline_speed,
)
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.history import Columns
from cupynet.runs.run import Run
from cupynet.training.callback_list import by_class_name
from cupynet.training.callbacks.base import Callback, check_decisions
from cupynet.training.callbacks.history import Rows
from cupynet.training.callbacks.profile import Profile
from cupynet.training.callbacks.progress import STYLES, Progress, say
from cupynet.training.checkpointing import resume, save
from cupynet.training.data_warnings import DataWarnings
from cupynet.training.device_errors import translate_device_errors
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import Stop, StopReason
from cupynet.training.fit import (
    Fit,
    check_batches,
    check_data,
    check_pixels,
    check_same_data,
)
from cupynet.training.graph_replica import replica_of
from cupynet.training.pipeline_stage import Stage
from cupynet.training.replica import Replica, check_accumulate
from cupynet.training.trainer import Trainer
from cupynet.training.warm_up import warm_up

T = TypeVar("T")
log = logging.getLogger(__name__)
Examples: TypeAlias = Loader | Dataset | Shards | tuple[Array, Array]


class ParallelWrapper:
    """Trains a model as `workers` replicas that are averaged every `averaging_frequency` iterations.

    The first replica of this process is the model itself, so after `fit` it holds the average. Replicas, optimizer and
    synchronizer states and all counters live until the wrapper is closed: `fit` may be called again and continues. A
    context manager.

        with ParallelWrapper(model, workers=2, averaging_frequency=3, prefetch_buffer=24) as wrapper:
            wrapper.fit(Loader(data.train, batch_size=128, seed=12345), epochs=2)
            print(wrapper.evaluate(data.test).stats())

    Args:
        model: the model to train.
        workers: number of replicas; by default one per device, on a CPU one per core up to 4, with `mpi` one per rank.
        averaging_frequency: iterations between averages, or `epoch`, or `end`, or a schedule such as `PostLocal`.
        prefetch_buffer: batches prepared ahead, over all workers; 0 for none.
        report_score_after_averaging: compute the mean loss over all replicas at each average.
        average_updaters: average the optimizer state with the weights.
        optimizer: Nesterov(0.01, 0.9) by default; each worker gets a copy.
        synchronizer: instead of the averaging that `averaging_frequency`, `report_score_after_averaging` and
            `average_updaters` describe; each worker gets a copy.
        learning_rate_scale: multiplies the learning rate: `none`, `linear` (times workers), `sqrt` (times their square
            root), or a factor.
        accumulate: number of parts of a batch whose gradients are accumulated, to save memory; an iteration stays one
            update. A pipeline has `micro_batches` instead.
        devices: the GPUs, worker r on devices[r % len(devices)]. This process's first worker must be on the model's
            device. By default all devices; under mpiexec the model's.
        callbacks: see `Callback`.
        progress: the style of the `Progress` that is added if `callbacks` have none: `auto`, `bar`, `lines` or `none`.
        report_every: iterations between reports to callbacks; 0 for none.
        timeout_s: seconds that a worker waits for the others.
        blas_threads: of each worker on a CPU; by default its share of the cores, with numba one.
        run: the folder that callbacks write to, on rank 0.
        launcher: runs the workers: `thread` or `mpi`. With `mpi` this process is one worker, and the others, started
            by mpiexec, make the same calls.
        pipeline: cuts each replica into stages, one per device or core; by default a replica is whole. In a pipeline
            the model holds the average whenever replicas are evaluated, and after `fit`.
        reduce: where averages of replicas on GPUs are computed: `nccl`, between devices; `device`, on the first of them
            (Deeplearning4j's legacy averaging); `host`; by default NCCL for several devices if it is installed, else
            the device. On a CPU only `auto` and `host`, which are the same.
        data_on_device: keep the images in the memory of each GPU during a fit or an evaluation: true, false, or `auto`,
            if they take at most a quarter of the free memory. On a CPU only `auto` and false, which are the same.

    Attributes:
        model, synchronizer, pipeline, data_on_device: the arguments.
        optimizer: the argument, with its learning rate scaled. Each worker trains with a copy.
        callbacks: the argument, those with `last` at the end.
        placement: how many workers, of how many stages, and on which devices.
        layers: the names of the layers of each stage; empty without a pipeline.
        blas_threads: of each worker; 0 on a GPU.
        warm: True if nothing is left to compile before training.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self,
        model: Model,
        workers: int | None = None,
        averaging_frequency: int | str | AveragingSchedule = 3,
        prefetch_buffer: int = 24,
        report_score_after_averaging: bool = True,
        average_updaters: bool = True,
        *,
        optimizer: Optimizer | None = None,
        synchronizer: Synchronizer | None = None,
        learning_rate_scale: str | float = "none",
        accumulate: int = 1,
        devices: Sequence[int] | None = None,
        callbacks: Sequence[Callback] = (),
        report_every: int = 50,
        timeout_s: float = 300.0,
        blas_threads: int | None = None,
        run: Run | str | Path | None = None,
        launcher: str = "thread",
        pipeline: Pipeline | None = None,
        reduce: str = "auto",
        data_on_device: bool | str = "auto",
        progress: str = "auto",
    ) -> None:
        self.model = instance("model", model, Model, "Model(network, Image(28, 28, 1), create_backend('numba'))")
        if synchronizer is None:
            synchronizer = ParameterAveraging(
                averaging_frequency,
                average_updaters=average_updaters,
                report_score=flag("report_score_after_averaging", report_score_after_averaging),
            )
        self.synchronizer = instance("synchronizer", synchronizer, Synchronizer, "ParameterAveraging(3)")
        self.pipeline = None if pipeline is None else instance("pipeline", pipeline, Pipeline, "Pipeline(stages=2)")
        for each in callbacks:
            instance("callbacks", each, Callback, "History('history.jsonl')")
        check_decisions(by_class_name(callbacks))
        self.callbacks = sorted(callbacks, key=lambda each: each.last)
        self.data_on_device = on_device("data_on_device", data_on_device, model.backend.name)
        self._accumulate = check_accumulate(accumulate, model.network, pipeline)
        self._report_every = integer("report_every", report_every, 0)
        self._progress = one_of("progress", progress, STYLES)

        network, backend = model.network, model.backend
        processes = one_of("launcher", launcher, ("thread", "mpi")) == "mpi"
        stages, most_stages = (1, 1) if pipeline is None else (pipeline.count, pipeline.most(network))
        if devices is None and processes and backend.name == "cupy":
            devices = [backend.device]
        ranks = job() if processes else None
        seats = None if ranks is None else ranks.seats
        self.placement = Placement.of(backend.name, workers, devices, backend.device, stages, most_stages, seats)
        workers, stages = self.placement.workers, self.placement.stages
        self.layers = [] if pipeline is None else pipeline.cut(network, stages)
        self.synchronizer.check(workers, stages)
        self._reduce = check_reduce(reduce, backend.name, processes=processes, stages=stages)
        self._prefetch = -(-integer("prefetch_buffer", prefetch_buffer, 0) // workers)
        self._run = None if run is None else Run.of(run, create=ranks is None or ranks.rank == 0)
        optimizer = Nesterov(0.01, 0.9) if optimizer is None else optimizer
        instance("optimizer", optimizer, Optimizer, "Nesterov(0.01)")
        self.optimizer = _scaled(optimizer, learning_rate_scale, workers)

        if blas_threads is not None:
            blas_threads = integer("blas_threads", blas_threads, 1)
        self._launcher = MpiLauncher(timeout_s) if processes else ThreadLauncher(self.placement.ranks, timeout_s)
        if self.placement.devices and self.placement.device(self._launcher.first) != backend.device:
            raise ConfigError(
                f"replica {self._launcher.first} is the model itself, which is on device {backend.device}: name it "
                "first",
                setting="devices",
                value=str(list(self.placement.devices)),
            )
        if blas_threads is None:
            blas_threads = blas.threads_per_worker(backend.name, self._launcher.sharing)
        self.blas_threads = 0 if self.placement.devices else blas_threads
        self._trainers: list[Trainer | None] = [None] * self.placement.ranks
        self._rows, self._shared = Rows(), Shared()
        self.warm = backend.name == "numpy"
        self._batch_size = 1  # of the last fit
        self._warnings = DataWarnings(speaks=self._launcher.first == 0)
        self._stop: Stop | None = None  # for workers that do not have a trainer yet
        self._closed, self._releasing = False, threading.RLock()
        self._blas = blas.Limit(self.blas_threads) if self.blas_threads else None  # last: nothing may raise after it

    def __enter__(self) -> ParallelWrapper:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            log.warning("closing failed too: %s: %s", type(second).__name__, second)

    def close(self) -> None:
        """End the workers and close callbacks; the model stays usable. It may be called twice.

        A running `fit` or other task of the workers ends with a RuntimeError, and callbacks are closed after its end.
        `close` waits for that, unless a thread of the task calls it, as in a callback.
        """
        self._closed = True
        with ExitStack() as closing:
            closing.callback(self._release)
            closing.callback(self._launcher.close)  # before the trainers

    def _release(self) -> None:
        """Close callbacks after `close`. If a task is still running, do nothing: it calls this at its end."""
        if not self._launcher.idle:
            return
        with self._releasing, ExitStack() as closing:
            trainers, self._trainers = self._trainers, [None] * self.placement.ranks
            for trainer in trainers:
                if trainer is not None:
                    closing.callback(trainer.callbacks.close)
            if self._blas is not None:
                closing.callback(self._blas.close)
            closing.callback(self.model.backend.deactivate)  # a single worker runs in the caller's thread

    def fit(
        self,
        train: Examples,
        epochs: int = 1,
        *,
        batch_size: int = 128,
        evaluate_on: Examples | None = None,
        evaluate_every: int = 1,
        split: str = "test",
    ) -> ParallelWrapper:
        """Train until `epochs` more epochs are complete; afterwards all replicas are identical.

        The rest of an interrupted epoch counts as one of them, see `Trainer.fit`. If a worker fails, the others stop
        and its exception is raised here; then the wrapper must be closed, and the model keeps its weights. (After a
        DivergedError early stopping restores the best weights.)

        Args:
            train: a `Loader`; or a `Dataset`, `Shards`, or a pair of images (S, H, W, C) uint8 and labels (S,),
                shuffled in each epoch. The pixels of a pair are scaled as the model was trained (`Model.pixels`).
            epochs: additional epochs; 0 only after `restore`, to finish a fit whose last epoch is complete.
            batch_size: used if `train` or `evaluate_on` is not a `Loader`.
            evaluate_on, evaluate_every, split: see `Fit`.
        """
        loader = self._loader(train, batch_size, self.model.pixels)
        pixels, workers = loader.dataset.pixels, self.placement.workers
        loader.rounds(workers)  # raises if the number of shards differs
        held_out = None if evaluate_on is None else self._evaluation_loader(evaluate_on, batch_size, pixels)
        unfinished = any(trainer is not None and trainer.plan.unfinished for trainer in self._trainers)
        epochs = integer("epochs", epochs, 0 if unfinished else 1)
        fit = Fit(loader, epochs, held_out, evaluate_every, split)
        fit.check_validation([*self.callbacks, self.optimizer.learning_rate], self.synchronizer, workers)
        self._batch_size = min(loader.batch_size, len(loader.dataset))
        parts = self._accumulate if self.pipeline is None else self.pipeline.micro_batches
        check_batches(self.model.network, -(-self._batch_size // parts), workers)
        if loader.batches < workers and self._launcher.first == 0:
            idle = workers - loader.batches
            log.warning("%d of %d workers have no batches: lower workers or batch_size", idle, workers)
        restored = [each.data for each in self._trainers if each is not None and each.plan.unfinished]
        self._warnings.of_fit(loader, held_out, restored[0] if restored else None)

        def task(trainer: Trainer) -> None:
            if self._stop is not None:
                trainer.consensus.propose(self._stop)
            trainer.fit(fit)

        self.model.pixels, self.model.trained_on_pixels = pixels, True
        try:
            if not self.warm:
                self.on_workers(lambda trainer: trainer.emit("check_fit"))
                self.warm_up(self._batch_size)
            self.on_workers(task, batch_size=loader.batch_size)
        except CupynetError as error:
            if error.exit_code == DivergedError.exit_code:  # PeerFailed carries the exit code of the failed rank
                for trainer in filter(None, reversed(self._trainers)):  # the model's own device last
                    trainer.diverged(str(error))
            raise
        finally:
            self._end_fit()
        return self

    def _end_fit(self) -> None:
        """Clear stop requests, and end the progress bar and the profile, also after an error."""
        self._stop = None
        for trainer in filter(None, self._trainers):
            trainer.consensus.request = None
            for callback in trainer.callbacks:
                if isinstance(callback, Progress | Profile):
                    callback.close()

    def evaluate(self, data: Examples, batch_size: int = 128) -> Evaluation:
        """Evaluate in parallel over the replicas; `data` as for `fit`.

        Raises:
            ConfigError: the pixels are not scaled as in training; or the replicas differ, as they were restored to a
                state between two averages.
        """
        pixels = self.model.pixels  # also FRACTIONS before training, when any scale is allowed
        loader = self._evaluation_loader(data, batch_size, pixels if pixels != FRACTIONS else None)
        self._warnings.of_evaluation(loader)
        found: list[Evaluation] = []  # one from each worker of this process, all equal

        def task(trainer: Trainer) -> None:
            if trainer.synchronizer.identical:
                check_same_data(loader, trainer.world)
                trainer.replica.begin()
                trainer.synchronizer.begin(trainer.replica)
                found.append(trainer.evaluate(loader))

        self.on_workers(task, batch_size=loader.batch_size)
        if not found:
            raise ConfigError(
                "the replicas differ between two averages: call fit first, or evaluate load_model(checkpoint)"
            )
        return found[0]

    def greatest(self, number: float) -> float:
        """Return the greatest number that any process of this run passes, on all of them."""
        found: list[float] = []
        self.on_workers(lambda trainer: found.append(trainer.groups.world.gather_numbers(number).max()))
        return float(found[0])

    def checkpoint(self, folder: str | Path) -> Path:
        """Write a checkpoint into `folder`, and return its path. Call it between fits. OutputError."""
        store = Checkpoints(folder)
        self.on_workers(lambda trainer: save(store, trainer))
        return store.path(self.trainer.iteration)

    def restore(self, path: str | Path) -> None:
        """Continue from a checkpoint, bit for bit.

        With another number of workers all begin with the mean of the replicas; with another backend or dtype results
        are equal to rounding. The log says which.

        Args:
            path: a checkpoint, or a folder of them, of which the newest whole one is taken.

        Raises:
            ConfigError: it is missing; or of another network, optimizer or synchronizer, or of other stages.
            DataError: it is damaged.
        """
        self.on_workers(lambda trainer: resume(trainer, path))
        self.model.trained_on_pixels = True

    def warm_up(self, batch_size: int) -> float:
        """Compile or load every kernel that training needs; return the seconds.

        The first `fit` calls it. The time counts as `Clock.compile_s`, not as training.
        """
        self._say("compiling kernels (once) ...")
        seconds = (
            self.on_workers(
                lambda trainer: warm_up(trainer.replica, batch_size, trainer.synchronizer), batch_size=batch_size
            )
            or 0.0
        )
        self._say(f"kernels ready after {seconds:.1f} s")
        self.warm = True
        return seconds

    def _say(self, text: str) -> None:
        """Log or print a line like those of `Progress`."""
        style = next((each.style for each in self.callbacks if isinstance(each, Progress)), self._progress)
        say(log, text, printed=style != "none" and self._launcher.first == 0)

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """End the running `fit`, or the next one, after the same round on all workers. Callable from any thread."""
        self._stop = self._stop or Stop(StopReason(reason), text)
        for trainer in filter(None, self._trainers):
            trainer.consensus.propose(self._stop)

    def on_workers(self, task: Callable[[Trainer], T], *, batch_size: int | None = None) -> T | None:
        """Run `task(trainer)` on every worker, in its thread; return rank 0's result.

        Args:
            batch_size: for messages.

        Raises:
            RuntimeError: after a failure or `close`, and during another task.
        """

        def done(world: Communicator) -> T:
            with translate_device_errors(self.model.backend, self.placement, world.rank, batch_size):
                trainer = self._trainer(world)
                result = task(trainer)
                trainer.backend.synchronize()
                return result

        self.model.backend.synchronize()  # streams of caller and workers do not wait for each other
        try:
            return self._launcher.run(done)
        finally:
            if self._closed:
                self._release()

    def _loader(self, data: Examples, batch_size: int, pixels: PixelScale, *, shuffle: bool = True) -> Loader:
        loader = as_loader(data, batch_size, shuffle=shuffle, classes=self.model.output.features, pixels=pixels)
        check_data(loader.dataset, self.model)
        return loader

    def _evaluation_loader(self, data: Examples, batch_size: int, pixels: PixelScale | None) -> Loader:
        """Return batches to evaluate on. pixels: those of the training data, if known."""
        loader = self._loader(data, batch_size, pixels or FRACTIONS, shuffle=False)
        if pixels is not None:
            check_pixels(loader.dataset, pixels)
        return loader

    @property
    def history(self) -> Columns:
        """The history of the whole training so far, see `Columns`; empty in processes other than rank 0's.

        Checkpoints contain it: after `restore` it continues the saved history.
        """
        return Columns.of(self._rows.kept)

    @property
    def trainer(self) -> Trainer:
        """The trainer of this process's first worker. RuntimeError before the first task."""
        found = next((trainer for trainer in self._trainers if trainer is not None), None)
        if found is None:
            raise RuntimeError("nothing has been trained yet, or the wrapper is closed")
        return found

    def pipeline_speed(self) -> dict[str, Any] | None:
        """Return the speed of the pipeline and its bound, from the times of its stages; None without one or a `fit`."""
        stages, trainer = self.placement.stages, self.trainer
        spent, rate = trainer.statistics.spent, trainer.statistics.clock.images_per_s
        if stages == 1 or self.pipeline is None or spent is None or not rate:
            return None
        batch_size, samples = self._batch_size, sum(spent.samples[::stages])
        micro_batches = min(self.pipeline.micro_batches, batch_size)
        batches = samples / batch_size
        work_s = [sum(spent.compute_s[stage::stages]) / batches / micro_batches for stage in range(stages)]
        return pipeline_speed(self.layers, micro_batches, work_s, batch_size * self.placement.workers / rate)

    def replicas(self) -> list[Model]:
        """Return the replicas of this process, in rank order; in a pipeline each is a stage's layers."""
        return [trainer.model for trainer in self._trainers if trainer is not None]

    # in a worker ----------------------------------------------------------------------------------------------------

    def _trainer(self, world: Communicator) -> Trainer:
        """Return this worker's trainer, created in its own thread by its first task."""
        trainer = self._trainers[world.rank]
        if trainer is None:
            trainer = self._trainers[world.rank] = self._new_trainer(world)
        trainer.backend.activate()  # a single worker runs in the calling thread, which may be another than before
        return trainer

    def _new_trainer(self, world: Communicator) -> Trainer:
        """Build a worker's trainer. All workers call it. The first of this process trains the model, others copies."""
        model, backend, optimizer = self.model, self.model.backend, copy.deepcopy(self.optimizer)
        own = world.rank == self._launcher.first
        if not own:
            device = self.placement.device(world.rank)
            backend = create_backend(backend.name, backend.policy.name, device, **backend.options)
        backend.activate()
        world.attach(backend, self._reduce)
        groups = Groups.grid(world, self.placement.stages)
        replica: Replica
        if self.pipeline is None:
            replica = replica_of(model if own else model.replicate(backend), optimizer, self._accumulate)
        else:
            replica = Stage(model, optimizer, groups, backend, self.layers, self.pipeline.micro_batches)
        if world.rank == 0:
            callbacks = [self._rows, *self.callbacks]  # first, so that other callbacks find the epoch in the history
            if self._progress != "none" and not any(isinstance(each, Progress) for each in callbacks):
                callbacks.append(Progress(self._progress))
        else:
            callbacks = [copy.deepcopy(each) for each in self.callbacks if each.every_rank]
        synchronizer = copy.deepcopy(self.synchronizer)
        world.barrier()  # all workers must copy the model before any trains it
        return Trainer(
            replica,
            groups=groups,
            synchronizer=synchronizer,
            callbacks=callbacks,
            prefetch_buffer=self._prefetch,
            data_on_device=self.data_on_device,
            shared=self._shared,
            report_every=self._report_every,
            run=self._run,
        )


def _scaled(optimizer: Optimizer, scale: str | float, workers: int) -> Optimizer:
    """Return the optimizer with its learning rate scaled."""
    factor = scale_factor(scale, workers)
    if factor == 1:
        return optimizer
    optimizer = copy.copy(optimizer)
    optimizer.learning_rate = Scaled(optimizer.learning_rate, factor)
    return optimizer
