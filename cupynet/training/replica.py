from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.data import Batch
from cupynet.nn import INFERENCE, Context, Model
from cupynet.optim import Optimizer
from cupynet.parallel import Groups, Synchronizer, Tally
from cupynet.parallel.pipeline import parts
from cupynet.parallel.synchronizers.replica_view import by_name, distance, take_by_name
from cupynet.training.clock import Clock
from cupynet.training.loss_scaling import LossScaler

Scores: TypeAlias = "tuple[NDArray[Any], NDArray[Any]]"


class Step(NamedTuple):
    """The gradient of one iteration of a replica.

    Attributes:
        samples: number of samples; 0 if there is no batch, or the step is skipped because its gradient overflowed. The
            gradient is then zero. If iterations run ahead of the host, this is the batch size even if the device skips
            the step.
        squared_norm: |gradient|² over this replica's weights times the squared loss scale; 0-d on the device.
        finite: True if the loss and the gradient are finite.
    """

    batch: Batch | None
    samples: int = 0
    squared_norm: Array | None = None
    finite: bool = True


class Replica:
    """The whole network on one worker. Its subclass `Stage` holds a part of the network.

    Args:
        optimizer: updates the weights of `model`. Replicas must not share an optimizer.
        accumulation_steps: see `TrainingOptions`. Layers such as `BatchNorm` process one part at a time.

    Attributes:
        whole: the whole network in this process; the same as `model`, except in a `Stage`.
        place: backend and device, for messages.
        needs_images: True if batches must have images in addition to labels.
        groups: the communicators of this worker; before `join`, as for a single worker.
        scaler: the loss scaler; None before `join`, and for dtypes that need no loss scaling.
        losses: sum of the losses of the last batch, 0-d on the device; 0.0 without a batch; None in pipeline stages
            without a loss. If iterations run ahead, `complete` sets `losses` to the sum over several batches.
        hits: the number of correct predictions for the same samples as `losses`.
        classifies: False for regression. With `binary_cross_entropy`, `hits` then counts outputs on the correct side of
            1/2. With other losses, `hits` is not meaningful, and tallies receive NaN.
        origin: the indices of the samples in the images that the user passed, for messages; None if they are equal.
        optimizer_state: the optimizer's dictionary of (P,) vectors.
    """

    needs_images = True

    def __init__(self, model: Model, optimizer: Optimizer, accumulation_steps: int = 1) -> None:
        self.model, self.optimizer, self.accumulation_steps = model, optimizer, accumulation_steps
        self.whole, self.params, self.backend = model, model.params, model.backend
        self.place = f"{self.backend.name}, device {self.backend.device}"
        self.updates = 0
        self.groups = Groups.of()
        self.scaler: LossScaler | None = None
        self.clock = Clock()
        self.losses: Array | None = 0.0
        self.hits: Array = 0
        self.classifies = True
        self.label_columns: int | None = None  # see `Loader.label_columns`
        self.origin: Array | None = None
        self._tallies: list[Tally] = []
        self._shares_gradients = self._moves_with_others = False
        optimizer.init(model.params, model.backend)
        self.optimizer_state: Mapping[str, Array] = optimizer.state

    def join(self, groups: Groups, synchronizer: Synchronizer, clock: Clock) -> None:
        self.groups, self.clock = groups, clock
        self._shares_gradients = shared = synchronizer.shares_gradients
        self._moves_with_others = shared and groups.replicas.size > 1
        if self.backend.policy.loss_scale != 1:
            joint = shared or self._syncs
            self.scaler = LossScaler(self.backend, groups.world if joint else groups.stages, joint=joint)

    def tally(self, *, losses: bool = True) -> Tally:
        """Return a new tally of this replica's iterations, and of their losses if `losses` is True."""
        tally = Tally(losses=losses)
        self._tallies.append(tally)
        return tally

    def complete(self) -> None:
        """Wait for enqueued iterations and count them. Only `GraphReplica` enqueues iterations."""

    def begin(self, reload: Callable[[int], Batch] | None = None, stop: int = 0) -> None:
        """Begin a fit that ends at iteration `stop`, or an evaluation. `reload(iteration)` returns an earlier batch."""
        self.params.grad[...] = 0

    def assemble(self) -> None:
        """Copy the weights of all stages to the user's model on rank 0. Only a `Stage` needs this."""

    # one iteration --------------------------------------------------------------------------------------------------

    def gradient(self, batch: Batch | None) -> Step:
        """Compute the gradient of an iteration. Count its samples if it is finite. All workers must call this."""
        if self.scaler is not None:
            self.scaler.grow()
        step, loss_is_finite = Step(None), True
        samples = self.backpropagate(batch)
        if batch is not None:
            norm = self.backend.squared_norm(self.params.grad)
            loss_is_finite = self.losses is None or math.isfinite(float(self.losses))  # None: computed by another stage
            step = Step(batch, samples, norm, math.isfinite(float(norm)) and loss_is_finite)
        if self.scaler is not None:
            overflow = not step.finite and loss_is_finite
            failed = not step.finite and not overflow
            if self.scaler.skips(overflow=overflow, failed=failed, idle=batch is None):
                self.forget()
                step = Step(batch)
        if step.finite:
            self._count(1, step.samples)
        return step

    def _count(self, iterations: int, samples: int) -> None:
        hits = self.hits
        if not self.classifies:
            hits = hits / self.whole.output.features if self._binary else math.nan
        for tally in self._tallies:
            tally.add(iterations, samples, self.losses, hits)

    @property
    def _syncs(self) -> bool:
        return any(layer.syncs_replicas for layer in self.model.network.walk())

    @property
    def _binary(self) -> bool:
        return not self.classifies and self.whole.loss.applies == "sigmoid"

    def _hits(self, logits: Array, labels: Array) -> Array:
        return (self.backend.binary_hits if self._binary else self.backend.hits)(logits, labels)

    def backpropagate(self, batch: Batch | None) -> int:
        """Add the gradient of the mean loss, times the loss scale, to `params.grad`. Return the number of samples.

        If layers exchange values between replicas, a worker without a batch makes the same calls with a dummy sample.
        """
        self.params.snapshot_buffers()
        if batch is not None:
            losses, self.hits = self._passes(batch.images, batch.labels, lambda part: self._context(batch, part))
            self.losses = self.backend.total(losses)
            return len(batch)
        if self.groups.replicas.size > 1 and self._syncs:
            blank = blank_batch(self.model, 1, self.label_columns)
            self._passes(blank.images, blank.labels, lambda part: self._context(blank, part, counts=False))
            self.params.grad[...] = 0
        self.losses, self.hits = 0.0, 0
        return 0

    def _passes(self, images: Array, labels: Array, context_of: Callable[[slice], Context]) -> tuple[Array, Array]:
        """Run the forward and backward passes of each part of a batch. Return losses, (N,) or summed (1,), and hits."""
        model, backend, whole = self.model, self.backend, len(labels)
        total: Array = 0.0
        hits: Array = 0
        for part in parts(whole, self.accumulation_steps):
            logits, backward = model.forward(images[part], context_of(part))
            found = self._hits(logits, labels[part])
            losses, *handed = losses_of(model, logits, labels[part])
            del logits
            if self.accumulation_steps > 1:
                handed[0] *= (part.stop - part.start) / whole  # gradient of the mean over the whole batch
            backward(handed.pop())
            del backward
            if self.accumulation_steps == 1:
                return losses, found
            total, hits = total + losses.sum(), hits + found
        return total.astype(backend.policy.accumulate).reshape(1), hits

    def _context(self, batch: Batch, part: slice = slice(None), *, counts: bool = True) -> Context:
        return Context(
            train=True,
            epoch=batch.epoch,
            iteration=self.updates,
            samples=batch.samples[part],
            seed=self.model.seed,
            replicas=self.groups.replicas,
            counts=counts,
        )

    def forget(self) -> None:
        """Discard the gradient and the loss, and restore the buffers."""
        self.params.grad[...] = 0
        self.params.restore_buffers()
        self.losses, self.hits = None if self.losses is None else 0.0, 0

    def update(self, iteration: int, step: Step | None = None) -> None:
        """Update the weights with the learning rate of `iteration` (from 0), and clear the gradient.

        A replica is not updated if it has no samples, unless replicas share gradients, or if loss scaling skips the
        step. If `step`, the result of `gradient`, is None, the gradient norm is recomputed.
        """
        alone_without_samples = step is not None and not step.samples and not self._moves_with_others
        if alone_without_samples or (self.scaler is not None and self.scaler.skipping):
            return
        self._optimize(iteration, None if step is None or self._shares_gradients else step.squared_norm)
        self.updates += 1

    def _optimize(self, iteration: int, squared_norm: Array | None) -> None:
        norm = None
        if self.optimizer.max_grad_norm is not None:
            part = self.backend.squared_norm(self.params.grad) if squared_norm is None else squared_norm
            norm = self.whole_squared_norm(part)
        self.optimizer.step(self.params, iteration, norm)

    def whole_squared_norm(self, part: Array) -> Array:
        """Return |gradient|² over the whole network. `part` is |gradient|² over this replica's weights."""
        return part

    def launch_singly(self, wanted: bool) -> None:
        """Switch between launching operations one by one and launching graphs. Results do not change."""

    # evaluation and warm-up -------------------------------------------------------------------------------------------

    def scores(self, batch: Batch) -> Scores | None:
        """Return the scores (N, classes) and losses (N,) of a batch on the host; None in all stages but the last."""
        return scores_of(self.model, batch.images, batch.labels)

    def rehearse(self, scratch: Replica, batch_size: int) -> None:
        """Compile or load all kernels by running a step on `scratch`, a copy of this replica, without communication."""
        scratch.classifies = self.classifies
        scratch.backpropagate(blank_batch(self.model, batch_size, self.label_columns))
        scratch.update(0)

    # resuming -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return weights, buffers and optimizer vectors as host arrays, and the number of updates."""
        optimizer = {name: by_name(self, vector) for name, vector in self.optimizer_state.items()}
        return {"updates": self.updates, "weights": self.model.weights(), "optimizer": optimizer}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ConfigError if a state is from another network or optimizer."""
        self.params.check_fit(state["weights"])
        found, needed = sorted(state["optimizer"]), sorted(self.optimizer_state)
        if found != needed:
            kind = type(self.optimizer).__name__
            raise ConfigError(f"this state is from another optimizer: it has {found}, but {kind} needs {needed}")

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that fits (see `check_state`), possibly on another backend or in another precision."""
        self.model.load_weights(state["weights"])
        for name, vector in self.optimizer_state.items():
            take_by_name(self, vector, state["optimizer"][name])
        self.updates = state["updates"]


