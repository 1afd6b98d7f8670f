"""The replica as a synchronizer sees it, and the checkpoint form of vectors that are laid out like the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.nn.params import Params


class ReplicaView(Protocol):
    """The weights and optimizer state of one worker: of a whole model, or of a stage."""

    @property
    def backend(self) -> Backend:
        """The backend of the vectors."""

    @property
    def params(self) -> Params:
        """Weights and gradients, flat (P,) vectors, and the buffers, another one."""

    @property
    def optimizer_state(self) -> Mapping[str, Array]:
        """Name -> (P,) vector of the optimizer."""

    @property
    def losses(self) -> Array | None:
        """The sum of the last batch's losses: a number, or a 0-d array on the device.

        0 without a batch; None if another stage has them.
        """


def by_name(replica: ReplicaView, vector: Array) -> dict[str, NDArray[Any]]:
    """Return copies on the host of the parts of a (P,) vector, on the host or the device, by parameter names."""
    return {name: np.array(replica.backend.to_host(view)) for name, view in replica.params.views(vector)}


def take_by_name(replica: ReplicaView, vector: Array, saved: Mapping[str, NDArray[Any]]) -> None:
    """Overwrite a (P,) vector with what `by_name` returned, in any precision."""
    for name, view in replica.params.views(vector):
        part = saved[name]
        view[...] = part if isinstance(view, np.ndarray) else replica.backend.asarray(part, view.dtype)
