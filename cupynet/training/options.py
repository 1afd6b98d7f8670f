from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from cupynet.core import shared_options
from cupynet.core.checks import flag, instance, integer, one_of, without_prefix
from cupynet.core.described import PLAIN, check_unchanged, stable
from cupynet.core.errors import ConfigError, errors_of
from cupynet.core.wording import setting, shown
from cupynet.data import Shards
from cupynet.nn import BatchNorm, Layer, Loss, Model
from cupynet.optim import Nesterov, Optimizer, Scaled, Schedule, optimizer_of, scale_factor
from cupynet.optim.schedules import ScheduleWrapper
from cupynet.parallel import AveragingSchedule, ParameterAveraging, Pipeline, Placement, Synchronizer, job
from cupynet.parallel.communicators.devices import check_reduce
from cupynet.runs.run import Run
from cupynet.training.callback_list import by_class_name
from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.early_stopping import EarlyStopping
from cupynet.training.callbacks.progress import STYLES
from cupynet.training.callbacks.weight_average import WeightAverage
from cupynet.training.fit import Fit, classifies
from cupynet.training.metrics import Metric, metrics_of
from cupynet.training.regression import evaluation_of

Names: TypeAlias = Sequence[str]


@dataclass(frozen=True, eq=False)
class TrainingOptions:
    """The options of parallel training: the arguments of `ParallelWrapper` except the model.

    Attributes:
        workers: number of replicas. By default, one per GPU; on a CPU, one per core, up to 4; with `mpi`, one per rank.
            For the default with a pipeline, see `Placement.of`.
        averaging_frequency: iterations between averaging steps (3 by default), `epoch`, `end`, or a schedule such as
            `PostLocal`.
        prefetch_buffer: number of batches to prepare in advance, over all workers; 0 disables prefetching.
        report_score_after_averaging: compute the mean loss over all replicas at each averaging step; true by default.
        average_updaters: average the optimizer state with the weights; true by default.
        optimizer: an `Optimizer`, or a name such as `adam` for the default arguments; Nesterov(0.01, 0.9) by default.
            Each worker gets a copy. Wrappers that share an object also share changes to its learning rate.
        synchronizer: a `Synchronizer` to use instead of parameter averaging; each worker gets a copy. Then
            `averaging_frequency`, `report_score_after_averaging` and `average_updaters` must be None.
        learning_rate_scale: factor by which the learning rate is multiplied: `none` (1), `linear` (the number of
            workers), `sqrt` (the square root of this number), or a number. Factors other than 1 apply to a copy of the
            optimizer; to change the rate between fits, set `wrapper.optimizer.learning_rate`.
        accumulation_steps: number of parts into which a batch is split to save memory. Their gradients are accumulated
            for one update. With a pipeline, use `micro_batches` instead.
        devices: GPU indices; the worker with local rank r uses devices[r % len(devices)]. By default all GPUs, or under
            mpiexec the model's GPU. The first worker of this process must be on the model's device.
        callbacks: a list of `Callback`.
        log_every: iterations between `on_log` events and, without a `synchronizer`, between measurements of the drift.
            0 disables the events; the drift is then measured every 50 iterations.
        timeout_s: seconds that a worker waits for the others, and for their callbacks, before it fails.
        blas_threads: BLAS threads per worker on a CPU. By default, 1 with the `numba` backend unless a variable such as
            OMP_NUM_THREADS is set; otherwise the cores are divided among the workers.
        run: the run folder, to which callbacks write on rank 0. It must not contain another run.
        launcher: `thread` or `mpi`. With `mpi`, this process is one worker, and all processes started by mpiexec must
            make the same calls.
        pipeline: a `Pipeline` that splits each replica into stages, one per device or core. The model of rank 0 then
            holds the average only after each evaluation and after `fit`. The models of other processes do not change.
        reduce: how GPU replicas are averaged: `nccl`; `device`, on the first device (Deeplearning4j's legacy
            averaging); `host`; or `auto`. `auto` uses NCCL between several devices if it is installed, except for
            pipelines in threads; otherwise threads use `device` and processes use `host`. On a CPU, only `auto` and the
            equivalent `host` are allowed.
        data_on_device: true to keep the images in GPU memory during a fit or evaluation; `auto` to do so if they take
            at most a quarter of the free memory. For augmented or floating-point images and on a CPU, true is an error.
        progress: style of the default `Progress` callback: `auto`, `bar`, `lines` or `none`.
        metrics: additional evaluation metrics: names, or functions (labels, scores) that return one number for the
            batch or one per sample. For classification: `top_3_accuracy` (any k), `macro_f1`, `precision`, `recall` and
            `auc` (one versus rest). For regression: `auc` for targets 0 and 1. Functions receive each batch on the
            host: class indices (N,) or targets (N, T), then scores (N, O). A single number is weighted by N.
    """

    workers: int | None = None
    averaging_frequency: int | str | AveragingSchedule | None = None
    prefetch_buffer: int = 24
    report_score_after_averaging: bool | None = None
    average_updaters: bool | None = None
    _: KW_ONLY
    optimizer: Optimizer | str | None = None
    synchronizer: Synchronizer | None = None
    learning_rate_scale: str | float = "none"
    accumulation_steps: int = 1
    devices: Sequence[int] | None = None
    callbacks: Sequence[Callback] = ()
    log_every: int = 50
    timeout_s: float = 300.0
    blas_threads: int | None = None
    run: Run | str | Path | None = None
    launcher: str = "thread"
    pipeline: Pipeline | None = None
    reduce: str = "auto"
    data_on_device: bool | str = "auto"
    progress: str = "auto"
    metrics: Sequence[Metric] = ()

    def check(
        self, network: Layer, backend: str, device: int | None = None, data: FitData | None = None, names: Names = ()
    ) -> CheckedOptions:
        """Validate the options and fill in defaults. This is called once per run, before anything is written.

        Args:
            network: the built network; its weights need not be allocated.
            device: the device of the model; None if the model is built later, on the device of the first local worker.
            data: the training data, if known; otherwise call `CheckedOptions.check_data` later.
            names: names of the callbacks in messages; by default their class names.

        Raises:
            ConfigError: an option is invalid. Its `setting` names the option, argument (`pipeline.stages`) or callback.
        """
        options = self._check_values(backend)
        _check_conflicts(_named(options.callbacks, names))
        options._check_accumulation(network)
        placement = options._check_placement(network, backend, device)
        reduce = check_reduce(self.reduce, backend, processes=self.launcher == "mpi", stages=placement.stages)
        layers = [] if options.pipeline is None else options.pipeline.partition(network, placement.stages)
        synchronizer = options._check_synchronizer()
        with errors_of("synchronizer"):
            synchronizer.check(placement.workers, placement.stages)
        optimizer = Nesterov(0.01, 0.9) if self.optimizer is None else optimizer_of(self.optimizer)
        optimizer = _scaled(optimizer, self.learning_rate_scale, placement.workers)
        options, made = replace(options, reduce=reduce), dict(vars(optimizer))
        checked = CheckedOptions(options, placement, layers, synchronizer, optimizer, made)
        if data is not None:
            checked.check_data(network, data, names)
        return checked

    def _check_values(self, backend: str) -> TrainingOptions:
        if self.synchronizer is not None:
            instance("synchronizer", self.synchronizer, Synchronizer, "ParameterAveraging(3)")
        if self.pipeline is not None:
            instance("pipeline", self.pipeline, Pipeline, "Pipeline(stages=2)")
        for name, what in (("callbacks", "callbacks"), ("devices", "GPU indices")):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) and not (name == "devices" and value is None):
                raise ConfigError(f"must be a list of {what}", name, shown(value))
        if self.run is not None and (not isinstance(self.run, Run | str | Path) or self.run == ""):
            raise ConfigError("must be a Run, or the path of a folder", "run", shown(self.run))
        metrics_of(self.metrics)
        return replace(
            self,
            timeout_s=shared_options.timeout_s("timeout_s", self.timeout_s),
            prefetch_buffer=shared_options.prefetch_buffer("prefetch_buffer", self.prefetch_buffer),
            accumulation_steps=shared_options.accumulation_steps("accumulation_steps", self.accumulation_steps),
            callbacks=[
                instance("callbacks", each, Callback, "EarlyStopping() or LambdaCallback(...)")
                for each in self.callbacks
            ],
            log_every=shared_options.log_every("log_every", self.log_every),
            blas_threads=None if self.blas_threads is None else integer("blas_threads", self.blas_threads, 1),
            launcher=shared_options.launcher("launcher", self.launcher),
            data_on_device=shared_options.on_device("data_on_device", self.data_on_device, backend),
            progress=one_of("progress", self.progress, STYLES),
        )

    def _check_synchronizer(self) -> Synchronizer:
        if self.synchronizer is not None:
            for name in ("averaging_frequency", "report_score_after_averaging", "average_updaters"):
                if (value := getattr(self, name)) is not None:
                    raise ConfigError("cannot be combined with synchronizer. Remove one of the two", name, shown(value))
            return self.synchronizer
        frequency, score, updaters = self.averaging_frequency, self.report_score_after_averaging, self.average_updaters
        return ParameterAveraging(
            3 if frequency is None else frequency,
            average_updaters=True if updaters is None else updaters,
            report_score=True if score is None else flag("report_score_after_averaging", score),
            measure_every=self.log_every or 50,
        )

    def _check_placement(self, network: Layer, backend: str, device: int | None) -> Placement:
        ranks = job() if self.launcher == "mpi" else None
        stages: int | None = 1
        max_stages, devices = 1, self.devices
        if self.pipeline is not None:
            with errors_of("pipeline"):
                stages, max_stages = self.pipeline.count, self.pipeline.max_stages(network)
        if ranks is not None and devices is None and device is not None and backend == "cupy":
            devices = [device]
        seats = None if ranks is None else ranks.seats
        placement = Placement.of(backend, self.workers, devices, device or 0, stages, max_stages, seats)
        first = 0 if ranks is None else ranks.rank
        if device is not None and placement.devices and placement.device(first) != device:
            reason = f"replica {first} is the model itself, which is on device {device}. List that device first"
            raise ConfigError(reason, "devices", str(list(placement.devices)))
        return placement

    def _check_accumulation(self, network: Layer) -> None:
        if self.accumulation_steps == 1:
            return
        if self.pipeline is not None:
            reason = (
                "a pipeline already splits batches into micro-batches. Use accumulation_steps=1, and set micro_batches"
            )
            raise ConfigError(reason, "accumulation_steps", str(self.accumulation_steps))
        syncing = next((layer for layer in network.walk() if layer.syncs_replicas), None)
        if syncing is not None:  # replicas may have different numbers of parts
            reason = f"layer '{syncing.path}' exchanges statistics of whole batches with the other replicas"
            raise ConfigError(
                f"{reason}. Use accumulation_steps=1, or sync=false in that layer",
                "accumulation_steps",
                str(self.accumulation_steps),
            )