def warm_up(replica: Replica, batch_size: int, synchronizer: Synchronizer | None = None) -> float:
    """Compile or load all kernels with a step on a copy of the replica. Return the time in seconds.

    The time is also added to the replica's clock. With a `synchronizer`, this also warms up averaging, and all workers
    must call it.
    """
    began, backend, groups = time.perf_counter(), replica.backend, replica.groups
    backend.prepare()
    optimizer = copy.copy(replica.optimizer)
    optimizer.state = {}  # `init` fills it
    optimizer.learning_rate = copy.deepcopy(replica.optimizer.learning_rate)
    optimizer.learning_rate.begin_fit(0, 1, epoch=1, epochs=1)
    scratch = Replica(replica.model.replicate(backend), optimizer, replica.accumulation_steps)
    with np.errstate(over="ignore", invalid="ignore"):
        replica.rehearse(scratch, batch_size)
        if synchronizer is not None and groups.replicas.size > 1:
            with groups.world.traffic.uncounted():
                groups.replicas.allreduce_mean([*synchronizer.shared(scratch), *scratch.params.running], 1.0)
            distance(backend, [(scratch.params.master, replica.params.master)])
    backend.synchronize()
    seconds = time.perf_counter() - began
    replica.clock.compile_s += seconds
    return seconds


