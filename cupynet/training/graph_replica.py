"""A replica that launches its steps as CUDA graphs, to reduce launch overhead in small networks.

For each batch size, the gradient, the update, and both together are captured on their second run. The first run loads
kernels and allocates memory.

The host enqueues steps without waiting for them, because the device decides whether to apply each update (`judge` in
update.cu). The host reads the results at averaging steps, reports, checkpoints and the end of each epoch. After a
non-finite loss or gradient, the device applies no update until the host has read the results and located the batch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cupynet.backend import Backend, Control, Scaling, Workspace
from cupynet.backend.array import Array
from cupynet.data import Batch
from cupynet.nn import Context, Model
from cupynet.optim import Optimizer
from cupynet.optim.optimizers import Numbers
from cupynet.parallel import Groups, Synchronizer
from cupynet.training.clock import Clock
from cupynet.training.finite_check import check_finite
from cupynet.training.replica import Replica, Step

if TYPE_CHECKING:
    from cupynet.backend.cuda.graph_capture import Recorder

Shape: TypeAlias = "tuple[int, ...]"
log = logging.getLogger(__name__)


class Graphs:
    """The CUDA graphs of one device."""

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self._backend, self._recorder = backend, recorder
        self._launchers: dict[tuple[str, Shape], Callable[[], None]] = {}  # by name and label shape
        self._origin: tuple[Workspace, bool, object] | None = None  # workspace and arguments of `begin`
        self.refused = ""  # why steps cannot be captured; empty if they can
        self.singly = False  # True to launch operations one by one

    def begin(self, *, classifies: bool, memory: object) -> None:
        """Drop graphs captured for another workspace, another kind of labels, or an earlier `CudaTransfer.memory`."""
        origin = self._backend.workspace, classifies, memory
        if self._origin != origin:
            self._origin, self._launchers = origin, {}

    def run(self, name: str, shape: Shape, work: Callable[[Shape], None]) -> None:
        """Run `work(shape)`: eagerly the first time, with capture the second time, and later by launching the graph."""

        def eagerly() -> None:
            with self._recorder.steered():
                work(shape)

        key = name, shape
        if self.singly:
            eagerly()
        elif key in self._launchers:
            self._launchers[key]()
        else:
            with self._recorder.first():
                eagerly()
            self._launchers[key] = lambda: self._capture(key, eagerly)

    def _capture(self, key: tuple[str, Shape], eagerly: Callable[[], None]) -> None:
        """Capture and launch a graph. If capture fails, launch operations one by one from now on."""
        try:
            self._launchers[key] = self._recorder.record(eagerly)
        except Exception as error:
            failure = self._backend.failure(error, self._backend.device)
            if failure is not None and failure.of_memory:
                raise
            if not self.refused:
                log.warning("operations are launched one by one: %s cannot be captured (%s)", key[0], error)
            self._launchers[key], self.refused = eagerly, f"{key[0]} cannot be captured ({error})"
        self._launchers[key]()


class Inputs:
    """Input arrays of captured steps, by label shape (N,) or (N, T). `draws` is True if a layer uses random numbers."""

    def __init__(self, backend: Backend, *, draws: bool) -> None:
        self._backend, self.draws = backend, draws
        self._arrays: dict[Shape, tuple[Array, Array, Array | None]] = {}  # images, labels, samples if `draws`
        self.epoch: Array = backend.asarray(np.zeros(1, np.int64))  # (1,), on the device
        self._epoch = 0  # host copy of `epoch`
        self.source: Any = None  # the `CudaTransfer` from which the step takes its batch; None if `load` has copied it

    def of(self, shape: Shape) -> tuple[Array, Array, Array | None]:
        return self._arrays[shape]

    def load(self, batch: Batch, source: Any = None) -> Shape:
        """Copy a batch to the input arrays, unless the step takes it from `source`. Return the shape of its labels."""
        shape, backend, self.source = batch.label_shape, self._backend, source
        if shape not in self._arrays:
            images = batch.images if batch.steady else backend.allocate(batch.images.shape, batch.images.dtype)
            samples = backend.allocate((len(batch),), np.int64) if self.draws else None
            self._arrays[shape] = images, backend.allocate(shape, batch.labels.dtype), samples
        if self.draws and batch.epoch != self._epoch:
            self.epoch[...] = self._epoch = batch.epoch
        if source is not None:
            source.seek(vars(batch)["part"])
            return shape
        images, labels, samples = self._arrays[shape]
        if backend.data_ptr(images) != backend.data_ptr(batch.images):
            images[...] = batch.images
        labels[...] = batch.labels
        if samples is not None:
            samples[...] = backend.asarray(np.asarray(batch.samples, np.int64))
        return shape


class GraphReplica(Replica):
    """A replica that launches its steps as CUDA graphs. Layers, loss and optimizer must be `capturable`."""

    def __init__(self, model: Model, optimizer: Optimizer, recorder: Recorder) -> None:
        super().__init__(model, optimizer)
        self._recorder = recorder
        self.graphs = Graphs(model.backend, recorder)
        self._inputs = Inputs(model.backend, draws=any(layer.uses_rng for layer in model.network.walk()))
        self._scale: float | None = None  # loss scale on the device; None if unknown
        self._batch: Batch | None = None  # batch of the step that `update` launches
        self._reload: Callable[[int], Batch] | None = None
        self._stop = 0  # iteration at the planned end of the fit
        self._memory: object = None  # `CudaTransfer.memory` from which captured steps take batches
        self._iterations = 0  # iterations that ran ahead since `complete`
        self._launched: list[int] = []  # iterations in which a step was launched
        self._sums: tuple[Array, Array] = (None, None)  # sums of losses and hits
        self._may_run_ahead = False
        self._norm: Array | None = None  # squared gradient norm for the update

    # separate graphs for gradient and update -------------------------------------------------------------------------

    def join(self, groups: Groups, synchronizer: Synchronizer, clock: Clock) -> None:
        super().join(groups, synchronizer, clock)
        self._may_run_ahead = synchronizer.may_run_ahead

    def begin(self, reload: Callable[[int], Batch] | None = None, stop: int = 0) -> None:
        super().begin()
        self._reload, self._stop = reload, stop
        self._iterations, self._launched, self._scale = 0, [], None
        self.graphs.begin(classifies=self.classifies, memory=self._memory)

    def gradient(self, batch: Batch | None) -> Step:
        """See `Replica.gradient`. If iterations run ahead, `update` launches the whole step instead."""
        if not self._ahead:
            return super().gradient(batch)
        self._batch, self._iterations = batch, self._iterations + 1
        return Step(batch, 0 if batch is None else len(batch))

    def backpropagate(self, batch: Batch | None) -> int:
        if batch is None:
            return super().backpropagate(None)
        self._send_scale()
        self.graphs.run("gradient", self._inputs.load(batch), self._gradient)
        self.losses, self.hits = self._sums
        return len(batch)

    def update(self, iteration: int, step: Step | None = None) -> None:
        if self._ahead and self._batch is not None:
            self._launch_ahead(iteration, self._batch)
        else:
            super().update(iteration, step)

    def _optimize(self, iteration: int, squared_norm: Array | None) -> None:
        self._send_scale()
        self._steer(iteration)
        self._norm = None if self.optimizer.max_grad_norm is None else squared_norm
        self.graphs.run("update" if self._norm is None else "clipped update", (), self._update)

    def _steer(self, iteration: int) -> None:
        def later() -> Iterator[Numbers]:
            with suppress(Exception):  # later rates may not be known yet; a real error recurs in its own iteration
                optimizer = copy.copy(self.optimizer)  # must not change the original's state
                optimizer.learning_rate = copy.copy(optimizer.learning_rate)
                yield from map(optimizer.numbers, range(iteration + 1, self._stop))

        self._recorder.steer(iteration, self.optimizer.numbers(iteration), later)

    # running ahead of the host --------------------------------------------------------------------------------------

    @property
    def _ahead(self) -> bool:
        return self._reload is not None and self._may_run_ahead and not self.graphs.singly

    def launch_singly(self, wanted: bool) -> None:
        self.complete()
        self.graphs.singly, self._scale = wanted, None  # rewrite the loss scale

    def _launch_ahead(self, iteration: int, batch: Batch) -> None:
        self._batch = None
        self._launched.append(iteration)
        self._send_scale()
        self._steer(iteration)
        memory = None if batch.source is None else batch.source.memory
        if memory is not self._memory:
            self._memory = memory
            self.graphs.begin(classifies=self.classifies, memory=self._memory)
        self.graphs.run("step", self._inputs.load(batch, batch.source), self._step)
        self.updates += 1

    def complete(self) -> None:
        """See `Replica.complete`. Raise DivergedError if a loss or gradient was not finite."""
        iterations, self._iterations = self._iterations, 0
        if iterations:
            with self.clock.measure("compute", "steps that ran ahead"):
                samples = self._read() if self._launched else 0
            self._count(iterations, samples)

    def _read(self) -> int:
        """Wait for the launched steps and return the number of samples they processed."""
        launched, self._launched = self._launched, []
        controls = self._recorder.read()
        self._scale = self.backend.loss_scale = controls[Control.SCALE]
        self.updates -= int(controls[Control.SKIPPED])
        if self.scaler is not None:
            self.scaler.count(int(controls[Control.STEADY]), int(controls[Control.SKIPPED]))
        self._write(used=controls[Control.USED])
        if halted := int(controls[Control.HALTED]):
            self._diverge(launched[halted - 1])
        self.losses, self.hits = controls[Control.LOSSES], int(controls[Control.HITS])
        return int(controls[Control.SAMPLES])

    def _diverge(self, iteration: int) -> None:
        assert self._reload is not None
        super().begin()
        self._scale = None
        batch = self._reload(iteration)
        check_finite(self, Step(batch, self.backpropagate(batch), finite=False))

    # the captured step ----------------------------------------------------------------------------------------------

    def _losses(self, shape: Shape) -> tuple[Array, Array]:
        """Add the gradient to `params.grad`. Return the losses and the number of correct predictions."""
        self.params.snapshot_buffers()
        images, labels, samples = self._inputs.of(shape)
        context = GraphContext(train=True, seed=self.model.seed, epoch=self._inputs.epoch, samples=samples)
        return self._passes(images, labels, lambda part: context)

    def _gradient(self, shape: Shape) -> None:
        losses, hits = self._losses(shape)
        self._sums = self.backend.total(losses), hits

    def _update(self, shape: Shape) -> None:
        self._recorder.take_row()
        self.optimizer.move(self.params, squared_norm=self._norm)

    def _step(self, shape: Shape) -> None:
        source, order = self._inputs.source, None
        if source is not None:
            source.take(*self._inputs.of(shape))
            order = source.order[:1]
        losses, hits = self._losses(shape)
        scaling = Scaling() if self.scaler is None else self.scaler.scaling
        self._norm = self._recorder.judge(losses, self.params.grad, hits, shape[0], scaling, order)
        for buffers in self.params.running:
            self._recorder.undo(buffers, self.params.buffer_snapshot)
        self.optimizer.move(self.params, squared_norm=self._norm)

    def _send_scale(self) -> None:
        if self._scale != self.backend.loss_scale:
            self._scale = self.backend.loss_scale
            self._write(used=self._scale)

    def _write(self, used: float) -> None:
        self._recorder.begin(self.backend.loss_scale, used, 0 if self.scaler is None else self.scaler.steady)


class GraphContext(Context):
    """Context for graph capture. Raises RuntimeError for attributes whose values would be frozen into the graph."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("iteration", "replicas") or (name == "samples" and value is None):
            remedy = "uses_rng = True" if name == "samples" else "capturable = False"
            raise RuntimeError(f"a layer uses context.{name} in a captured step. Set {remedy} in its class")
        return value


def replica_of(model: Model, optimizer: Optimizer, accumulation_steps: int = 1) -> Replica:
    recorder = model.backend.recorder()
    if recorder is None or accumulation_steps > 1:  # only large batches are split, so launch overhead is negligible
        return Replica(model, optimizer, accumulation_steps)
    for each in (*model.network.walk(), model.loss, optimizer):
        if not vars(type(each)).get("capturable", False) or getattr(each, "syncs_replicas", False):
            log.info("operations are launched one by one: %s is not capturable", type(each).__name__)
            return Replica(model, optimizer, accumulation_steps)
    return GraphReplica(model, optimizer, recorder)
