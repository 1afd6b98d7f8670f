"""What a layer may know about the pass it takes part in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cupynet.backend.array import Array


class Group(Protocol):
    """The replicas that train together, as one of them sees them: a communicator is one.

    Every replica makes the same calls in the same order.

    Attributes:
        size: how many there are.
    """

    size: int

    def gather_numbers(self, *values: float) -> Any:
        """Every replica's numbers, (size, how many), on the host."""

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        """Overwrite flat vectors with their mean over the replicas, weighted; one of weight 0 adds nothing."""


@dataclass(frozen=True)
class Context:
    """One forward pass.

    What a layer draws at random follows from (seed, epoch, sample, layer), so it is the same whichever worker trains on
    the sample, and when training is gone on with. In a step that a GPU has recorded `epoch` and `samples` are arrays on
    the device, `epoch` of one element, and nothing else that changes from step to step can be asked for.

    Attributes:
        train: whether a backward pass follows.
        epoch: complete passes over the training set so far.
        iteration: updates this replica has made so far.
        samples: (N,) indices into the data set. None outside training.
        seed: of the model.
        replicas: those that train together, for a layer with `syncs_replicas = True`; None where there is only one.
        counts: whether the examples count. A replica without a batch passes one along that does not, where a layer
            `syncs_replicas`, so as to make the same calls as the others.
    """

    train: bool = False
    epoch: Any = 0
    iteration: int = 0
    samples: Any = None
    seed: int = 0
    replicas: Group | None = None
    counts: bool = True


INFERENCE = Context()
