from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """The context of a forward pass.

    During graph capture, `epoch` (one element) and `samples` are device arrays, and `iteration` and `replicas` cannot
    be read.

    Attributes:
        train: True if a backward pass follows.
        epoch: number of completed epochs.
        iteration: number of updates of this replica.
        samples: (N,) indices into the data set; None outside training.
        seed: the seed of the model.
        replicas: communicator for layers with `syncs_replicas = True`; None for a single replica. All replicas must
            call its methods in the same order.
        counts: False if the samples are dummies: a replica without a batch still takes part in exchanges.
    """

    train: bool = False
    epoch: Any = 0
    iteration: int = 0
    samples: Any = None
    seed: int = 0
    replicas: Any = None
    counts: bool = True


INFERENCE = Context()
