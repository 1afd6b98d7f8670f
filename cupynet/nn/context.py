from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """The context of one forward pass.

    Random numbers of a layer depend only on (seed, epoch, sample, layer). During graph capture `epoch` (one element)
    and `samples` are arrays on the device, and other attributes that change between iterations cannot be read.

    Attributes:
        train: True if a backward pass follows.
        epoch: complete passes over the training set so far.
        iteration: updates of this replica so far.
        samples: (N,) indices into the data set; None outside training.
        seed: of the model.
        replicas: communicator of the replicas, for layers with `syncs_replicas = True`; None for a single replica. All
            replicas must call its methods in the same order.
        counts: False if the examples do not count: a replica without a batch still takes part in the exchanges of
            layers with `syncs_replicas = True`.
    """

    train: bool = False
    epoch: Any = 0
    iteration: int = 0
    samples: Any = None
    seed: int = 0
    replicas: Any = None
    counts: bool = True


INFERENCE = Context()
