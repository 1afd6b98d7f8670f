"""Training in parallel replicas, as an object: the successor of Deeplearning4j's ParallelWrapper.

This is the one assembly line: the class that the README shows is the one that `cupynet train` runs. How many
workers, on which devices and what each is made from is decided by its `WorkerPlan`; here tasks are run on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeAlias, TypeVar

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale, blas
from cupynet.backend.array import Array
from cupynet.core.checks import flag, integer, one_of
from cupynet.core.errors import ConfigError, CupynetError, DataError, DivergedError
from cupynet.data import Batches, Dataset, Shards, as_loader
from cupynet.nn import Model
from cupynet.optim import Nesterov, Optimizer, Schedule
from cupynet.parallel import (
    AveragingSchedule,
    Communicator,
    Launcher,
    MpiLauncher,
    ParameterAveraging,
    Pipeline,
    PipelineSpeed,
    Synchronizer,
    ThreadLauncher,
)
from cupynet.runs.checkpoints import Checkpoints, Stored
from cupynet.runs.history import Columns
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.profile import Profile
from cupynet.training.callbacks.progress import Progress
from cupynet.training.checkpointing import found, resumed, save
from cupynet.training.device_errors import translate_device_errors
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import StopReason
from cupynet.training.fit import Fit, check_data, check_pixels
from cupynet.training.pipeline_stage import Stage
from cupynet.training.trainer import Trainer
from cupynet.training.worker_plan import WorkerPlan

T = TypeVar("T")
log = logging.getLogger(__name__)
Examples: TypeAlias = Batches | Dataset | Shards | tuple[Array, Array]


class ParallelWrapper:
    """Trains a model as `workers` replicas that are averaged every `averaging_frequency` iterations.

    The first replica of this process is the model itself, so after `fit` it holds the average. Replicas are made in
    their workers at the first task; they, the optimizer's and the synchronizer's state and all counters live until the
    wrapper is closed: `fit` may be called again and goes on. A context manager.

        with ParallelWrapper(model, workers=2, averaging_frequency=3, prefetch_buffer=24) as wrapper:
            wrapper.fit(Loader(data.train, batch_size=128, seed=12345), epochs=2)
            print(wrapper.evaluate(data.test).stats())

    Args:
        model: what to train.
        workers: how many replicas; by default one per device, on a CPU one per core up to 4; with `mpi` one per rank.
        averaging_frequency: iterations between averages, or `epoch`, or `end`, or a rule such as `PostLocal`.
        prefetch_buffer: batches made ahead, over all workers; 0 for none.
        report_score_after_averaging: compute the mean loss over all replicas at each average.
        average_updaters: average the optimizer state with the weights.
        optimizer: Nesterov(0.01, 0.9) by default; each worker gets a copy.
        synchronizer: in place of the averaging that `averaging_frequency`, `report_score_after_averaging` and
            `average_updaters` describe; each worker gets a copy.
        learning_rate_scale: what more workers do to the optimizer's learning rate: `none`, `linear` (times workers),
            `sqrt` (times their root), or a factor of one's own; told in the log.
        accumulate: into how many parts each batch is cut, whose gradients are added up one after the other: it takes
            less memory, and an iteration stays one update. Stages of a pipeline have `micro_batches` for that.
        devices: the GPUs, worker r on devices[r % len(devices)]; that of this process's first worker is the model's
            own. By default all; under mpiexec the model's own.
        callbacks: told of events, see `Callback`.
        progress: how fits are shown where no `Progress` is among the callbacks, which decides else: `auto`, a bar on a
            terminal, and a line per epoch; `lines` alone; `bar`; or `none`, nothing. See `Progress` for where lines go.
        report_every: iterations between reports to callbacks; 0 for none.
        timeout_s: how long a worker waits for the others before it takes them for dead, in seconds.
        blas_threads: of each worker on a CPU; by default its share of the cores, with numba one.
        run: the folder that callbacks write to.
        launcher: what runs the workers: `thread`, `mpi`, or a `Launcher` with as many as there are ranks. With `mpi`
            this process is one worker, and mpiexec has started the others, which make the same calls.
        pipeline: cuts each replica into stages, each on a device or core of its own; by default it is whole. The model
            then holds the average wherever replicas are evaluated, and after `fit`.
        reduce: where averages of replicas on GPUs are computed: `nccl`, between devices; `device`, on the first of them
            (Deeplearning4j's legacy averaging); `host`; by default NCCL where there are several devices and it is
            there, else the device. On a CPU only `auto` and `host`, which are the same.
        data_on_device: whether the images stay in the memory of each GPU during a fit or an evaluation: true, false, or
            `auto`, where they take at most a quarter of what is free. Else they are sent batch by batch. The batches
            are the same. On a CPU only `auto` and false, which are the same.

    Attributes:
        plan: what every worker is made from.
        placement: how many workers, of how many stages, and on which devices.
        layers: the names of the layers of each stage; empty without a pipeline.
        blas_threads: of each worker, as decided; 0 on a GPU.

    Raises:
        ConfigError: an argument cannot work.
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
        launcher: str | Launcher = "thread",
        pipeline: Pipeline | None = None,
        reduce: str = "auto",
        data_on_device: bool | str = "auto",
        progress: str = "auto",
    ) -> None:
        """See the class."""
        if synchronizer is None:
            synchronizer = ParameterAveraging(
                averaging_frequency,
                average_updaters=average_updaters,
                report_score=flag("report_score_after_averaging", report_score_after_averaging),  # by its name here
            )
        self.plan = WorkerPlan(
            model=model,
            workers=workers,
            devices=devices,
            processes=launcher == "mpi",
            pipeline=pipeline,
            optimizer=Nesterov(0.01, 0.9) if optimizer is None else optimizer,
            learning_rate_scale=learning_rate_scale,
            synchronizer=synchronizer,
            accumulate=accumulate,
            prefetch_buffer=prefetch_buffer,
            data_on_device=data_on_device,
            reduce=reduce,
            callbacks=callbacks,
            progress=progress,
            report_every=report_every,
            run=None if run is None else Run.of(run),
        )
        self.model, self.placement, self.layers = model, self.plan.placement, self.plan.layers
        if blas_threads is not None:
            blas_threads = integer("blas_threads", blas_threads, 1)
        self._launcher = _launcher(launcher, self.placement.ranks, timeout_s)
        own = model.backend
        if self.placement.devices and self.placement.device(self._launcher.first) != own.device:
            raise ConfigError(
                f"devices={list(self.placement.devices)}: replica {self._launcher.first} is the model itself, and that "
                f"is on device {own.device}: name it first"
            )
        if blas_threads is None:
            blas_threads = blas.threads_per_worker(own.name, self._launcher.sharing)
        self.blas_threads = 0 if self.placement.devices else blas_threads
        self._trainers: list[Trainer | None] = [None] * self.placement.ranks
        self._stop: tuple[str, StopReason] | None = None  # asked for before there were trainers to ask
        self._blas = blas.limited(self.blas_threads) if self.blas_threads else None  # last: all else may be refused

    def __enter__(self) -> ParallelWrapper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            log.warning("closing failed too: %s: %s", type(second).__name__, second)

    def close(self) -> None:
        """End the workers and let callbacks close what they hold; the model stays usable. Harmless a second time."""
        trainers, self._trainers = self._trainers, [None] * self.placement.ranks
        with ExitStack() as closing:
            for trainer in trainers:
                if trainer is not None:
                    closing.callback(trainer.close)
            if self._blas is not None:
                closing.callback(self._blas.close)
            closing.callback(self._launcher.close)  # first: nobody works any more while the rest is closed
            closing.callback(self.model.backend.deactivate)  # one worker alone works in the caller's thread

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

        The rest of an epoch that a stop broke off counts as one of them, see `Trainer.fit`.

        The first worker that fails stops the others and its exception is raised here; the wrapper can do nothing more
        then, and the model keeps what it has. (After a DivergedError early stopping gives it the best weights.)

        On a terminal a bar shows how far it is; and of each epoch there is a line, in the log where that is listened to
        at level INFO, else printed. The wrapper's `progress="none"` turns both off.

        Args:
            train: a `Loader`; or a `Dataset`, `Shards`, or a pair of images (S, H, W, C) uint8 and labels (S,), as in
                `fit((images, labels))`, shuffled anew in each epoch.
            epochs: how many more; 0 after `restore`, to end a fit whose last epoch was complete.
                The pixels of a pair become what the model has them become already (`Model.pixels`): fractions, unless
                it was trained on others.
            batch_size: for a `train` or `evaluate_on` that is no `Loader`.
            evaluate_on, evaluate_every, split: see `Trainer.fit`.
        """
        loader = self._loader(train, batch_size, self.model.pixels)
        loader.rounds(self.placement.workers)  # refuses shards that are not as many
        pixels = loader.dataset.pixels
        held_out = None if evaluate_on is None else self._judging(evaluate_on, batch_size, pixels)
        unfinished = any(trainer is not None and trainer.unfinished for trainer in self._trainers)
        fit = Fit(loader, epochs, held_out, evaluate_every, split, unfinished)
        choosers: list[Callback | Schedule] = [*self.plan.callbacks, self.plan.optimizer.learning_rate]
        fit.check_choosers(choosers, self.plan.synchronizer, self.placement.workers)  # before any worker begins
        self._warn_of_idle(loader)
        self.plan.check(loader)

        def task(trainer: Trainer) -> None:
            if self._stop is not None:
                trainer.stop(*self._stop)
            trainer.fit(loader, epochs, evaluate_on=held_out, evaluate_every=evaluate_every, split=split)

        with self.model.fitting():
            self.model.pixels = pixels
            try:
                self.on_workers(task, batch_size=loader.batch_size)
            except CupynetError as error:
                if error.exit_code == DivergedError.exit_code:  # a PeerFailed has that of the rank that failed
                    for trainer in filter(None, reversed(self._trainers)):  # the model's own device last
                        trainer.diverged(str(error))
                raise
            finally:
                self._end_fit()
        return self

    def _end_fit(self) -> None:
        """After an error too: what is of one fit alone is over, the terminal is given back, and no call is timed."""
        self._stop = None  # also a stop that came when some workers had left the fit already
        for trainer in filter(None, self._trainers):
            trainer.consensus.wish = None
            for callback in trainer.callbacks:
                if isinstance(callback, Progress | Profile):
                    callback.close()

    def evaluate(self, data: Examples, batch_size: int = 128) -> Evaluation:
        """Evaluate in parallel over the replicas; `data` as for `fit`.

        ConfigError: its pixels become something else than those that the model was trained on; or the replicas were
        restored to where they differ, between two averages.
        """
        pixels = self.model.pixels  # fractions, too, before it has seen any: then data may say otherwise
        loader = self._judging(data, batch_size, pixels if pixels != FRACTIONS else None)
        found: list[Evaluation] = []  # one from each worker of this process, all the same

        def task(trainer: Trainer) -> None:
            if trainer.synchronizer.identical:  # here as there
                trainer.replica.begin()
                trainer.synchronizer.begin(trainer.replica)
                found.append(trainer.evaluate(loader))

        self.on_workers(task, batch_size=loader.batch_size)
        if not found:
            raise ConfigError(
                "the replicas are between two averages, and differ: let fit go on first, or evaluate what load_model "
                "makes of the checkpoint, their mean"
            )
        return found[0]

    def greatest(self, number: float) -> float:
        """The greatest of the numbers that the processes of this run give, on all of them: what each does next must not
        depend on what it alone has seen."""
        found: list[float] = []
        self.on_workers(lambda trainer: found.append(trainer.groups.world.gather_numbers(number).max()))
        return float(found[0])

    def checkpoint(self, folder: str | Path) -> Path:
        """Write a checkpoint into `folder`, beside those of other iterations: where training is, on all workers.

        Its path. Between fits; during one a `Checkpoint` among the callbacks writes them. OutputError.
        """
        store = Checkpoints(folder)
        self.on_workers(lambda trainer: save(store, trainer))
        return store.path(self.trainer.iteration)

    def restore(self, path: str | Path) -> None:
        """Go on from a checkpoint: what the next `fit` does is what would have been done, bit for bit.

        With another number of workers than it is of all begin with the mean of the replicas; with another backend or
        dtype the same is computed to rounding. The log says which.

        path: of a checkpoint, or of a folder of them, of which the newest is taken that is whole.

        Raises:
            ConfigError: it is not there; or of another network, optimizer or synchronizer, or of other stages.
            DataError: it is damaged.
        """
        stored: Stored | None = None
        refusal: CupynetError | None = None
        if self._launcher.first == 0:
            try:
                stored = found(path)
            except (ConfigError, DataError) as error:
                refusal = error
        refusal = self._of_first(refusal)
        if refusal is not None:
            raise refusal

        def task(trainer: Trainer) -> None:
            resumed(trainer, stored if trainer.rank == 0 else None)

        self.on_workers(task)

    def _of_first(self, refusal: CupynetError | None) -> CupynetError | None:
        """What worker 0 has against something, in all processes: the others would wait for it in what comes next."""
        text = "" if refusal is None else f"{type(refusal).__name__} {refusal}"
        told: list[str] = []

        def task(trainer: Trainer) -> None:
            texts = trainer.world.all_gather_ragged(np.frombuffer(text.encode(), np.uint8))
            told.append(texts[0].tobytes().decode())

        self.on_workers(task)
        kind, _, rest = told[0].partition(" ")
        return refusal or ({"ConfigError": ConfigError, "DataError": DataError}[kind](rest) if kind else None)

    def warm_up(self, batch_size: int) -> float:
        """Compile or load every kernel that training needs; the seconds it took."""
        return self.on_workers(lambda trainer: trainer.replica.warm_up(batch_size), batch_size=batch_size) or 0.0

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """Let the running `fit`, or else the next one, end soon, after the same round on all workers.

        From a callback, another thread or a signal handler.
        """
        self._stop = (text, reason)
        for trainer in self._trainers:
            if trainer is not None:
                trainer.stop(text, reason)

    def on_workers(self, task: Callable[[Trainer], T], *, batch_size: int | None = None) -> T | None:
        """Run `task(trainer)` on every worker, in its thread, as `fit` and `evaluate` do; rank 0's result.

        batch_size: of what is done, for messages.

        RuntimeError after a failure or `close`, and in the middle of another task: a callback works with its trainer.
        """

        def done(world: Communicator) -> T:
            with translate_device_errors(self.model.backend, self.placement, world.rank, batch_size):
                trainer = self._trainer(world)
                result = task(trainer)
                trainer.backend.synchronize()
                return result

        self.model.backend.synchronize()  # streams of the caller and of the workers do not wait for each other
        return self._launcher.run(done)

    def _loader(self, data: Examples, batch_size: int, pixels: PixelScale, *, shuffle: bool = True) -> Batches:
        loader = as_loader(data, batch_size, shuffle=shuffle, classes=self.model.output.features, pixels=pixels)
        check_data(loader.dataset, self.model)
        return loader

    def _judging(self, data: Examples, batch_size: int, pixels: PixelScale | None) -> Batches:
        """Batches to evaluate on, whose pixels must become what those trained on do, where that is known."""
        loader = self._loader(data, batch_size, pixels or FRACTIONS, shuffle=False)
        if pixels is not None:
            check_pixels(loader.dataset, pixels)
        return loader

    def _warn_of_idle(self, loader: Batches) -> None:
        """Say that some replicas will never train, where there are more of them than batches."""
        workers, batches = self.placement.workers, loader.batches
        if batches < workers and self._launcher.first == 0:
            log.warning(
                "%d workers for %d batch%s of %d images an epoch: %d never train; fewer workers, or a "
                "smaller batch_size, waste nothing",
                workers, batches, "es" * (batches > 1), loader.batch_size, workers - batches,
            )  # fmt: skip

    @property
    def history(self) -> Columns:
        """How training went so far, column by column; empty in processes other than rank 0's. See `Columns`."""
        return Columns.of(self.plan.rows.kept)

    @property
    def trainer(self) -> Trainer:
        """The trainer of this process's first worker: its counters and clock. RuntimeError before the first task."""
        found = next((trainer for trainer in self._trainers if trainer is not None), None)
        if found is None:
            raise RuntimeError("nothing has been trained yet, or the wrapper is closed")
        return found

    def pipeline_speed(self) -> PipelineSpeed | None:
        """How fast the pipeline is, and could be; None without one, and before `warm_up` and a `fit`."""
        stage, rate = self.trainer.replica, self.trainer.statistics.clock.images_per_s
        if not isinstance(stage, Stage) or not stage.work_s or not rate:
            return None
        micro_batches = min(stage.micro_batches, stage.batch_size)
        round_s = stage.batch_size * self.placement.workers / rate
        return PipelineSpeed(self.layers, micro_batches, stage.work_s, round_s)

    def replicas(self) -> list[Model]:
        """The replicas that exist so far in this process, in rank order; in a pipeline each is a stage's layers."""
        return [trainer.model for trainer in self._trainers if trainer is not None]

    # in a worker ----------------------------------------------------------------------------------------------------

    def _trainer(self, world: Communicator) -> Trainer:
        """This worker's trainer, made in its own thread at its first task."""
        trainer = self._trainers[world.rank]
        if trainer is None:
            trainer = self._trainers[world.rank] = self.plan.trainer(world, own=world.rank == self._launcher.first)
        trainer.backend.activate()  # one worker alone runs in the calling thread, which may be another than before
        return trainer


def _launcher(asked: str | Launcher, ranks: int, timeout_s: float) -> Launcher:
    """What runs `ranks` workers; ConfigError."""
    if not isinstance(asked, str):
        return asked
    kind = one_of("launcher", asked, ("thread", "mpi"))
    return MpiLauncher(timeout_s) if kind == "mpi" else ThreadLauncher(ranks, timeout_s)
