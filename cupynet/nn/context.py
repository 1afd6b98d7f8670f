from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """Information that layers receive in a forward pass besides their input.

    During graph capture, `epoch` (one element) and `samples` are device arrays, and `iteration` and `replicas` cannot
    be read.

    Attributes:
        train: True if a backward pass follows.
        epoch: number of completed epochs.
        iteration: number of updates this replica has made.
        samples: (N,) indices into the data set; None outside training.
        seed: the seed of the model.
        replicas: communicator for layers with `syncs_replicas = True`, or None to exchange nothing. All replicas must
            call its methods in the same order.
        counts: False for dummy samples, with which a replica without a batch takes part in exchanges.
    """

    train: bool = False
    epoch: Any = 0
    iteration: int = 0
    samples: Any = None
    seed: int = 0
    replicas: Any = None
    counts: bool = True


INFERENCE = Context()
