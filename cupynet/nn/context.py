"""The context of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cupynet.backend.array import Array


class Group(Protocol):
    """The part of a communicator that layers use. All replicas make the same calls in the same order.

    Attributes:
        size: the number of replicas that train together.
    """

    size: int

    def gather_numbers(self, *values: float) -> Any:
        """Return every replica's numbers, (size, len(values)), on the host."""

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        """Overwrite flat vectors with their weighted mean over the replicas; a replica of weight 0 adds nothing."""


@dataclass(frozen=True)
class Context:
    """One forward pass.

    Random numbers of a layer depend only on (seed, epoch, sample, layer): they are the same on any worker and in a
    resumed run. During graph capture `epoch` and `samples` are arrays on the device, `epoch` with one element, and the
    other attributes that change from step to step cannot be read.

    Attributes:
        train: True if a backward pass follows.
        epoch: complete passes over the training set so far.
        iteration: updates of this replica so far.
        samples: (N,) indices into the data set; None outside training.
        seed: of the model.
        replicas: the replicas that train together, for a layer with `syncs_replicas = True`; None for a single one.
        counts: False if the examples do not count. If a layer `syncs_replicas`, a replica without a batch passes such
            examples, so that it makes the same calls as the others.
    """

    train: bool = False
    epoch: Any = 0
    iteration: int = 0
    samples: Any = None
    seed: int = 0
    replicas: Group | None = None
    counts: bool = True


INFERENCE = Context()