@dataclass(frozen=True)
class FitData:
    """Properties of training data, which may not be loaded yet."""

    examples: int  # number of examples over all workers
    batch_size: int
    augmented: bool = False
    validates: bool = False  # True if validation data are evaluated during training
    evaluates: bool = True  # True if any data are evaluated during training
    shards: Shards | None = None
    classifies: bool = True
    binary: bool = False  # True if the targets are 0 or 1

    @classmethod
    def of(cls, fit: Fit, loss: Loss) -> FitData:
        train, evaluates = fit.train, fit.evaluate_on is not None
        validates = evaluates and fit.split == "validation"
        shards = train.dataset if isinstance(train.dataset, Shards) else None
        kind, binary = classifies(train.dataset, loss), loss.applies == "sigmoid"
        augmented = bool(train.augment)
        return cls(len(train.dataset), train.batch_size, augmented, validates, evaluates, shards, kind, binary)


@dataclass(frozen=True, eq=False)
class CheckedOptions:
    """Validated options with defaults filled in. `layers` lists the layer names of each pipeline stage."""

    options: TrainingOptions
    placement: Placement
    layers: list[list[str]]
    synchronizer: Synchronizer
    optimizer: Optimizer
    optimizer_made: Mapping[str, Any]  # the attributes of the optimizer, which must not change

    @property
    def parts(self) -> int:
        pipeline = self.options.pipeline
        return self.options.accumulation_steps if pipeline is None else pipeline.micro_batches

    def shared(self, model: Model, fit: Fit) -> dict[str, object]:
        """Return the arguments that must be equal in all processes."""
        return {
            "dtype": model.backend.policy.name,
            "seed": model.seed,
            "optimizer": stable(self.optimizer),
            "synchronizer": str(self.synchronizer),
            **{
                f"synchronizer.{name}": value
                for name, value in vars(self.synchronizer).items()
                if isinstance(value, PLAIN) and not name.startswith("_")
            },
            **{f"network.{layer.path}": stable(layer) for layer in model.network.walk() if layer.path},
            "loss": stable(model.loss),
            "learning_rate_factors": model.params.rates,
            "metrics": [stable(metric) for metric in self.options.metrics],
            "callbacks": [type(each).__name__ for each in self.options.callbacks if each.every_rank],
            "accumulation_steps" if self.options.pipeline is None else "micro_batches": self.parts,
            "log_every": self.options.log_every,
            "epochs": fit.epochs,
            "batch_size": fit.train.batch_size,
            "evaluate_every": fit.evaluate_every,
            fit.split: fit.evaluate_on is not None,
        }

    def check_data(self, network: Layer, data: FitData, names: Names = ()) -> None:
        """Raise ConfigError if the options are invalid for the data. For `names`, see `TrainingOptions.check`."""
        options, workers = self.options, self.placement.workers
        for argument, value in vars(self.optimizer).items():
            if argument != "learning_rate" and repr(value) != repr(self.optimizer_made.get(argument, ...)):
                reason = "cannot be changed in a wrapper. Create a new ParallelWrapper with another optimizer"
                raise ConfigError(reason, f"optimizer.{argument}", shown(value))
        if data.shards is not None:
            with errors_of("workers"):
                data.shards.check_workers(workers)
        if options.accumulation_steps > data.batch_size:
            reason = f"must be at most batch_size, which is {data.batch_size}"
            raise ConfigError(reason, "accumulation_steps", str(options.accumulation_steps))
        if options.data_on_device is True and data.augmented:
            raise ConfigError(
                "images are augmented on the host, so they cannot stay on the device. Use auto or false",
                "data_on_device",
                "true",
            )
        batch = -(-min(data.batch_size, data.examples) // self.parts)
        for layer in network.walk():
            check_unchanged(layer, layer.path)
            if not isinstance(layer, BatchNorm) or layer.frozen:
                continue
            vectors = layer.input.features == layer.input.shape[-1]
            if vectors and batch * (workers if layer.syncs_replicas else 1) == 1:
                raise ConfigError(
                    f"layer '{layer.path}': BatchNorm needs at least two samples at a time. Use larger batches, or "
                    "split them into fewer parts",
                    "batch_size",
                    str(data.batch_size),
                )
        metrics_of(options.metrics, classifies=data.classifies)
        for name, callback in _named(options.callbacks, names).items():
            self._check_figures(name, callback, data)
        rate = self.optimizer.learning_rate
        with errors_of("optimizer"):
            self._check_figures("learning_rate", rate, data)
            check_unchanged(rate.schedule if isinstance(rate, ScheduleWrapper) else rate, "learning_rate")

    def _check_figures(self, name: str, part: Callback | Schedule, data: FitData) -> None:
        """Raise ConfigError if a monitored metric is unknown, or if required reports or evaluations are missing."""
        kind = {"classifies": data.classifies, "binary": data.binary}
        for argument in ("monitor", "best"):
            if isinstance(figure := getattr(part, argument, None), str):
                figures = evaluation_of(1, self.options.metrics, **kind).figures()
                figure = without_prefix(figure, figures)
                one_of(f"{name}.{argument}", figure, figures, ", or a metric that is listed in `metrics`")
                if argument == "best" and not data.evaluates:
                    reason = "needs an evaluation. Pass validation_split=0.1 to fit"
                    raise ConfigError(reason, f"{name}.best", figure)
        if getattr(part, "max_score", None) is not None and not self.options.log_every:
            raise ConfigError("must be at least 1, because `max_score` is checked at each report", "log_every", "0")
        if not part.needs_validation:
            return
        if not data.validates:
            images = setting("data", "validation", 5000, python="fit(..., validation_split=0.1)")
            raise ConfigError(f"requires validation images. Set {images}", name)
        if not self.synchronizer.evaluates and self.placement.workers > 1:
            every = setting("parallel", "averaging_frequency", "epoch")
            reason = f"needs an evaluation after each epoch, but replicas are {self.synchronizer}. Set {every}"
            raise ConfigError(reason, name)


def _named(callbacks: Sequence[Callback], names: Names) -> Mapping[str, Callback]:
    return dict(zip(names, callbacks, strict=True)) if names else by_class_name(callbacks)


def _check_conflicts(callbacks: Mapping[str, Callback]) -> None:
    """Raise ConfigError if two callbacks set the final weights, or a callback is listed twice."""
    if len(callbacks) > len({*map(id, callbacks.values())}):
        raise ConfigError("contain the same object twice, which would receive every event twice", "callbacks")
    weights = [
        name
        for name, each in callbacks.items()
        if isinstance(each, WeightAverage) or (isinstance(each, EarlyStopping) and each.restore_best_weights)
    ]
    if len(weights) > 1:
        remedy = "Set restore_best_weights=false in EarlyStopping, or remove one of them"
        raise ConfigError(f"{weights[0]} and {weights[1]} both set the final weights. {remedy}.")


def _scaled(optimizer: Optimizer, scale: str | float, workers: int) -> Optimizer:
    factor = scale_factor(scale, workers)
    if factor == 1:
        return optimizer  # not a copy, so that the user may also set the learning rate of the original
    optimizer = copy.copy(optimizer)
    optimizer.learning_rate = Scaled(optimizer.learning_rate, factor)
    return optimizer
