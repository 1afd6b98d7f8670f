"""Settings turned into the objects of a run: what the commands share.

An `Experiment` is made, and so checked, before anything is written: names are resolved, constructors have refused what
they cannot take, and the network's shapes are inferred without allocating a weight. What each worker needs is made by
the worker, in its thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from cupynet import processor
from cupynet.backend import Backend, available_cores, create_backend, device_count, select_backend
from cupynet.data import Data, Dataset, Loader, Source
from cupynet.errors import ConfigError
from cupynet.nn import Image, Layer, Loss, Model, Params, build, check_loss, check_output
from cupynet.optim import Optimizer
from cupynet.parallel import Communicator, ParameterAveraging, WorkerTeam, most_blas_threads
from cupynet.parts import build_as
from cupynet.settings import Settings, size
from cupynet.training import Callback, EpochRecord, Trainer

log = logging.getLogger(__name__)

MOST_CPU_WORKERS = 4  # by default: more replicas than this change how a run learns


class Experiment:
    """One run: what it computes on, on how many workers, and the parts its settings name.

    Raises:
        ConfigError: the settings name something that cannot work here; the message begins with the setting.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        priority = settings.backend.priority
        self.backend_name, self.backend_reason = select_backend(
            settings.backend.name, gpu_priority=priority.gpu, cpu_priority=priority.cpu
        )
        self.devices = self._devices()
        self.workers = settings.workers or len(self.devices) or min(available_cores(), MOST_CPU_WORKERS)
        self.source: Source = self._part("data", Source)
        self.loss: Loss = self._part("loss", Loss)
        self._part("optimizer", Optimizer)
        self._check_network()

    def _devices(self) -> list[int]:
        """The GPUs to use; none on a CPU."""
        there, asked = device_count(self.backend_name), self.settings.devices
        if not there and asked is not None:
            raise ConfigError(f"devices={asked}: backend {self.backend_name} runs on the CPU; leave devices=null")
        for device in asked or ():
            if device >= there:
                raise ConfigError(f"devices={asked}: there is no device {device}, this machine has {there}")
        return list(range(there)) if asked is None else asked

    def _part(self, name: str, kind: type) -> Any:
        """The part that the group `name` stands for, which must be a `kind`."""
        return build_as(kind, getattr(self.settings, name), name, self.settings.trusted_modules)

    def _check_network(self) -> None:
        """Infer the network's shapes without allocating anything."""
        network = self._part("model", Layer)
        try:
            output = build(network, self.input, Params(), create_backend("numpy", self.settings.dtype))
            check_loss(network, self.loss)
            check_output(output, self.source.classes)
        except ConfigError as error:
            raise ConfigError(f"model: {error}") from error

    @property
    def input(self) -> Image:
        """What one example is."""
        return Image(*self.source.image_shape)

    def device_names(self) -> list[str]:
        """The device of each worker, in rank order."""
        return [f"cuda:{self._device(rank)}" if self.devices else "cpu" for rank in range(self.workers)]

    def _device(self, rank: int) -> int:
        return self.devices[rank % len(self.devices)] if self.devices else 0

    def team(self) -> WorkerTeam:
        """The workers, each with its share of the cores."""
        most, timeout_s = most_blas_threads(self.backend_name), self.settings.parallel.timeout_s
        return WorkerTeam(self.workers, timeout_s, limit_blas=not self.devices, most_blas_threads=most)

    # what a worker makes --------------------------------------------------------------------------------------------

    def backend(self, rank: int) -> Backend:
        """A new backend for worker `rank`, on its device, made current in the calling thread."""
        backend = create_backend(self.backend_name, self.settings.dtype, self._device(rank))
        backend.activate()
        return backend

    def model(self, backend: Backend) -> Model:
        """The model with its initial weights."""
        return Model(self._part("model", Layer), self.input, backend, self.settings.seed, self.loss)

    def optimizer(self) -> Optimizer:
        """A new optimizer."""
        optimizer: Optimizer = self._part("optimizer", Optimizer)
        return optimizer

    def trainer(self, communicator: Communicator, callbacks: Sequence[Callback] = ()) -> Trainer:
        """A trainer with a new replica for this worker."""
        parallel = self.settings.parallel
        averaging = ParameterAveraging(
            communicator,
            parallel.averaging_frequency,
            average_updaters=parallel.average_updaters,
            report_score=parallel.report_score_after_averaging,
        )
        return Trainer(
            self.model(self.backend(communicator.rank)),
            self.optimizer(),
            communicator=communicator,
            synchronizer=averaging,
            callbacks=callbacks,
            prefetch_buffer=-(-parallel.prefetch_buffer // self.workers),
            report_every=self.settings.report_every_iterations,
        )

    # data -----------------------------------------------------------------------------------------------------------

    def train_loader(self, data: Data) -> Loader:
        """Shuffled batches of the training set."""
        return Loader(data.train, self.settings.batch_size, seed=self.source.seed)

    def evaluation_loader(self, dataset: Dataset) -> Loader:
        """Batches in the data set's order."""
        return Loader(dataset, self.settings.batch_size, shuffle=False)

    def announce(self) -> None:
        """Say in the log what computes, and why not something else."""
        if self.backend_reason:
            log.info("no GPU is used: %s", self.backend_reason)
        devices = ", ".join(dict.fromkeys(self.device_names()))
        workers = f"{self.workers} worker{'s' * (self.workers > 1)} on {devices}"
        log.info("backend %s, dtype %s, %s", self.backend_name, self.settings.dtype, workers)
        if processor.chosen:
            log.info("BLAS kernels %s: chosen for AVX-512, set %s to change it", processor.chosen, processor.VARIABLE)
        if not self.devices and self.workers > available_cores():
            log.warning("workers=%d share %d cores: they take turns", self.workers, available_cores())
        if not self.devices and self.settings.dtype == "half":
            log.warning("dtype=half on a CPU is stored in 16 bits and computed in 32: slower than float")

    def callbacks(self) -> list[Callback]:
        """What keeps the memory pools small on the way; nothing to do on a CPU."""
        return [_TrimPools(self)] if self.devices else []

    def limit_memory(self) -> None:
        """Cap the memory pools of the GPUs in use; nothing to do on a CPU."""
        limit = self.settings.memory.device_pool_limit
        if self.devices and limit is not None:
            from cupynet.backend import cuda

            cuda.limit_pools(self.devices, size(limit, share=True))

    def trim_memory(self) -> None:
        """Free what the pools of the GPUs in use keep beyond the memory group's bounds."""
        from cupynet.backend import cuda

        memory = self.settings.memory
        trim, pinned = memory.device_pool_trim_above, memory.pinned_pool_trim_above
        cuda.trim_pools(self.devices, None if trim is None else int(size(trim)), pinned)


class _TrimPools(Callback):
    """Trims the memory pools after each epoch."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self._experiment.trim_memory()
