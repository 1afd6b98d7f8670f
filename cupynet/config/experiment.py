"""Build the objects of a run from its settings.

An `Experiment` is created before anything is written. It resolves names, lets constructors validate their arguments and
infers the shapes of the network without allocating weights. `Experiment.wrapper` builds what trains.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from cupynet.backend import Backend, DtypePolicy, available_cores, blas, create_backend, memory, select_backend
from cupynet.backend.cuda.gpus import NOT_INSTALLED, has_driver
from cupynet.config.instantiate import build_as, check_modules, naming
from cupynet.config.memory_estimate import replica_bytes
from cupynet.config.schema import Settings, size
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.shared_options import on_device
from cupynet.core.wording import amount, counted, written
from cupynet.data import Data, Dataset, Loader, Sharded, Source, as_loader
from cupynet.data.dataset import in_turns
from cupynet.nn import Image, Layer, Loss, Model, Params, check_loss, check_output
from cupynet.optim import Optimizer, Schedule
from cupynet.parallel import GradientSharing, Pipeline, Placement, Synchronizer, check_reduce, job
from cupynet.runs.run import Run
from cupynet.training import Callback, ParallelWrapper, Pools, Profile
from cupynet.training.callbacks.base import check_decisions
from cupynet.training.fit import check_batches
from cupynet.training.replica import check_accumulate

T = TypeVar("T")
log = logging.getLogger(__name__)


class Experiment:
    """The backend, the workers and the parts of a run.

    Attributes:
        settings: the settings of the run.
        backend_name: the backend; `backend_reason`: why it is not the preferred one, or None.
        placement: the workers and their devices.
        rank: of this process; 0 unless mpiexec started several.
        source, network, loss, optimizer, synchronizer, pipeline, callbacks: the parts; pipeline is None if replicas
            are not cut into stages.
        tests: True to evaluate on the test images too if there are validation images.

    Args:
        stages: stages of each replica of a resumed run, used if the settings do not fix them.

    Raises:
        ConfigError: the settings cannot work here; the message begins with the setting.
    """

    def __init__(self, settings: Settings, stages: int | None = None) -> None:
        check_modules(settings.trusted_modules)
        self.settings, self.tests = settings, True
        self._open = False  # True if the settings leave the number of stages open
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
        self.loss = self._part("loss", settings.loss, Loss)
        self.optimizer = self._part("optimizer", settings.optimizer, Optimizer)
        self.synchronizer = self._part("parallel.synchronizer", settings.parallel.synchronizer, Synchronizer)
        self.network = self._part("model", settings.model, Layer)
        self._callbacks = {
            f"callbacks.{name}": self._part(f"callbacks.{name}", part, Callback)
            for name, part in settings.callbacks.items()
            if part is not None
        }
        self.callbacks = list(self._callbacks.values())
        check_decisions(self._callbacks)
        self.pipeline = self._pipeline(stages)
        with naming("data", settings.data):
            self.source.check()
        with naming("loss", settings.loss):
            self.loss.check(self.source.classes)
        self._built, self._params = copy.deepcopy(self.network), Params()  # shapes and weights, which are not allocated
        described_on = self._backend()
        with naming("model"):
            self._built.build(self.input, self._params.scope(), described_on)
            check_loss(self._built, self.loss)
            check_output(self._built, self.source.classes)
        self.placement = self._place()
        self._check_workers()
        self._check_validation()

    def _check_workers(self) -> None:
        """Refuse what the constructors of workers would refuse after the folder is written. ConfigError."""
        settings, parallel, stages = self.settings, self.settings.parallel, self.placement.stages
        check_accumulate(settings.accumulate, self._built, self.pipeline)
        if settings.accumulate > settings.batch_size:
            raise ConfigError(
                f"accumulate={settings.accumulate}: must be at most batch_size, which is {settings.batch_size}"
            )
        with naming("parallel.synchronizer", parallel.synchronizer):
            self.synchronizer.check(self.placement.workers, stages)
        with naming("parallel", vars(parallel)):
            check_reduce(parallel.reduce, self.backend_name, processes=self.job is not None, stages=stages)
        with naming("memory", vars(settings.memory)):
            on_device("data_on_device", settings.memory.data_on_device, self.backend_name)
        if settings.memory.data_on_device is True and getattr(self.source, "augment", None):
            raise ConfigError(
                "memory.data_on_device=true: images are augmented on the host. Use auto, or data.augment=[]"
            )

    def check_batches(self) -> None:
        """Refuse training batches too small for a layer that learns statistics from them. ConfigError."""
        batch = min(self.settings.batch_size, self.source.expected().get("train", self.settings.batch_size))
        check_batches(self._built, -(-batch // self._cut), self.placement.workers)

    def _part(self, key: str, node: Any, kind: type[T]) -> T:
        """Build the part that `node` of the settings describes, which must be a `kind`. ConfigError."""
        return build_as(kind, node, key, self.settings.trusted_modules)

    def _pipeline(self, stages: int | None) -> Pipeline | None:
        """Build the pipeline, with `stages` if the settings do not fix their number; None if there is none."""
        node = self.settings.parallel.pipeline
        if node is None:
            return None
        pipeline = self._part("parallel.pipeline", node, Pipeline)
        if pipeline.count is None:
            self._open, pipeline.stages = True, stages
        return pipeline

    def _check_validation(self) -> None:
        """Refuse parts that compare epochs if there are no validation images or no evaluations. ConfigError."""
        choosers: dict[str, Callback | Schedule] = {**self._callbacks}
        choosers["optimizer.learning_rate"] = self.optimizer.learning_rate
        for name in (name for name, chooser in choosers.items() if chooser.needs_validation):
            if not getattr(self.source, "validation", True):
                raise ConfigError(f"{name}: needs validation images: hold some out, such as data.validation=5000")
            if not self.synchronizer.evaluates and self.placement.workers > 1:
                raise ConfigError(
                    f"{name}: compares epochs, and replicas {self.synchronizer} are not evaluated after each: set "
                    "parallel.averaging_frequency=epoch"
                )

    def _backend(self, device: int = 0) -> Backend:
        """Create the backend with its settings. ConfigError."""
        options = self.settings.backend
        with naming("backend", vars(options)):
            return create_backend(
                self.backend_name,
                self.settings.dtype,
                device,
                max_block_size=options.max_block_size,
                max_grid_size=options.max_grid_size,
                tf32=options.tf32,
            )

    def _place(self) -> Placement:
        """Place the workers, each a stage of a replica of the built network, on devices. ConfigError."""
        stages: int | None = 1
        most = 1
        if self.pipeline is not None:
            with naming("parallel.pipeline", self.settings.parallel.pipeline):
                stages, most = self.pipeline.count, self.pipeline.most(self._built)
        settings = self.settings
        # if the settings do not fix workers either, there is one replica, in new and resumed runs
        alone = self._open and self.job is None
        return Placement.of(
            self.backend_name,
            1 if alone and settings.workers is None else settings.workers,
            settings.devices,
            stages=stages,
            most_stages=most,
            seats=None if self.job is None else self.job.seats,
        )

    @property
    def _cut(self) -> int:
        """The number of parts into which a replica cuts a batch."""
        return self.settings.accumulate if self.pipeline is None else self.pipeline.micro_batches

    @property
    def input(self) -> Image:
        """The shape of one image."""
        return Image(*self.source.image_shape)

    # models ---------------------------------------------------------------------------------------------------------

    def model(self) -> Model:
        """Return a new model with its initial weights, on the device of this process's first worker."""
        backend = self._backend(self.placement.device(self.rank))
        model = Model(self.network, self.input, backend, self.settings.seed, self.loss)
        model.class_names = tuple(self.source.class_names)
        return model

    def own_callbacks(self) -> list[Callback]:
        """Return the callbacks of one run."""
        rounds = self.settings.profile
        profile = [] if rounds is False else [Profile() if rounds is True else Profile(rounds)]
        return [*copy.deepcopy(self.callbacks), *self.pools(), *profile]

    def wrapper(
        self, run: Run | None = None, callbacks: Sequence[Callback] | None = None, **changes: Any
    ) -> ParallelWrapper:
        """Build a new model and the wrapper that trains it.

        Args:
            changes: further arguments of `ParallelWrapper`, instead of those of the settings.
        """
        settings, parallel = self.settings, self.settings.parallel
        arguments: dict[str, Any] = {
            "workers": self.placement.workers,
            "devices": self.placement.devices or None,
            "optimizer": self.optimizer,
            "synchronizer": self.synchronizer,
            "pipeline": self.pipeline,
            "prefetch_buffer": parallel.prefetch_buffer,
            "learning_rate_scale": parallel.learning_rate_scale,
            "accumulate": settings.accumulate,
            "timeout_s": parallel.timeout_s,
            "launcher": parallel.launcher,
            "reduce": parallel.reduce,
            "data_on_device": settings.memory.data_on_device,
            "callbacks": self.own_callbacks() if callbacks is None else callbacks,
            "report_every": settings.report_every_iterations,
            "progress": "none",  # it is among the callbacks, unless the user removed it
        }
        return ParallelWrapper(self.model(), run=run, **arguments | changes)

    # data -----------------------------------------------------------------------------------------------------------

    def check_shards(self) -> None:
        """Check that there is one shard per worker. ConfigError, DataError."""
        if not isinstance(self.source, Sharded):
            return
        with naming("data", self.settings.data):
            self.source.shards.check_workers(self.placement.workers)

    def check_new(self) -> None:
        """Raise ConfigError if callbacks of a new run would write into the results of another run."""
        for key, part in self._callbacks.items():
            arguments = self.settings.callbacks[key.removeprefix("callbacks.")]
            with suppress(OSError), naming(key, arguments):  # `check_path` reports an OSError
                part.check_new()

    def check_memory(self) -> None:
        """Refuse settings for which the machine or a device has too little memory, on all ranks. ConfigError."""
        refused = self._too_large()
        if self.job is not None:
            refused = self.job.first_word(refused)
        if refused:
            raise ConfigError(refused)

    def _too_large(self) -> str:
        """Return why the run does not fit into the memory of its devices, or of the machine; "" if it does."""
        settings, placement, network = self.settings, self.placement, self._built
        policy = DtypePolicy.of(settings.dtype)
        examples = settings.batch_size * min(placement.stages, self._cut) / self._cut
        replica = replica_bytes(network, self._params.count, self.optimizer, policy, examples)
        ranks = placement.ranks if self.job is None else self.job.on_machine
        replicas, pixels = -(-ranks // placement.stages), network.input.features
        if placement.devices:
            from cupynet.backend.cuda import gpus

            limit: tuple[int, str] | None = (gpus.memory(self.devices()), "the device has")
            needed = {use: replicas * size // len(placement.devices) for use, size in replica.items()}
        else:
            limit, counts = memory(), self.source.expected()
            ahead = min(settings.parallel.prefetch_buffer * settings.batch_size, counts.get("train", 0))
            needed = {use: replicas * size for use, size in replica.items()}
            needed["prefetched batches"] = ahead * pixels * policy.storage.itemsize
            needed["images"] = sum(counts.values()) * pixels * (1 if self.job is None else ranks)  # loaded by each rank
        total = sum(needed.values())
        if limit is None or total <= limit[0]:
            return ""
        uses = ", ".join(f"{use} {amount(size)}" for use, size in needed.items())
        return (
            f"batch_size={settings.batch_size}, {counted(placement.workers, 'worker')}: the run needs about "
            f"{amount(total)} of memory ({uses}), and {limit[1]} {amount(limit[0])}: lower batch_size, workers or "
            "parallel.prefetch_buffer, or make the network or the data smaller"
        )

    def load(self) -> Data:
        """Load the data. DataError if they cannot be read, or do not have the shapes that the source declares."""
        try:
            data = self.source.load()
        except OSError as error:  # of a user's source
            raise DataError(f"data {self.source.name!r}: cannot be read ({error})") from error
        data.check(self.source.image_shape, self.source.classes)
        return self._few(data) if self.settings.fast_dev_run else data

    def _few(self, data: Data) -> Data:
        """Return the data of a fast dev run: a few batches of each split for each worker."""
        batches = int(self.settings.fast_dev_run)
        each = batches * self.settings.batch_size

        def few(dataset: Dataset) -> Dataset:
            count = each * self.placement.workers
            return dataset.take(in_turns(dataset.labels, count))

        return replace(
            data,
            name=f"{data.name}, {counted(batches, 'batch')}: a fast dev run",
            train=few(data.train) if isinstance(data.train, Dataset) else data.train.head(each),
            validation=None if data.validation is None else few(data.validation),
            test=few(data.test),
        )

    def train_loader(self, data: Data) -> Loader:
        """Return shuffled batches of the training set."""
        return as_loader(data.train, self.settings.batch_size, seed=self.source.seed, augment=self.source.augment)

    def evaluation_loader(self, dataset: Dataset) -> Loader:
        """Return batches in the data set's order."""
        return Loader(dataset, self.settings.batch_size, shuffle=False)

    # the machine ----------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Log the backend, the workers, and warnings about them."""
        placement = self.placement
        devices = ", ".join(dict.fromkeys(placement.names()))
        stages = f" of {placement.stages} stages" if placement.stages > 1 else ""
        workers = f"{counted(placement.workers, 'worker')}{stages}"
        log.info("backend %s, dtype %s, %s on %s", self.backend_name, self.settings.dtype, workers, devices)
        if reason := self._worth_knowing():
            log.info("%s", reason)
        if self.job is not None and self.job.size > 1:
            log.info("%d ranks, %d of them on this machine", self.job.size, self.job.on_machine)
        elif self.job is not None:
            log.warning("parallel.launcher=mpi: there is only one rank: start mpiexec -n 4 cupynet train ...")
        last = self.network.output_activation
        if self.loss.applies is not None and last != "identity":
            log.warning(
                "model: the last layer has activation %s, and the loss applies %s to its output: use identity",
                *(last, self.loss.applies),
            )
        if self.pipeline is not None and self.pipeline.micro_batches > self.settings.batch_size:
            counts = self.pipeline.micro_batches, self.settings.batch_size
            log.warning("parallel.pipeline.micro_batches=%d: a batch has only %d examples", *counts)
        every = self.settings.parallel.averaging_frequency
        if every is not None and isinstance(self.synchronizer, GradientSharing):
            log.warning("parallel.averaging_frequency=%s is not used: gradients are shared in every iteration", every)
        if placement.devices:
            return
        log.info("BLAS %s", blas.description())
        sharing = placement.ranks if self.job is None else self.job.sharing
        if sharing > available_cores():
            log.warning("%d workers or stages on %d cores: oversubscribed", sharing, available_cores())
        if self.settings.dtype in ("half", "bfloat16"):
            log.warning("dtype=%s is slower than float on a CPU, which computes in 32 bits", self.settings.dtype)

    def _worth_knowing(self) -> str:
        """Return why preferred backends are not used, except that CuPy is missing on a machine without a GPU."""
        reasons = (self.backend_reason or "").split("; ")
        return "; ".join(each for each in reasons if has_driver() or not each.startswith(NOT_INSTALLED))

    def devices(self) -> list[int]:
        """Return the GPUs that this process uses; none on a CPU."""
        devices = list(self.placement.devices)
        return devices if self.job is None or not devices else [self.placement.device(self.rank)]

    def limit_memory(self) -> None:
        """Set the limit of the memory pools of the GPUs in use, or remove the limit of an earlier job."""
        limit, devices = self.settings.memory.device_pool_limit, self.devices()
        if devices:
            from cupynet.backend.cuda import gpus

            gpus.limit_pools(devices, None if limit is None else size(limit, share=True))

    def release_memory(self) -> None:
        """Return the memory of a finished run to the system."""
        gc.collect()  # models have reference cycles
        if self.devices():
            from cupynet.backend.cuda import gpus

            gpus.trim_pools(self.devices(), 0, 0)

    def pools(self) -> list[Callback]:
        """Return the callback that watches and trims the memory pools of GPUs; none on a CPU."""
        placement, memory = self.placement, self.settings.memory
        above = memory.device_pool_trim_above
        if not placement.devices:
            return []
        return [
            Pools(
                [placement.device(rank) for rank in range(placement.ranks)],
                processes=self.job is not None,
                device_above=None if above is None else int(size(above)),
                pinned_above=memory.pinned_pool_trim_above,
            )
        ]


def refuse_fast_dev_run(settings: Settings, command: str) -> None:
    """Raise ConfigError if fast_dev_run is set for a command that measures."""
    if settings.fast_dev_run:
        value = written(settings.fast_dev_run)
        raise ConfigError(f"fast_dev_run={value}: {command} would measure only a few batches. Leave it out.")
