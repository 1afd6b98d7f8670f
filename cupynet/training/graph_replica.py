"""A replica whose steps are CUDA graphs, each launched as a whole.

A step of a small network is a few dozen kernels of a few microseconds each: launching them one by one takes longer than
running them. The gradient, the update, and both as one are captured for each batch size the second time. The first time
the operations are launched one by one, which loads kernels and allocates.

Steps can run ahead of the host: the device decides whether a step is made (`judge` in update.cu); the host reads the
result at an average, a report or the end of an epoch. After the first loss or gradient that is not finite the replica
halts until then, so that nothing of it is used and the batch can be found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from cupynet.backend import Control, Recorder, Scaling, Workspace
from cupynet.backend.array import Array
from cupynet.data import Batch
from cupynet.nn import Context, Model
from cupynet.optim import Optimizer
from cupynet.parallel import parts
from cupynet.training.replica import Replica, Settled, Step

log = logging.getLogger(__name__)

SPOILED = range(900, 908)  # cudaErrorStreamCapture...: another thread invalidated the capture
ATTEMPTS = 3  # to capture, if spoiled


class GraphReplica(Replica):
    """A replica that launches its steps as CUDA graphs, see the top of this file.

    Args:
        model: all of whose layers, and whose loss, are `recordable`.
        optimizer: likewise.
        recorder: of the model's backend.
        accumulate: see `Replica`.

    Attributes:
        refused: what could not be captured, and why; "" if all could be.
    """

    def __init__(self, model: Model, optimizer: Optimizer, recorder: Recorder, accumulate: int = 1) -> None:
        super().__init__(model, optimizer, accumulate)
        self._recorder = recorder
        self._inputs: dict[int, tuple[Array, Array]] = {}  # images and labels by batch size
        self._draws = any(layer.uses_rng for layer in model.network.walk())
        self._samples: dict[int, Array] = {}  # by batch size, if a layer uses random numbers
        self._epoch: Array = model.backend.asarray(np.zeros(1, np.int64))
        self._epoch_there = 0
        self._known: dict[tuple[str, int], Callable[[], None]] = {}  # by name and batch size
        self._workspace: Workspace | None = None  # of the thread that captured these
        self._spoiled: dict[tuple[str, int], int] = {}  # failed captures
        self._scale: float | None = None  # on the device; None if unknown
        self._ahead = False
        self._batch: Batch | None = None  # of the step that `update` launches
        self._launched: dict[int, bool] = {}  # since `settle`: iteration -> had a batch
        self._loss: Array = None
        self.refused = ""
        self._singly = self._wanted_ahead = False
        self._norm: Array | None = None  # of the gradient, for the update
        self._sum: Array = None  # of the losses of parts of a batch

    # one part at a time ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Replica.begin`."""
        super().begin()
        self._launched, self._scale = {}, None
        if self._workspace is not self.backend.workspace:  # another thread has other buffers
            self._workspace, self._known = self.backend.workspace, {}

    def gradient(self, batch: Batch | None) -> Step:
        """See `Replica.gradient`. If steps run ahead, `update` computes the gradient too."""
        if not self._ahead:
            return super().gradient(batch)
        self._batch = batch
        return Step(batch, ahead=True)

    def backpropagate(self, batch: Batch | None) -> int:
        """See `Replica.backpropagate`."""
        if batch is None:
            self.params.snapshot_buffers()
            self.losses = 0.0
            return 0
        self._tell()
        self._run("gradient", self._take(batch), self._gradient)
        self.losses = self._loss
        return len(batch)

    def update(self, iteration: int, squared_norm: Array | None = None) -> None:
        """See `Replica.update`."""
        if self._ahead:
            self._launch_ahead(iteration)
        else:
            super().update(iteration, squared_norm)

    def _optimize(self, iteration: int, squared_norm: Array | None) -> None:
        self._tell()
        self._recorder.steer(self.optimizer.numbers(iteration))
        self._norm = None if self.optimizer.max_grad_norm is None else squared_norm
        self._run("update" if self._norm is None else "clipped update", 0, self._update)

    # ahead of the host ----------------------------------------------------------------------------------------------

    def run_ahead(self, wanted: bool) -> None:
        self._wanted_ahead = wanted
        self._ahead = wanted and not self._singly

    def launch_singly(self, wanted: bool) -> None:
        self._singly, self._scale = wanted, None  # write the loss scale to the device again
        self._ahead = self._wanted_ahead and not wanted

    def _launch_ahead(self, iteration: int) -> None:
        batch, self._batch = self._batch, None
        self._launched[iteration] = batch is not None
        if batch is not None:
            self._tell()
            self._recorder.steer(self.optimizer.numbers(iteration))
            self._run("step", self._take(batch), self._step)
            self.updates += 1

    def settle(self) -> Settled | None:
        """See `Replica.settle`."""
        launched, self._launched = self._launched, {}
        if not launched:
            return None
        made = [iteration for iteration, had_batch in launched.items() if had_batch]
        if not made:
            return Settled(len(launched), 0, 0.0, None)
        controls = self._recorder.read()
        self._scale = self.backend.loss_scale = controls[Control.SCALE]
        self.updates -= int(controls[Control.SKIPPED])
        if self.scaler is not None:
            self.scaler.learn(int(controls[Control.STEADY]), int(controls[Control.SKIPPED]))
        self._write(used=controls[Control.USED])
        halted = int(controls[Control.HALTED])
        halt = made[halted - 1] if halted else None
        return Settled(len(launched), int(controls[Control.SAMPLES]), controls[Control.LOSSES], halt)

    # what is recorded -----------------------------------------------------------------------------------------------

    def _gradient(self, size: int) -> None:
        backend, model, (images, labels) = self.backend, self.model, self._inputs[size]
        context = GraphContext(train=True, seed=model.seed, epoch=self._epoch, samples=self._samples.get(size))
        self.params.snapshot_buffers()
        cut = parts(size, self.accumulate)
        for part in cut:
            own = context
            if len(cut) > 1 and self._draws:
                own = GraphContext(train=True, seed=model.seed, epoch=self._epoch, samples=self._samples[size][part])
            with backend.loans():
                logits, backward = model.forward(images[part], own)
                losses, gradient = model.loss(backend, logits, labels[part])
                if len(cut) > 1:
                    gradient *= (part.stop - part.start) / size
                backend.give_back(backward(gradient))
                total = backend.total(losses)
            if len(cut) > 1:
                total = self._added(total, first=part.start == 0)
        self._loss = total

    def _added(self, total: Array, *, first: bool) -> Array:
        """Return the sum over the parts of a batch so far; `total` is overwritten by the next part."""
        if self._sum is None:
            self._sum = self.backend.allocate((), total.dtype)
        if first:
            self._sum[...] = total
        else:
            self._sum += total
        return self._sum

    def _update(self, size: int = 0) -> None:
        self.optimizer.move(self.params, squared_norm=self._norm)

    def _step(self, size: int) -> None:
        self._gradient(size)
        scaling = Scaling() if self.scaler is None else self.scaler.scaling
        self._norm = self.backend.squared_norm(self.params.grad)
        self._recorder.judge(self._loss, self._norm, size, scaling)
        for buffers in self.params.running:
            self._recorder.undo(buffers, self.params.buffer_snapshot)
        self._update()

    # how ------------------------------------------------------------------------------------------------------------

    def _take(self, batch: Batch) -> int:
        """Copy a batch to the inputs of the graphs; return its size."""
        size, backend = len(batch), self.backend
        if size not in self._inputs:
            images = batch.images if batch.steady else backend.allocate(batch.images.shape, batch.images.dtype)
            self._inputs[size] = images, backend.allocate(batch.labels.shape, batch.labels.dtype)
        images, labels = self._inputs[size]
        if backend.address(images) != backend.address(batch.images):
            images[...] = batch.images
        labels[...] = batch.labels
        if self._draws:
            self._take_numbers(batch)
        return size

    def _take_numbers(self, batch: Batch) -> None:
        """Copy to the device what seeds random numbers."""
        samples = self.backend.asarray(np.asarray(batch.samples, np.int64))
        there: Array = self._samples.setdefault(len(batch), samples)
        there[...] = samples
        if batch.epoch != self._epoch_there:
            self._epoch[...] = batch.epoch
            self._epoch_there = batch.epoch

    def _run(self, name: str, size: int, work: Callable[[int], None]) -> None:
        """Do it: operation by operation the first time, then by one launch."""

        def plainly() -> None:
            with self._recorder.steered():
                work(size)

        key = name, size
        known = self._known.get(key)
        if self._singly:
            plainly()
        elif known is None:
            with self._recorder.first():
                plainly()
            self._known[key] = lambda: self._first_recorded(key, plainly)
        else:
            known()

    def _first_recorded(self, key: tuple[str, int], work: Callable[[], None]) -> None:
        """The second time: capture it; if that fails, launch operation by operation.

        Another thread may have spoiled the capture: then it is tried again, a few times.
        """
        try:
            self._known[key] = self._recorder.record(work)
        except Exception as error:
            failed = self.backend.failure(error, self.backend.device)
            if failed is not None and failed.of_memory:
                raise
            spoiled = failed is not None or getattr(error, "status", 0) in SPOILED
            self._spoiled[key] = self._spoiled.get(key, 0) + 1
            if spoiled and self._spoiled[key] < ATTEMPTS:
                log.debug("%s could not be recorded (%s): tried again at the next", key[0], error)
                work()
                return
            if not self.refused:
                log.warning("each operation is launched by itself: %s cannot be recorded (%s)", key[0], error)
            self._known[key], self.refused = work, f"{key[0]} cannot be recorded ({error})"
        self._known[key]()

    def _tell(self) -> None:
        """Write the loss scale to the device if the host has changed it."""
        if self._scale != self.backend.loss_scale:
            self._scale = self.backend.loss_scale
            self._write(used=self._scale)

    def _write(self, used: float) -> None:
        """Begin a new series of steps on the device."""
        self._recorder.begin(self.backend.loss_scale, used, 0 if self.scaler is None else self.scaler.steady)


class GraphContext(Context):
    """Context for graph capture. Refuses attributes whose values would be frozen into the graph. RuntimeError."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in ("iteration", "replicas") or (name == "samples" and found is None):
            way_out = "say uses_rng = True in its class" if name == "samples" else "say recordable = False in its class"
            raise RuntimeError(f"a layer asks for context.{name} in a step that is recorded: {way_out}")
        return found


def replica_of(model: Model, optimizer: Optimizer, accumulate: int = 1) -> Replica:
    """Return the replica of a model: a GraphReplica if all its parts are recordable."""
    recorder = model.backend.recorder()
    if recorder is None:
        return Replica(model, optimizer, accumulate)
    for each in (*model.network.walk(), model.loss, optimizer):
        if not vars(type(each)).get("recordable", False) or getattr(each, "syncs_replicas", False):
            log.info("each operation is launched by itself: %s is not said to be recordable", type(each).__name__)
            return Replica(model, optimizer, accumulate)
    return GraphReplica(model, optimizer, recorder, accumulate)
