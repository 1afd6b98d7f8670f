"""Data-parallel training, modeled on Deeplearning4j's ParallelWrapper."""

from __future__ import annotations

import builtins
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from cupynet.backend import Shared, blas, create_backend
from cupynet.backend.array import Array
from cupynet.core.checks import copied, instance, integer
from cupynet.core.described import check_unchanged
from cupynet.core.errors import ConfigError, CupynetError, DivergedError
from cupynet.core.lock import Hold
from cupynet.core.signals import stopping_at_interrupt
from cupynet.core.wording import counted
from cupynet.nn import Model
from cupynet.optim import Optimizer, Schedule
from cupynet.parallel import (
    AveragingSchedule,
    Communicator,
    Groups,
    MpiLauncher,
    Pipeline,
    Synchronizer,
    ThreadLauncher,
)
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.history import History
from cupynet.runs.layout import MODEL
from cupynet.runs.run import Run
from cupynet.training.agreement import run_or_refuse
from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.history import Rows
from cupynet.training.callbacks.profile import Profile
from cupynet.training.callbacks.progress import Progress, say
from cupynet.training.checkpointing import resume, save_between_fits, save_model
from cupynet.training.closing import close, close_or_warn, release
from cupynet.training.data_warnings import DataWarnings
from cupynet.training.device_errors import translate_device_errors
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import Stop, StopReason
from cupynet.training.fit import (
    ClassWeight,
    Examples,
    Fit,
    check_metrics,
    evaluation_loader,
    examples,
    held_out_of,
    loader_of,
    named,
)
from cupynet.training.graph_replica import replica_of
from cupynet.training.metrics import Metric
from cupynet.training.options import CheckedOptions, FitData, TrainingOptions
from cupynet.training.pipeline_stage import Stage
from cupynet.training.replica import warm_up
from cupynet.training.trainer import Trainer

T = TypeVar("T")
CTRL_C = "Ctrl-C"  # text of a `Stop`
log = logging.getLogger(__name__)
_compiled: set[tuple[str, str]] = set()  # (backend, dtype) for which this process has announced compilation


