"""A replica: a model, the optimizer that moves it, and what it counts."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.checks import instance, integer
from cupynet.core.errors import ConfigError
from cupynet.data import Batch
from cupynet.nn import INFERENCE, Context, Layer, Model
from cupynet.nn.params import Params
from cupynet.optim import Optimizer
from cupynet.parallel import Communicator, Groups, Pipeline, parts
from cupynet.training.events import Piece
from cupynet.training.loss_scaling import LossScaler

Scores: TypeAlias = "tuple[NDArray[Any], NDArray[Any]]"


def moved(vector: Array, before: Array) -> bool:
    """Whether any number of a vector is another than it was before; a NaN that stays one is not."""
    return bool(((vector != before) & (before == before)).any())


def check_accumulate(accumulate: int, network: Layer, pipeline: Pipeline | None = None) -> int:
    """Return into how many parts a batch is cut, if the built network can be trained so; else raise ConfigError."""
    accumulate = integer("accumulate", accumulate, 1)
    if pipeline is not None and accumulate > 1:
        raise ConfigError(
            f"accumulate={accumulate}: stages of a pipeline cut batches by themselves, see "
            "Pipeline(micro_batches=...): leave it at 1"
        )
    meeting = next((layer for layer in network.walk() if layer.syncs_replicas), None)
    if accumulate > 1 and meeting is not None:  # replicas may have batches of different numbers of parts
        raise ConfigError(
            f"accumulate={accumulate}: layer '{meeting.path}' exchanges something with the other replicas for each "
            "batch as a whole: take accumulate=1, or sync=false there"
        )
    return accumulate


class Step(NamedTuple):
    """The gradient of one round of a replica.

    Attributes:
        batch: which it is of; None if the worker had none.
        samples: how many it is of; 0 without a batch, and if the batch was left out: the gradient is zero then.
        squared_norm: |gradient|² of the replica's own weights, times the loss scale squared; 0-d on the device.
        finite: whether the loss and the gradient are.
        overflowed: the step is skipped, for a smaller loss scale.
        ahead: gradient and update are made ahead of the host, which knows nothing of them before `Replica.settle`.
    """

    batch: Batch | None
    samples: int = 0
    squared_norm: Array | None = None
    finite: bool = True
    overflowed: bool = False
    ahead: bool = False


@dataclass(frozen=True)
class Settled:
    """What became of the steps that ran ahead of the host.

    Attributes:
        rounds: how many they were of.
        samples: those of the steps that were made; losses: the sum of theirs.
        halted: the iteration of the first step that was not finite; None if all were.
    """

    rounds: int
    samples: int
    losses: float
    halted: int | None


class Replica:
    """The whole network on one worker. (A stage of a pipeline is another one with the same methods, see `Stage`.)

    Args:
        model: its weights are what is trained.
        optimizer: moves them; not shared with another replica.
        accumulate: into how many parts a batch is cut, if it has as many examples, whose gradients are added up one
            after the other: activations take as much less memory. Layers that look at a whole batch see a part.

    Attributes:
        updates: how often the optimizer has moved the weights.
        replicas: those that train together, with which layers may exchange something; None for one alone.
        scaler: finds the loss scale, if 16 bits are stored and `join` was called; else None.
        losses: the sum of the last batch's losses, 0-d on the device; 0.0 where there was no batch. (None in a stage of
            a pipeline that has none.)
        waited_s: seconds of the last round that went by waiting for other workers of the same replica: none where it is
            the whole network.
    """

    waited_s = 0.0

    def __init__(self, model: Model, optimizer: Optimizer, accumulate: int = 1) -> None:
        self.model = instance("model", model, Model, "Model(network, Image(28, 28, 1), create_backend('numba'))")
        self.optimizer = instance("optimizer", optimizer, Optimizer, "Nesterov(0.01)")
        self.accumulate = check_accumulate(accumulate, model.network)
        self.updates = 0
        self.replicas: Communicator | None = None
        self.scaler: LossScaler | None = None
        self.losses: Array | None = 0.0
        self._along: Batch | None = None  # an example that does not count
        optimizer.init(model.params, model.backend)

    @property
    def backend(self) -> Backend:
        """Where the replica computes."""
        return self.model.backend

    @property
    def whole(self) -> Model:
        """The network that it is, or is a part of."""
        return self.model

    @property
    def params(self) -> Params:
        """The weights and their gradients."""
        return self.model.params

    @property
    def optimizer_state(self) -> Mapping[str, Array]:
        """Name -> (P,) vector; the optimizer's own dictionary."""
        return self.optimizer.state

    @property
    def needs_images(self) -> bool:
        """Whether batches must come with their images; with labels they always do."""
        return True

    @property
    def place(self) -> str:
        """Where the replica computes, in words, for messages."""
        return f"{self.backend.name}, device {self.backend.device}"

    def join(self, groups: Groups, *, shares_gradients: bool) -> None:
        """Train together with others from now on."""
        self.replicas = groups.replicas
        self.scaler = LossScaler.of(self.backend, groups, shared=shares_gradients)

    def begin(self) -> None:
        """Before a fit, and before an evaluation outside of one.

        Forget the gradient that a failed round may have left.
        """
        self.params.grad[...] = 0

    def assemble(self) -> None:
        """Make the user's model complete, on rank 0, where replicas are one: at the end of a fit, at an evaluation.

        Nothing is to be done where the replica is the whole network.
        """

    # a round --------------------------------------------------------------------------------------------------------

    def gradient(self, batch: Batch | None) -> Step:
        """Compute the gradient of a round, and skip it if the loss scale made it overflow. `forget` takes it back.

        All workers call it in every round, with a batch or without one.
        """
        if self.scaler is not None:
            self.scaler.grow()
        samples = self.backpropagate(batch)
        if batch is None:
            step = Step(None)
        else:
            norm = self.backend.squared_norm(self.params.grad)
            step = Step(batch, samples, norm, math.isfinite(float(norm)) and self.loss_is_finite)
        if self.scaler is not None:
            overflow = not step.finite and self.loss_is_finite
            if self.scaler.skips(overflow=overflow, failed=not step.finite and not overflow):
                self.forget()
                return Step(batch, overflowed=True)
        return step

    @property
    def loss_is_finite(self) -> bool:
        """Return True if the loss of the last batch is finite, or is held by another stage."""
        return self.losses is None or math.isfinite(float(self.losses))

    def backpropagate(self, batch: Batch | None) -> int:
        """Add the gradient of the batch's mean loss, times the loss scale, to `params.grad`.

        Returns how many samples the batch has; 0 without one.
        """
        self.params.snapshot_buffers()
        if batch is None:
            if self._meets:
                self._pass_along()
            self.losses = 0.0
            return 0
        self.losses = self._both_passes(batch)
        return len(batch)

    def _both_passes(self, batch: Batch, *, counts: bool = True) -> Array:
        """Forward and backward, part by part: adds the gradient, returns the sum of the losses."""
        model, whole, total = self.model, len(batch), 0.0
        for part in parts(whole, self.accumulate):
            context = self._context(train=True, batch=batch, part=part, counts=counts)
            with model.backend.loans():  # also where the loss fails, between the two passes
                logits, backward = model.forward(batch.images[part], context)
                losses, gradient = model.loss(model.backend, logits, batch.labels[part])
                if self.accumulate > 1:
                    gradient *= (part.stop - part.start) / whole  # of the mean over the whole batch
                model.backend.give_back(backward(gradient))
                total = total + losses.sum()
        return total

    def _context(self, *, train: bool, batch: Batch, part: slice = slice(None), counts: bool = True) -> Context:
        """What layers may know of a pass over a part of a batch."""
        return Context(
            train=train,
            epoch=batch.epoch,
            iteration=self.updates,
            samples=batch.samples[part],
            seed=self.model.seed,
            replicas=self.replicas,
            counts=counts,
        )

    @property
    def _meets(self) -> bool:
        """Whether a layer exchanges something with the other replicas in a training pass."""
        several = self.replicas is not None and self.replicas.size > 1
        return several and any(layer.syncs_replicas for layer in self.model.network.walk())

    def _pass_along(self) -> None:
        """In a round without a batch: make the calls that the others make, with an example that does not count."""
        if self._along is None:
            samples = np.zeros(1, np.int64)
            images = self.backend.load_images(np.zeros((1, *self.model.input.shape), np.uint8), samples)
            self._along = Batch(0, images, self.backend.asarray(samples), samples)
        self._both_passes(self._along, counts=False)
        self.params.grad[...] = 0

    def forget(self) -> None:
        """Let it be as if there had been no batch in this round: no gradient, no loss, the buffers as before."""
        self.params.grad[...] = 0
        self.params.restore_buffers()
        self.losses = None if self.losses is None else 0.0

    def update(self, iteration: int, squared_norm: Array | None = None) -> None:
        """Let the optimizer move the weights, at the learning rate of `iteration`; then the gradients are zero.

        squared_norm: `Step.squared_norm`, if the gradient is still the same; else it is computed.
        """
        if self.scaler is not None and self.scaler.skipping:
            return
        self._optimize(iteration, squared_norm)
        self.updates += 1

    def _optimize(self, iteration: int, squared_norm: Array | None) -> None:
        norm = None
        if self.optimizer.max_grad_norm is not None:
            own = self.backend.squared_norm(self.params.grad) if squared_norm is None else squared_norm
            norm = self.whole_squared_norm(own)
        self.optimizer.step(self.params, iteration, norm)

    def whole_squared_norm(self, own: Array) -> Array:
        """Return |gradient|² of the whole network, by which it is clipped, given that of the replica's own weights."""
        return own

    # ahead of the host ----------------------------------------------------------------------------------------------

    def run_ahead(self, wanted: bool) -> None:
        """Let steps run ahead of the host in the next rounds, if the device can do that."""

    def launch_singly(self, wanted: bool) -> None:
        """Launch each operation by itself in the next rounds, or as before. Nothing may be running ahead."""

    def settle(self) -> Settled | None:
        """Wait for the steps that run ahead; None if there was none since the last call."""
        return None

    # beside training ------------------------------------------------------------------------------------------------

    def scores(self, batch: Batch) -> Scores | None:
        """What the network makes of a batch: scores (N, classes) and losses (N,), on the host.

        None where another worker has them: in all stages of a pipeline but the last.
        """
        with self.backend.loans():
            return self._scores(batch.images, batch.labels)

    def _scores(self, x: Array, labels: Array) -> Scores:
        """Scores and losses of what the model makes of x."""
        model, backend = self.model, self.backend
        logits, _ = model.forward(x, INFERENCE)
        losses, gradient = model.loss(backend, logits, labels)
        scores = np.array(backend.to_host(model.loss.scores(backend, logits)))
        backend.give_back(gradient, logits)
        return scores, backend.to_host(losses)

    def pieces(self) -> list[Piece]:
        """Its calls that a round and an evaluation are made of, see `TrainerView.pieces`."""
        return [
            Piece(self, "gradient", "forward and backward", "training"),
            Piece(self, "update", "update", "update"),
            Piece(self, "scores", "evaluation of a batch", "evaluation"),
        ]

    def warm_up(self, batch_size: int) -> float:
        """Compile or load every kernel that training needs, on a copy that is thrown away; the seconds it took."""
        began = time.perf_counter()
        scratch = self._scratch()
        samples = np.zeros(batch_size, np.int64)
        images = self.backend.load_images(np.zeros((1, *self.model.input.shape), np.uint8), samples)
        labels = self.backend.asarray(samples)
        scratch.backpropagate(Batch(index=0, epoch=0, images=images, labels=labels, samples=samples))
        scratch.update(0)
        for vector in scratch.params.vectors:
            moved(vector, vector)  # what a fit ends with
        self.backend.synchronize()
        return time.perf_counter() - began

    def _scratch(self) -> Replica:
        """A copy to try things on; its optimizer is a copy too, in the first iteration of one."""
        optimizer = copy.copy(self.optimizer)
        optimizer.state = {}  # it makes its own when it is bound to the copy
        optimizer.learning_rate = copy.deepcopy(self.optimizer.learning_rate)
        optimizer.learning_rate.span(0, 1, epoch=1, epochs=1)
        return Replica(self.model.replicate(self.backend), optimizer, self.accumulate)

    # resuming -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Copies of all that a checkpoint must hold.

        `weights` with the buffers, and each vector of the `optimizer`, by the parameters' names and on the host; and
        numbers.
        """
        optimizer = {name: self._by_name(vector) for name, vector in self.optimizer_state.items()}
        return {"updates": self.updates, "weights": self.model.weights(), "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned, on another backend or in another precision too.

        Raises:
            ConfigError: it is the state of another network, or of another kind of optimizer.
        """
        found, own = sorted(state["optimizer"]), sorted(self.optimizer_state)
        if found != own:
            kind = type(self.optimizer).__name__
            raise ConfigError(f"this state is of another optimizer: it holds {found}, and {kind} needs {own}")
        self.model.load_weights(state["weights"])
        for name, vector in self.optimizer_state.items():
            for parameter, view in self.params.views(vector):
                view[...] = self.backend.asarray(state["optimizer"][name][parameter], view.dtype)
        self.updates = state["updates"]

    def _by_name(self, vector: Array) -> dict[str, Any]:
        return {name: np.array(self.backend.to_host(view)) for name, view in self.params.views(vector)}
