"""Build the objects of a run from its settings."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from cupynet.backend import Backend, create_backend, select_backend
from cupynet.config.instantiate import build_as, check_modules, with_class_weights
from cupynet.config.load_model import weights_of
from cupynet.config.schema import ParallelSettings, Settings, size
from cupynet.core.errors import ConfigError, DataError, errors_of
from cupynet.core.wording import counted
from cupynet.data import Data, LabeledData, Loader, ShardedFiles, Shards, Source
from cupynet.data.dataset import balanced_weights
from cupynet.nn import Image, Layer, Loss, Model, Params, check_loss, check_output
from cupynet.optim import Optimizer
from cupynet.parallel import Pipeline, Placement, Synchronizer, job
from cupynet.runs.run import Run
from cupynet.training import Callback, ParallelWrapper, Pools, Profile, TrainingOptions
from cupynet.training.device_errors import translate_device_errors
from cupynet.training.options import CheckedOptions, FitData
from cupynet.training.replica import Replica

T = TypeVar("T")
log = logging.getLogger(__name__)

# keys of options that belong to a group of settings
KEYS = {each.name: f"parallel.{each.name}" for each in fields(ParallelSettings)}
KEYS["data_on_device"] = "memory.data_on_device"


class Experiment:
    """The backend, the objects and the training options of a run, validated before anything is written.

    The model, the `ParallelWrapper` and the data are created later.

    Args:
        stages: the number of pipeline stages of a resumed run, if the settings do not set it.
        trains: False for evaluation only, without checking the training data.

    Attributes:
        job: the ranks started by mpiexec; None if workers are threads.
        backend_reason: the reason why preferred backends are not used, or None.
        checked: the validated options, with the placement of the workers.
        tests: True to evaluate on test images in addition to validation images.
        class_weights: balanced class weights of the loss, set by `load`; None if not used.

    Raises:
        ConfigError: the settings are invalid on this machine.
    """

    def __init__(self, settings: Settings, stages: int | None = None, *, trains: bool = True) -> None:
        check_modules(settings.trusted_modules)
        self.settings, self.tests = settings, True
        self.job = job() if settings.parallel.launcher == "mpi" else None
        self.rank = 0 if self.job is None else self.job.rank
        backend, seat = settings.backend, 0 if self.job is None else self.job.seats[self.rank]
        self.backend_name, self.backend_reason = select_backend(
            backend.name,
            gpu_priority=backend.priority.gpu,
            cpu_priority=backend.priority.cpu,
            device=settings.devices[seat % len(settings.devices)] if settings.devices else seat,
        )
        self.source = self._part("data", settings.data, Source)  # type: ignore[type-abstract]
        self.loss = self._part("loss", with_class_weights(settings.loss), Loss)
        self.class_weights: list[float] | None = None
        self.optimizer = self._part("optimizer", settings.optimizer, Optimizer)
        self.synchronizer = self._part("parallel.synchronizer", settings.parallel.synchronizer, Synchronizer)
        self.network = self._part("model", settings.model, Layer)
        chosen = {f"callbacks.{name}": part for name, part in settings.callbacks.items() if part is not None}
        self._callbacks = {name: self._part(name, part, Callback) for name, part in chosen.items()}
        self.callbacks = list(self._callbacks.values())
        self.options = self._options(stages)
        self._weights: dict[str, Any] = {}  # from the setting `weights`; empty for random initialization
        if settings.weights is not None and settings.resume is None:
            with errors_of("weights", arguments=()):
                self._weights = weights_of(settings.weights, settings.trusted_modules)
        self._built = self._build(trains)
        self.checked = self._check(self.options, self._fit_data() if trains else None)

    def _part(self, key: str, node: Any, kind: type[T]) -> T:
        return build_as(kind, node, key, self.settings.trusted_modules)

    def _options(self, stages: int | None) -> TrainingOptions:
        settings, parallel = self.settings, self.settings.parallel
        workers, pipeline = settings.workers, None
        if parallel.pipeline is not None:
            pipeline = self._part("parallel.pipeline", parallel.pipeline, Pipeline)
            if pipeline.count is None:
                pipeline.stages = stages
                if self.job is None:
                    workers = workers or 1  # one replica by default, also when resuming
        return TrainingOptions(
            workers=workers,
            prefetch_buffer=parallel.prefetch_buffer,
            optimizer=self.optimizer,
            synchronizer=self.synchronizer,
            learning_rate_scale=parallel.learning_rate_scale,
            accumulation_steps=settings.accumulation_steps,
            devices=settings.devices,
            callbacks=tuple(self.callbacks),
            log_every=settings.log_every,
            timeout_s=parallel.timeout_s,
            launcher=parallel.launcher,
            pipeline=pipeline,
            reduce=parallel.reduce,
            data_on_device=settings.memory.data_on_device,
            metrics=tuple(settings.metrics),
            progress="none",  # conf/callbacks adds it, unless the user removed it
        )

    def _build(self, trains: bool) -> Layer:
        with errors_of("data", self.settings.data):
            self.source.check(trains=trains)
        with errors_of("loss", self.settings.loss):
            self.loss.check(self.source.classes)
        network, params = copy.deepcopy(self.network), Params()
        described_on = self._backend()
        with errors_of("model", arguments=()):
            network.build(self.input, params.scope(), described_on)
            check_loss(network, self.loss)
            if trains:
                check_output(network, self.source.classes)
        if self.source.classes != network.output.features:  # a trained network cannot be changed
            reason = f"has {counted(self.source.classes, 'class')}, but the run has {network.output.features}"
            raise ConfigError(f"{reason}. Use data with the classes of the run", "data")
        if self._weights:
            with errors_of("weights", arguments=()):
                params.unmatched(self._weights)
        weights, frozen = dict(params.named()), dict.fromkeys(self.settings.freeze, 0.0)
        given = {"learning_rate_factors": self.settings.learning_rate_factors or {}, "freeze": frozen}
        for key, factors in given.items():
            with errors_of(key, arguments=()):
                rates = {name: rate for pattern, rate in factors.items() for name in params.matching([pattern])}
                for name, rate in rates.items():
                    weights[name].frozen = not rate
                if trains:
                    params.check_trainable()
        return network

    def _fit_data(self) -> FitData:
        source, batch_size = self.source, self.settings.batch_size
        return FitData(
            examples=source.expected().get("train", batch_size),
            batch_size=batch_size,
            augmented=bool(source.augment),
            validates=source.validates,
            shards=source.shards if isinstance(source, ShardedFiles) else None,
        )

    def _check(self, options: TrainingOptions, data: FitData | None) -> CheckedOptions:
        try:
            return options.check(self._built, self.backend_name, data=data, names=[*self._callbacks])
        except ConfigError as error:
            option, dot, argument = error.setting.partition(".")
            raise ConfigError(error.reason, f"{KEYS.get(option, option)}{dot}{argument}", error.value) from error

    def _backend(self, device: int = 0) -> Backend:
        options = self.settings.backend
        with errors_of("backend", vars(options)):
            return create_backend(
                self.backend_name,
                self.settings.dtype,
                device,
                max_block_size=options.max_block_size,
                max_grid_size=options.max_grid_size,
                tf32=options.tf32,
            )

    @property
    def placement(self) -> Placement:
        return self.checked.placement

    @property
    def input(self) -> Image:
        return Image(*self.source.image_shape)

    # models ---------------------------------------------------------------------------------------------------------

    def model(self) -> Model:
        backend = self._backend(self.placement.device(self.rank))
        with translate_device_errors(backend, self.placement, self.rank, self.settings.batch_size):
            model = Model(self.network, self.input, backend, self.settings.seed, self.loss)
        model.class_names = self.source.class_names
        if self._weights:
            missing, unexpected = model.load_weights(self._weights, strict=False)
            rest = f"; randomly initialized: {', '.join(missing)}" * bool(missing)
            rest += f"; not used: {', '.join(unexpected)}" * bool(unexpected)
            level = logging.INFO if self.rank == 0 else logging.DEBUG
            log.log(level, "loaded weights from %s%s", self.settings.weights, rest)
        model.set_learning_rate_factors(self.settings.learning_rate_factors or {})
        if self.settings.freeze:
            model.freeze(*self.settings.freeze)
        return model

    def own_callbacks(self) -> list[Callback]:
        iterations = self.settings.profile
        profile = [] if iterations is False else [Profile() if iterations is True else Profile(iterations)]
        return [*copy.deepcopy(self.callbacks), *self.pools(), *profile]

    def pools(self) -> list[Callback]:
        """Return a list with the callback that measures and trims GPU memory pools, or [] on a CPU."""
        placement, above = self.placement, self.settings.memory.device_pool_trim_above
        if not placement.devices:
            return []
        return [
            Pools(
                [placement.device(rank) for rank in range(placement.ranks)],
                processes=self.job is not None,
                device_above=None if above is None else int(size(above)),
                pinned_above=self.settings.memory.pinned_pool_trim_above,
            )
        ]

    @contextmanager
    def pools_limited(self) -> Iterator[None]:
        """Context manager that applies the limit of GPU memory pools, and empties them at the end."""
        from cupynet.backend.cuda import gpus

        devices = self.placement.of_process(None if self.job is None else self.rank)  # empty on a CPU
        limit = self.settings.memory.device_pool_limit
        if devices:
            gpus.limit_pools(devices, None if limit is None else size(limit, share=True))
        try:
            yield
        finally:
            gc.collect()  # models have reference cycles
            if devices:
                gpus.limit_pools(devices, None)
                gpus.trim_pools([], None, 0)  # pinned memory

    def wrapper(
        self, callbacks: Sequence[Callback], run: Run | None = None, options: TrainingOptions | None = None
    ) -> ParallelWrapper:
        """Create a new model and its wrapper. `callbacks` and `options` override the settings."""
        checked = self.checked if options is None else self._check(options, None)
        complete = replace(checked.options, run=run, callbacks=callbacks)
        return ParallelWrapper.of(self.model(), replace(checked, options=complete))

    def rehearse(self) -> None:
        """Compile or load the kernels of a training step, using a separate model. Training reports any errors later."""
        with suppress(Exception), np.errstate(all="ignore"):
            optimizer, parts = copy.deepcopy(self.optimizer), self.settings.accumulation_steps
            optimizer.learning_rate.begin_fit(0, 1, epoch=1, epochs=1)
            model = Model(self.network, self.input, self._backend(), self.settings.seed, self.loss)
            replica = Replica(model, optimizer, parts)
            replica.rehearse(replica, 2 * parts)

    # data -----------------------------------------------------------------------------------------------------------

    def check_new(self) -> None:
        """Raise ConfigError if a new run's callbacks would overwrite results of another run."""
        for key, part in self._callbacks.items():
            arguments = self.settings.callbacks[key.removeprefix("callbacks.")]
            with suppress(OSError), errors_of(key, arguments):  # `check_path` reports an OSError
                part.check_new()

    def load(self) -> Data:
        """Load the data. Raise DataError if they are damaged or have other shapes."""
        try:
            data = self.source.load()
        except OSError as error:  # raised by a user's source
            raise DataError(f"data {self.source.name!r}: cannot be read ({error})") from error
        data.check(self.source.image_shape, self.source.classes)
        if len(data.train) and with_class_weights(self.settings.loss) != self.settings.loss:
            self._balance(data.train)
        return data

    def _balance(self, train: LabeledData) -> None:
        """Compute the loss's balanced class weights from the training labels."""
        labels = np.concatenate(train.labels) if isinstance(train, Shards) else train.labels
        with errors_of("loss", self.settings.loss):
            self.class_weights = balanced_weights("class_weights", labels, train.classes).tolist()
        self.loss = self._part("loss", with_class_weights(self.settings.loss, self.class_weights), Loss)

    def train_loader(self, data: Data) -> Loader:
        return Loader(data.train, self.settings.batch_size, self.source.seed, augment=self.source.augment)

    def evaluation_loader(self, dataset: LabeledData) -> Loader:
        return Loader(dataset, self.settings.batch_size, shuffle=False)
