"""The context of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
        replicas: the communicator of the replicas that train together, for a layer with `syncs_replicas = True`; None
            for a single one. All replicas make the same calls of it in the same order.
        counts: False if the examples do not count. If a layer `syncs_replicas`, a replica without a batch passes such
            examples, so that it makes the same calls as the others.
    """

    train: bool = False
    epoch: Any = 0
    iteration: int = 0
    samples: Any = None
    seed: int = 0
    replicas: Any = None
    counts: bool = True


INFERENCE = Context()
