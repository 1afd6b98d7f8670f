"""What a synchronizer sees of a replica, and how it saves vectors that are laid out like the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.nn.params import Params


class ReplicaView(Protocol):
    """One worker's weights and what moves them: a whole model, or a stage of one."""

    @property
    def backend(self) -> Backend:
        """Where the vectors live."""

    @property
    def params(self) -> Params:
        """The weights and their gradients, flat (P,) vectors; and the buffers, another one."""

    @property
    def optimizer_state(self) -> Mapping[str, Array]:
        """Name -> (P,) vector; the optimizer's own."""

    @property
    def losses(self) -> Array | None:
        """The sum of the last batch's losses: a number, or a 0-d array on the device.

        0 where there was no batch, None where another worker has them.
        """


def by_name(replica: ReplicaView, vector: Array) -> dict[str, NDArray[Any]]:
    """Copies on the host of the parts of a (P,) vector, which may be on the host already, by the parameters' names."""
    return {name: np.array(_on_host(replica, view)) for name, view in replica.params.views(vector)}


def take_by_name(replica: ReplicaView, vector: Array, saved: Mapping[str, NDArray[Any]]) -> None:
    """Overwrite a (P,) vector with what `by_name` returned, also in another precision."""
    for name, view in replica.params.views(vector):
        part = saved[name]
        view[...] = part if isinstance(view, np.ndarray) else replica.backend.asarray(part, view.dtype)


def _on_host(replica: ReplicaView, view: Array) -> NDArray[Any]:
    host: NDArray[Any] = view if isinstance(view, np.ndarray) else replica.backend.to_host(view)
    return host