class ParallelWrapper:
    """Trains a model as `workers` replicas that are averaged every `averaging_frequency` iterations.

    The first replica of this process is the model itself, so the model holds the average after `fit`. Replicas,
    optimizer and synchronizer states, and all counters persist until the wrapper is closed, and another `fit` continues
    from them. The wrapper is a context manager; without `with`, it is closed when it is garbage collected, or when
    Python exits. Callbacks should refer to it through `weakref.proxy(wrapper)`; otherwise they keep it alive.

        with ParallelWrapper(model, workers=2, averaging_frequency=3) as wrapper:
            history = wrapper.fit(x, y, epochs=5, batch_size=64, validation_split=0.1)
            print(wrapper.evaluate(x_test, y_test))

    Args:
        workers, averaging_frequency, ...: see the attributes of `TrainingOptions`.

    Attributes:
        options: the validated `TrainingOptions`.
        placement: the numbers of workers and stages, and their devices.
        layers: the layer names of each pipeline stage; empty without a pipeline.
        synchronizer: the synchronizer. Changes have no effect, because each worker has a copy.
        optimizer: the optimizer, with the scaled learning rate. Between fits, `optimizer.learning_rate` can be set to a
            number, a name or a schedule, which is not scaled. The next `fit` refuses other changes.
        callbacks: the callbacks in the order in which they receive events.
        blas_threads: BLAS threads per worker; 0 on a GPU.
    """

    def __init__(
        self,
        model: Model,
        workers: int | None = None,
        averaging_frequency: int | str | AveragingSchedule | None = None,
        prefetch_buffer: int = 24,
        report_score_after_averaging: bool | None = None,
        average_updaters: bool | None = None,
        *,
        optimizer: Optimizer | str | None = None,
        synchronizer: Synchronizer | None = None,
        learning_rate_scale: str | float = "none",
        accumulation_steps: int = 1,
        devices: Sequence[int] | None = None,
        callbacks: Sequence[Callback] = (),
        log_every: int = 50,
        timeout_s: float = 300.0,
        blas_threads: int | None = None,
        run: Run | str | Path | None = None,
        launcher: str = "thread",
        pipeline: Pipeline | None = None,
        reduce: str = "auto",
        data_on_device: bool | str = "auto",
        progress: str = "auto",
        metrics: Sequence[Metric] = (),
    ) -> None:
        given = locals()  # the signature repeats TrainingOptions for editors and type checkers
        options = TrainingOptions(**{each.name: given[each.name] for each in fields(TrainingOptions)})
        instance("model", model, Model, "Model(network, Image(28, 28, 1), create_backend('numba'))")
        self._build(model, options.check(model.network, model.backend.name, model.backend.device))

    @classmethod
    def of(cls, model: Model, checked: CheckedOptions) -> ParallelWrapper:
        """Create a wrapper from options that were validated for this network and backend."""
        wrapper = cls.__new__(cls)
        wrapper._build(model, checked)
        return wrapper

    def _build(self, model: Model, checked: CheckedOptions) -> None:
        self.model, self.options, self._checked = model, checked.options, checked
        self.placement, self.layers = checked.placement, checked.layers
        self.synchronizer, self.optimizer = checked.synchronizer, checked.optimizer
        options, placement, backend = checked.options, checked.placement, model.backend
        self.callbacks = tuple(sorted(options.callbacks, key=lambda each: each.last))
        by_mpi, timeout_s = options.launcher == "mpi", options.timeout_s
        self._launcher = MpiLauncher(timeout_s) if by_mpi else ThreadLauncher(placement.ranks, timeout_s)
        self._run = None if options.run is None else Run.of(options.run, create=self._launcher.first == 0)
        threads = options.blas_threads or blas.threads_per_worker(backend.name, self._launcher.sharing)
        self.blas_threads = 0 if placement.devices else threads
        self._trainers: list[Trainer | None] = [None] * placement.ranks
        self._rows, self._shared, self._warm = Rows(), Shared(), backend.name == "numpy"
        self._warnings = DataWarnings(speaks=self._launcher.first == 0, metrics=bool(options.metrics))
        self._stop: Stop | None = None  # for workers that have no trainer yet
        self._begun, self._restored = False, False
        self._holds, self._identity = list[Hold](), ""  # the lock and the identity of the run folder
        self._learning_rate: Schedule | None = None  # the schedule of which the workers have copies
        self._rates, self._loss = model.params.rates, model.loss
        self._dropped = weakref.finalize(self, close_or_warn, self._launcher, self._trainers, backend, self._holds)

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_") and "_dropped" in vars(self):
            rate = ", or set wrapper.optimizer.learning_rate" * (name == "optimizer")
            raise AttributeError(f"ParallelWrapper.{name} cannot be set. Create a new wrapper for the model{rate}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        backend, placement = self.model.backend, self.placement
        workers = f"{counted(placement.workers, 'worker')}, {backend.name} in {backend.policy.name}"
        method = f", {self.synchronizer}" if placement.workers > 1 else ""
        progress = next((f", {each.progress}" for each in filter(None, self._trainers)), "")
        return f"<ParallelWrapper: {workers}{method}{progress}>"

    @property
    def warm(self) -> bool:
        """True if all kernels are compiled."""
        return self._warm

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
        """Release the workers and close callbacks. The model remains usable. A second call does nothing.

        Raises RuntimeError if a task such as `fit` is running. Call `stop` first, and wait for the task.
        """
        self._launcher.check_idle()
        self._dropped.detach()
        trainers, self._trainers = self._trainers, [None] * self.placement.ranks
        close(self._launcher, trainers, self.model.backend, self._holds)

    def fit(
        self,
        x: Examples,
        y: Array = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        sample_weight: Array = None,
        class_weight: ClassWeight = None,
        validation_split: float = 0.0,
        validation_data: Examples | None = None,
        evaluate_on: Examples | None = None,
        evaluate_every: int = 1,
    ) -> History:
        """Train for `epochs` more epochs. Afterwards all replicas are identical.

        The rest of an interrupted epoch counts as an epoch (see `Trainer.fit`). If a worker fails, the others stop, its
        exception is raised, and the wrapper must be closed. The model keeps its weights, or the best ones if early
        stopping restores them after a DivergedError.

        Ctrl-C stops after the current iteration (with several workers, within ten iterations) and averages the
        replicas. `fit` then raises KeyboardInterrupt, except in IPython and notebooks, where it returns the history.
        The next `fit` continues. A second Ctrl-C stops at once, and the wrapper must be closed.

        Args:
            x: images (S, H, W, C), or (S, H, W) for one channel: integers from 0 to 255, scaled according to
                `Model.pixels`, or floating-point numbers that are already scaled. Without `y`: a `Loader`, a `Dataset`,
                `Shards`, or pairs (image, label) that are read into memory, such as a PyTorch or Hugging Face data set.
                Samples are shuffled in each epoch, unless the `Loader` has `shuffle=False`.
            y: class indices (S,) from 0, or one-hot labels (S, O). For regression, floating-point targets (S, T), or
                (S,) for one output, which may be integers. Targets are in 0..1 for `binary_cross_entropy` and `hinge`,
                and class probabilities for `softmax`. With `binary_cross_entropy`, integers (S, T) are targets too.
            epochs: additional epochs; 0 only after `restore`, to finish a fit whose epochs are all complete.
            batch_size: batch size per worker, 128 by default. A `Loader` has its own batch size.
            sample_weight: (S,) factors of the samples' losses. The loss of a batch is still divided by its number of
                samples.
            class_weight: {class: loss factor}, with 1 for missing classes; or `balanced` for equal total weights of all
                classes, as in scikit-learn. The factors are multiplied by `sample_weight`.
            validation_split: fraction of the samples to hold out for evaluation, chosen at random from each class, or
                from all samples for floating-point targets. The choice depends only on the labels and the seed of the
                `Loader`. Weights do not apply to these samples.
            validation_data: data to evaluate, recorded as validation: like `x`, or (x, y), or (x, y, sample_weight).
                The weights apply to the loss only.
            evaluate_on: like `validation_data`, but recorded as test.
            evaluate_every: epochs between evaluations; the last epoch is always evaluated.

        Returns:
            The history of this fit. `ParallelWrapper.history` covers all fits.

        Raises:
            ConfigError: an argument is invalid. The model has not changed.
            DivergedError: a loss, a gradient or a weight is not finite (see `Trainer.fit`).
        """
        self._launcher.check_idle()
        if self.model.params.rates != self._rates or self.model.loss is not self._loss:
            raise ConfigError("the learning-rate factors or the loss were replaced. Create a new ParallelWrapper")
        check_unchanged(self.model.loss, "loss")
        self.model.params.check_trainable()
        if self._writes_model:
            self.model.description()  # fail early if the model cannot be saved
        weights = {"sample_weight": sample_weight, "class_weight": class_weight}
        loader = loader_of(examples(x, y), batch_size, self.model, self.model.pixels, **weights)
        loader, held_out, split = held_out_of(loader, self.model, validation_split, validation_data, evaluate_on)
        check_metrics(self.options.metrics, held_out, self.model.loss)
        unfinished = [each for each in filter(None, self._trainers) if each.plan.unfinished]
        epochs = integer("epochs", epochs, 0 if unfinished else 1)
        evaluate_every = integer("evaluate_every", evaluate_every, 1)
        fit = Fit(loader, epochs, held_out, evaluate_every, split)
        self._launcher.agree(self._checked.shared(self.model, fit))
        self._checked.check_data(self.model.network, FitData.of(fit, self.model.loss))
        if self._launcher.first == 0:
            self._claim_folders()
        self._begun = True
        self._warnings.of_fit(fit, self.model, self.placement.workers, unfinished[0].data if unfinished else None)
        before = len(self._rows.kept)
        stopping = stopping_at_interrupt(lambda: self.stop(CTRL_C, StopReason.REQUEST))
        with stopping as interrupted, named(self.model, loader.dataset, self._iteration), self._ending():
            if not self._warm:
                self.on_workers(lambda trainer: trainer.expect(loader))
                self.warm_up(min(loader.batch_size, len(loader.dataset)))
            self.on_workers(lambda trainer: trainer.fit(fit), batch_size=loader.batch_size)
        if self._run is not None and self._writes_model:
            save_model(self.model, self._run.folder / MODEL)
        if interrupted and not hasattr(builtins, "__IPYTHON__"):
            raise KeyboardInterrupt
        return History.of(self._rows.kept[before:])

    def _claim_folders(self) -> None:
        """Lock the run folder. Raise ConfigError if it is in use, or if another run's results would be overwritten."""
        if self._holds:
            self._rows.identity = self._identity  # the folder belongs to this wrapper, whatever was restored
            return
        run = None if self._run is None or self._run.settings is not None else self._run
        if run is not None:
            self._holds.append(Hold(run.folder))
            if self._holds[0].warning:
                log.warning("%s", self._holds[0].warning)
        try:
            if not (self._begun or self._restored):
                for callback in self.callbacks:
                    callback.check_new()
            if run is not None:
                self._identity = self._rows.identity = run.claim(self._rows.identity, continued=self._restored)
        except BaseException:
            release(self._holds)
            raise

    @property
    def _writes_model(self) -> bool:
        return self._run is not None and self._launcher.first == 0 and self._run.settings is None

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Context manager for a fit that notifies callbacks of divergence and cleans up."""
        try:
            yield
        except BaseException as error:
            # PeerFailed carries the exit code of the failed rank
            if isinstance(error, CupynetError) and error.exit_code == DivergedError.exit_code:
                for trainer in filter(None, reversed(self._trainers)):  # end on the model's device
                    trainer.diverged(str(error))
            release(self._holds)  # so that a new wrapper can try again, even if a traceback keeps this one alive
            raise
        finally:
            self._stop = None
            for trainer in filter(None, self._trainers):
                trainer.consensus.request = None
                for callback in trainer.callbacks:
                    if isinstance(callback, Progress | Profile):
                        callback.close()

    def evaluate(self, x: Examples, y: Array = None, *, batch_size: int | None = None) -> Evaluation:
        """Evaluate in parallel on all replicas. The wrapper remains usable after Ctrl-C.

        For the arguments, see `fit`. Like `validation_data`, x may also be (x, y, sample_weight).

        Returns:
            An `Evaluation` with the wrapper's `metrics`, or a `RegressionEvaluation`.

        Raises:
            ConfigError: the pixel scale or the class names differ from training, or the replicas differ because the
                restored checkpoint was written between two averaging steps.
        """
        loader = evaluation_loader(x if y is None else examples(x, y), batch_size, self.model)
        check_metrics(self.options.metrics, loader, self.model.loss)
        self._warnings.of_evaluation(loader, floats=self.model.trained_on == "floats")
        evaluations: list[Evaluation] = []

        def task(trainer: Trainer) -> None:
            if trainer.begin_pass(loader):
                evaluations.append(trainer.evaluate(loader, interrupted))

        with stopping_at_interrupt(lambda: None) as interrupted:
            self.on_workers(task, batch_size=loader.batch_size)
        if interrupted:
            raise KeyboardInterrupt
        if not evaluations:
            raise ConfigError("the replicas are not synchronized. Call fit first")
        return evaluations[0]

    def predict(self, images: Array, batch_size: int = 256) -> Array:
        """Return the scores of images, (N, O) on the host (see `Model.predict`)."""
        return self.model.predict(images, batch_size)

    def checkpoint(self, folder: str | Path) -> Path:
        """Write a checkpoint to `folder` and return its path. Call this between fits."""
        store = Checkpoints(folder)
        run_or_refuse(self.on_workers, lambda trainer: save_between_fits(store, trainer))
        return store.path(self.trainer.iteration)

    def restore(self, path: str | Path) -> None:
        """Restore a checkpoint, or the newest undamaged one in a folder, so that the next `fit` continues bit for bit.

        With a different number of workers, all start from the mean of the replicas. With a different backend or dtype,
        results are equal up to rounding. The log lists such differences. The learning-rate schedule continues too; to
        replace it, set `optimizer.learning_rate` afterwards. The model's pixel scale and class names are restored too.

        Raises:
            ConfigError: there is no checkpoint, or its state does not fit this network, optimizer, schedule,
                synchronizer or number of stages. Nothing has changed.
            DataError: the checkpoint is damaged. Nothing has changed.
        """
        run_or_refuse(self.on_workers, lambda trainer: resume(trainer, path))
        self._restored = True

    def warm_up(self, batch_size: int) -> float:
        """Compile or load all kernels, and return the time in seconds. The first `fit` calls this before training."""
        style = next((each.style for each in self.callbacks if isinstance(each, Progress)), self.options.progress)
        printed = style != "none" and self._launcher.first == 0
        kernels = self.model.backend.name, self.model.backend.policy.name
        known = kernels in _compiled
        _compiled.add(kernels)
        if not known:
            say(log, "loading or compiling kernels ...", printed=printed)

        def task(trainer: Trainer) -> float:
            return warm_up(trainer.replica, batch_size, trainer.synchronizer)

        seconds = self.on_workers(task, batch_size=batch_size) or 0.0
        if not known:
            say(log, f"kernels ready after {seconds:.1f} s", printed=printed)
        self._warm = True
        return seconds

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """Stop the running or next `fit` on all workers after the same iteration, like Ctrl-C. This is thread-safe."""
        self._stop = self._stop or Stop(StopReason(reason), text)
        for trainer in filter(None, self._trainers):
            trainer.consensus.propose(self._stop)

    def on_workers(self, task: Callable[[Trainer], T], *, batch_size: int | None = None) -> T | None:
        """Run `task(trainer)` in the thread of each worker. Return rank 0's result, or None in other processes.

        Raises:
            ClosedError: the wrapper was closed or aborted, or a worker has failed.
            RuntimeError: another task is running.
        """
        rate = self.optimizer.learning_rate

        def done(world: Communicator) -> T:
            with translate_device_errors(self.model.backend, self.placement, world.rank, batch_size):
                trainer = self._trainer(world)
                if rate is not self._learning_rate:
                    trainer.schedule = rate
                with trainer.backend.subnormals_as_zero():
                    result = task(trainer)
                    trainer.backend.synchronize()
                return result

        self.model.backend.synchronize()  # the caller's and the workers' streams do not wait for each other
        with blas.Limit(self.blas_threads) if self.blas_threads else nullcontext():
            result = self._launcher.run(done)
        self._learning_rate = rate
        return result

    @property
    def history(self) -> History:
        """The history of all fits, including those before a `restore`; empty in processes other than rank 0."""
        return History.of(self._rows.kept)

    @property
    def trainer(self) -> Trainer:
        """The trainer of the first local worker. Raises RuntimeError before the first task, and after `close`."""
        for trainer in filter(None, self._trainers):
            return trainer
        raise RuntimeError("nothing has been trained yet, or the wrapper is closed")

    def _iteration(self) -> int:
        return next((trainer.iteration for trainer in filter(None, self._trainers)), 0)

    def replicas(self) -> list[Model]:
        """Return the local replicas in rank order. In a pipeline, each of them holds the layers of one stage."""
        return [trainer.model for trainer in self._trainers if trainer is not None]

    # in a worker ----------------------------------------------------------------------------------------------------

    def _trainer(self, world: Communicator) -> Trainer:
        trainer = self._trainers[world.rank]
        if trainer is None:
            if used := next((each for each in self.callbacks if each.in_use), None):
                kind = type(used).__name__
                reason = f"this object is in use by another ParallelWrapper. Close that one, or create a new {kind}"
                raise ConfigError(reason, "callbacks", kind)
            trainer = self._trainers[world.rank] = self._new_trainer(world)
            if self._stop is not None:
                trainer.consensus.propose(self._stop)
        trainer.callbacks.adopt(self.callbacks)
        trainer.backend.activate()  # a single worker runs in the calling thread, which may differ between calls
        return trainer

    def _new_trainer(self, world: Communicator) -> Trainer:
        """Build a worker's trainer. The first local worker trains the model itself; the others train copies."""
        model, backend, options = self.model, self.model.backend, self.options
        optimizer = copied("optimizer", self.optimizer)
        first = world.rank == self._launcher.first
        if not first:
            device = self.placement.device(world.rank)
            backend = create_backend(backend.name, backend.policy.name, device, **backend.options)
        backend.activate()
        world.attach(backend, options.reduce)
        groups = Groups.grid(world, self.placement.stages)
        if options.pipeline is None:
            replica = replica_of(model if first else model.replicate(backend), optimizer, options.accumulation_steps)
        else:
            replica = Stage(model, optimizer, groups, backend, self.layers, options.pipeline.micro_batches)
        if world.rank == 0:
            callbacks = [self._rows, *self.callbacks]  # first, so that other callbacks find the epoch in the history
            if options.progress != "none" and not any(isinstance(each, Progress) for each in callbacks):
                callbacks.append(Progress(options.progress))
        else:
            callbacks = [copied("callbacks", each) for each in self.callbacks if each.every_rank]
        world.barrier()  # no worker may train before all have copied the model
        return Trainer(
            replica,
            groups=groups,
            synchronizer=copied("synchronizer", self.synchronizer),
            callbacks=callbacks,
            prefetch_buffer=-(-options.prefetch_buffer // self.placement.workers),
            data_on_device=options.data_on_device,
            shared=self._shared,
            log_every=options.log_every,
            run=self._run,
            metrics=options.metrics,
        )
