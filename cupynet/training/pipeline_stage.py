"""A pipeline stage. parallel/pipeline.py implements the partition and the schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.data import Batch
from cupynet.nn import INFERENCE, Context, Model
from cupynet.optim import Optimizer
from cupynet.parallel import Groups
from cupynet.parallel.pipeline import one_forward_one_backward, parts
from cupynet.training.replica import Replica, Scores, blank_batch, blank_labels, losses_of, scores_of


class Stage(Replica):
    """Consecutive layers of a network on one worker. All stages together form a `Replica`.

    For each micro-batch, a stage sends activations to the next stage and gradients to the previous one. All stages of a
    replica receive the same batches. Each stage has its own optimizer and synchronizer.

    Args:
        whole: the whole network in this process. On rank 0 it is the user's model: `begin` reads its weights, and
            `assemble` writes the trained weights back.
        layers: layer names of all stages.

    Attributes:
        model: the layers of this stage, with their names in the whole network.
        losses, hits: see `Replica`. The first and the last stage set them; `losses` is None on the others.
    """

    def __init__(
        self,
        whole: Model,
        optimizer: Optimizer,
        groups: Groups,
        backend: Backend,
        layers: Sequence[Sequence[str]],
        micro_batches: int,
    ) -> None:
        self.number, self.count = groups.stages.rank, groups.stages.size
        self.first, self.last = self.number == 0, self.number == self.count - 1
        self.layers, self.micro_batches = [list(names) for names in layers], micro_batches
        names = self.layers[self.number]
        super().__init__(whole.part(names, backend), optimizer)
        self.groups, self.whole, self.needs_images = groups, whole, self.first
        self.place = f"stage {self.number + 1} of {self.count}, {' '.join(names)}; {self.place}"
        self.losses: Array | None = 0.0 if self.first or self.last else None

    # one iteration --------------------------------------------------------------------------------------------------

    def backpropagate(self, batch: Batch | None) -> int:
        self.losses, self.hits = 0.0 if self.first or self.last else None, 0
        self.params.snapshot_buffers()
        if batch is None:
            return 0
        remaining = iter(parts(len(batch), self.micro_batches))
        pending: deque[Callable[[], None]] = deque()  # backward passes
        for forward in one_forward_one_backward(self.number, self.count, min(len(batch), self.micro_batches)):
            if forward:
                pending.append(self._forward(batch, next(remaining)))
            else:
                pending.popleft()()
        self._share_losses()
        return len(batch)

    def _forward(self, batch: Batch, part: slice) -> Callable[[], None]:
        model, stages = self.model, self.groups.stages
        samples = part.stop - part.start
        x = batch.images[part] if self.first else self._received((samples, *model.input.shape), self.number - 1)
        y, derivative = model.forward(x, self._context(batch, part))
        shape, handed = y.shape, []
        if self.last:
            self.hits = self.hits + self._hits(y, batch.labels[part])
            losses, dy = losses_of(model, y, batch.labels[part])
            dy *= samples / len(batch)  # the gradient of the mean over the whole batch
            handed.append(dy)
            self.losses = self.losses + losses.sum()
        else:
            stages.send(y, self.number + 1)

        def backward() -> None:
            if not self.last:
                handed.append(self._received(shape, self.number + 1))
            dx = derivative(handed.pop())
            if not self.first:
                stages.send(dx, self.number - 1)

        return backward

    def _received(self, shape: tuple[int, ...], source: int) -> Array:
        array = self.backend.borrow(shape)
        self._receive(array, source)
        return array

    def _receive(self, array: Array, source: int) -> None:
        with self.clock.measure("waiting", "waiting for a stage"):
            self.groups.stages.recv(array, source)

    def _share_losses(self) -> None:
        if self.first != self.last:
            sums = self.backend.asarray(np.zeros(2, self.backend.policy.accumulate))
            if self.last:
                sums[0], sums[1] = self.losses, self.hits
                self.groups.stages.send(sums, 0)
            else:
                self._receive(sums, self.count - 1)
                self.losses, self.hits = sums[0], sums[1]

    def whole_squared_norm(self, part: Array) -> Array:
        with self.clock.measure("waiting", "waiting for a stage"):
            return self.groups.stages.gather_numbers(float(part)).sum()

    # evaluation and warm-up -------------------------------------------------------------------------------------------

    def scores(self, batch: Batch) -> Scores | None:
        """See `Replica.scores`. Stages work on consecutive batches at the same time."""
        stages = self.groups.stages
        received = np.zeros(1, np.uint8)  # an acknowledgment, so that batches do not pile up
        x = batch.images
        if not self.first:
            x = self.backend.borrow((len(batch), *self.model.input.shape))
            stages.recv(x, self.number - 1)
            stages.send(received, self.number - 1)
        if self.last:
            return scores_of(self.model, x, batch.labels)
        y, _ = self.model.forward(x, INFERENCE)
        stages.send(y, self.number + 1)
        stages.recv(received, self.number + 1)
        return None

    def rehearse(self, scratch: Replica, batch_size: int) -> None:
        samples = -(-batch_size // min(batch_size, self.micro_batches))
        model, backend, zeros = scratch.model, self.backend, np.zeros((samples, *scratch.model.input.shape))
        x = blank_batch(model, samples).images if self.first else backend.asarray(zeros, backend.policy.storage)
        y, derivative = model.forward(x, Context(train=True, samples=np.arange(samples)))
        if self.last:
            labels = blank_labels(backend, samples, self.label_columns)
            self._hits(y, labels)
            _, dy = losses_of(model, y, labels)
        else:
            dy = backend.borrow(y.shape)
            dy[...] = 0
        derivative(dy)
        scratch.update(0)

    # the whole network ----------------------------------------------------------------------------------------------

    def begin(self, reload: Callable[[int], Batch] | None = None, stop: int = 0) -> None:
        """Read this stage's weights from the user's model."""
        super().begin()
        self._copy_weights(collect=False)

    def assemble(self) -> None:
        self._copy_weights(collect=True)

    def _copy_weights(self, *, collect: bool) -> None:
        """Copy weights from the stages of replica 0 to the whole network on rank 0, or vice versa."""
        if self.groups.replicas.rank != 0:
            return
        stages = self.groups.stages
        for stage, part, whole in self._weights():
            source, target = (part, whole) if collect else (whole, part)
            peer = stage if self.first else 0
            if stage == 0:
                target[...] = source
            elif self.first == collect:
                stages.recv(target, peer)
            else:
                stages.send(source, peer)
        if not collect:
            self.params.publish()
        elif self.first:
            self.whole.params.publish()

    def _weights(self) -> Iterator[tuple[int, Array, Array]]:
        """Yield (stage, stage's array, whole network's array) for each weight and buffer that this worker copies."""
        own = self.params.arrays()
        stage_of = {name: stage for stage, names in enumerate(self.layers) for name in names}
        for name, whole in self.whole.params.arrays().items():
            stage = stage_of[name.partition(".")[0]]
            if self.first or stage == self.number:
                yield stage, own.get(name, whole), whole
