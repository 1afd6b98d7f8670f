"""The arguments of a ParallelWrapper, and the trainer of each worker that is made from them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cupynet.backend import Shared, check_on_device, create_backend, memory
from cupynet.core.checks import instance, integer, one_of, shown
from cupynet.core.errors import ConfigError
from cupynet.data import Batches
from cupynet.nn import Model, check_batches
from cupynet.optim import Optimizer, Scaled, scale_factor
from cupynet.parallel import Communicator, Groups, Pipeline, Placement, Synchronizer, check_reduce, job
from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.callbacks.history import Rows
from cupynet.training.callbacks.profile import Profile
from cupynet.training.callbacks.progress import STYLES, Progress
from cupynet.training.graph_replica import replica_of
from cupynet.training.memory_estimate import Usage
from cupynet.training.pipeline_stage import Stage
from cupynet.training.replica import Replica, check_accumulate
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class WorkerPlan:
    """The arguments of a `ParallelWrapper`, see there, from which its workers are made.

    Each worker gets a copy of the optimizer and of the synchronizer.

    Attributes:
        processes: True if each worker is a process that mpiexec has started.
        placement: how many workers, of how many stages, and on which devices.
        layers: the names of the layers of each stage; empty without a pipeline.
        rows: the history, on rank 0.

    Raises:
        ConfigError: an argument is not valid.
    """

    model: Model
    workers: int | None
    devices: Sequence[int] | None
    processes: bool
    pipeline: Pipeline | None
    optimizer: Optimizer
    learning_rate_scale: str | float
    synchronizer: Synchronizer
    accumulate: int
    prefetch_buffer: int
    data_on_device: bool | str
    reduce: str
    callbacks: Sequence[Callback]
    progress: str
    report_every: int
    run: Run | None
    placement: Placement = field(init=False)
    layers: list[list[str]] = field(init=False)
    rows: Rows = field(init=False, default_factory=Rows)
    _shared: Shared = field(init=False, default_factory=Shared)

    def __post_init__(self) -> None:
        instance("model", self.model, Model, "Model(network, Image(28, 28, 1), create_backend('numba'))")
        instance("optimizer", self.optimizer, Optimizer, "Nesterov(0.01)")
        instance("synchronizer", self.synchronizer, Synchronizer, "ParameterAveraging(3)")
        if self.pipeline is not None:
            instance("pipeline", self.pipeline, Pipeline, "Pipeline(stages=2)")
        if not isinstance(self.callbacks, Sequence):
            raise ConfigError(
                f"callbacks={shown(self.callbacks)}: must be a list of callbacks, such as [History('history.jsonl')]"
            )
        for each in self.callbacks:
            instance("a callback", each, Callback, "History('history.jsonl')")
        self.callbacks = sorted(self.callbacks, key=lambda each: each.last)
        if sum(isinstance(each, Profile) for each in self.callbacks) > 1:
            raise ConfigError("callbacks: two Profiles would time each other: leave one out")
        self.progress = one_of("progress", self.progress, STYLES)
        self.report_every = integer("report_every", self.report_every, 0)
        self.prefetch_buffer = integer("prefetch_buffer", self.prefetch_buffer, 0)
        self.accumulate = check_accumulate(self.accumulate, self.model.network, self.pipeline)
        network, backend, pipeline = self.model.network, self.model.backend, self.pipeline
        self.data_on_device = check_on_device(self.data_on_device, backend.name)
        stages, most = (1, 1) if pipeline is None else (pipeline.count, pipeline.most(network))
        devices, seats = self.devices, job().seats if self.processes else None
        if devices is None and self.processes and backend.name == "cupy":
            devices = [backend.device]
        self.placement = Placement.of(backend.name, self.workers, devices, backend.device, stages, most, seats)
        workers, stages = self.placement.workers, self.placement.stages
        self.reduce = check_reduce(self.reduce, backend.name, processes=self.processes, stages=stages)
        self.layers = [] if pipeline is None else pipeline.cut(network, stages)
        self.synchronizer.check(workers, stages)
        self.optimizer = _scaled(self.optimizer, self.learning_rate_scale, workers)

    def check(self, loader: Batches) -> None:
        """Refuse batches too small for a layer, or too large for the memory of a single machine. ConfigError."""
        cut = self.accumulate if self.pipeline is None else self.pipeline.micro_batches
        largest = min(loader.batch_size, len(loader.dataset))
        check_batches(self.model.network, largest, cut, self.placement.workers)
        there = memory()
        if there is None or self.placement.devices or self.placement.seats:
            return
        usage = Usage(
            network=self.model.network,
            weights=self.model.params.count,
            policy=self.model.backend.policy,
            optimizer=self.optimizer,
            batch_size=largest,
            workers=self.placement.workers,
            prefetch=self._prefetch * self.placement.workers,
            held=min(self.placement.stages, cut) / cut,
            trained=len(loader.dataset),
        )
        names = {"batch_size": "batch_size", "workers": "workers", "prefetch": "prefetch_buffer", "layer": "layer "}
        refused = usage.refusal(*there, names)
        if refused:
            raise ConfigError(refused)

    @property
    def _prefetch(self) -> int:
        """Batches prepared ahead for each worker."""
        return -(-self.prefetch_buffer // self.placement.workers)

    def trainer(self, world: Communicator, *, own: bool) -> Trainer:
        """Make the trainer of one worker, in its own thread. All workers call it.

        own: this worker trains the model itself; the others train copies.
        """
        model, optimizer, first = self.model, copy.deepcopy(self.optimizer), world.rank == 0
        backend = model.backend
        if not own:
            device = self.placement.device(world.rank)
            backend = create_backend(backend.name, backend.policy.name, device, **backend.options)
        backend.activate()
        world.attach(backend, self.reduce)
        groups = Groups.grid(world, self.placement.stages)
        replica: Replica
        if self.pipeline is None:
            replica = replica_of(model if own else model.replicate(backend), optimizer, self.accumulate)
        else:
            replica = Stage(model, optimizer, groups, backend, self.layers, self.pipeline.micro_batches)
        synchronizer = copy.deepcopy(self.synchronizer)
        callbacks = [each if first else copy.deepcopy(each) for each in self.callbacks if first or each.every_rank]
        if first and self.progress != "none" and not any(isinstance(each, Progress) for each in callbacks):
            callbacks.append(Progress(self.progress))
        if first:  # runs first, so that other callbacks find the epoch in the history
            callbacks.insert(0, self.rows)
        world.barrier()  # all have copied the model before any trains it
        return Trainer(
            replica,
            groups=groups,
            synchronizer=synchronizer,
            callbacks=callbacks,
            prefetch_buffer=self._prefetch,
            data_on_device=self.data_on_device,
            shared=self._shared,
            report_every=self.report_every,
            run=self.run,
        )


def _scaled(optimizer: Optimizer, scale: str | float, workers: int) -> Optimizer:
    """Return the optimizer with its learning rate scaled."""
    factor = scale_factor(scale, workers)
    if scale != "none":
        log.info("learning rate x %g: learning_rate_scale=%s, workers=%d", factor, scale, workers)
    if factor == 1:
        return optimizer
    optimizer = copy.copy(optimizer)
    optimizer.learning_rate = Scaled(optimizer.learning_rate, factor)
    return optimizer
