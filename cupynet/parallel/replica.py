"""What a synchronizer sees of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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
        """The weights and their gradients, flat (P,) vectors."""

    @property
    def optimizer_state(self) -> Mapping[str, Array]:
        """Name -> (P,) vector; the optimizer's own."""

    @property
    def losses(self) -> Array | None:
        """The sum of the last batch's losses: a number, or a 0-d array on the device.

        0 where there was no batch, None where another worker has them.
        """
