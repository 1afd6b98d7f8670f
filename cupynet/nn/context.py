"""What a layer may know about the pass it takes part in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Context:
    """One forward pass.

    Attributes:
        train: whether a backward pass follows.
        epoch: complete passes over the training set so far.
        iteration: updates this replica has made so far.
        samples: (N,) indices into the data set. What a layer draws at random follows from (seed, epoch, sample, layer),
            so it is the same whichever worker trains on the sample. None outside training.
    """

    train: bool = False
    epoch: int = 0
    iteration: int = 0
    samples: Any = None


INFERENCE = Context()