def blank_batch(model: Model, size: int, label_columns: int | None = None) -> Batch:
    backend, samples = model.backend, np.zeros(size, np.int64)
    images = backend.load_images(np.zeros((1, *model.input.shape), np.uint8), samples)
    return Batch(0, images, blank_labels(backend, size, label_columns), samples)


def blank_labels(backend: Backend, size: int, columns: int | None) -> Array:
    return backend.asarray(np.zeros(size, np.int64) if columns is None else np.zeros((size, columns), np.float32))


def losses_of(model: Model, logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the losses (N,) and the gradient (N, O). Raise ConfigError if the loss returns something else."""
    expected, found = [logits.shape[:1], logits.shape], model.loss(model.backend, logits, labels)
    shapes = [getattr(each, "shape", type(each).__name__) for each in found] if isinstance(found, tuple | list) else []
    if shapes != expected or not found[1].flags.c_contiguous:
        name, got = type(model.loss).__name__, shapes or type(found).__name__
        raise ConfigError(f"must return losses and a contiguous gradient of {expected}, got {got}", "loss", name)
    return found[0], found[1]


def scores_of(model: Model, x: Array, labels: Array) -> Scores:
    backend = model.backend
    logits, _ = model.forward(x, INFERENCE)
    losses, _ = losses_of(model, logits, labels)
    scores = np.array(backend.to_host(model.loss.scores(backend, logits)), np.float64)
    if model.loss.applies == "softmax":  # the sums differ from 1 by the rounding errors of the dtype
        scores /= scores.sum(axis=-1, keepdims=True)
    return scores, backend.to_host(losses)
