"""How the workers of a run talk to each other: every worker runs the same code, only its communicator differs.

Methods carry MPI's names and move arrays and numbers, never objects: a worker may be a thread, a process or another
machine. Every worker makes the same calls in the same order. Sums are made in rank order, so the same inputs give the
same bits whatever the timing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.errors import CupynetError


class PeerFailed(CupynetError):
    """Another worker failed; this one stops because of it. The failed worker's own error is the one that is shown."""


class WorkerTimeout(CupynetError):
    """A worker did not arrive where the others waited for it."""


class Communicator:
    """One worker's end of the connection.

    Attributes:
        rank: this worker's number, from 0.
        size: how many workers there are.
    """

    rank: int
    size: int

    def attach(self, backend: Backend) -> None:
        """Learn where this worker's arrays live: `backend` brings them to the host and back, and computes the means.

        Called by the worker once it has its backend; before that, only arrays of the host are moved.
        """

    def barrier(self) -> None:
        """Wait until every worker is here."""
        raise NotImplementedError

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Every worker's array in rank order, (size, ...), on every worker.

        array: on the host, of the same shape and dtype on every worker; for small things.
        """
        raise NotImplementedError

    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        """Every worker's numbers in rank order, (size, how many), on every worker: counts, flags, losses."""
        return self.all_gather(np.array(values, np.float64))

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Overwrite `array`, on the host or on this worker's device, with root's, in place."""
        raise NotImplementedError

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        """Overwrite each array with the weighted mean over the workers, in place.

        mean = sum_r (weight_r / sum of weights) · array_r, in rank order. A worker of weight 0 adds nothing, not
        even a NaN, and receives the mean. Where all weights are 0 nothing happens.

        Args:
            arrays: contiguous flat vectors, the same shapes on every worker, on the host or on this worker's device.
            weight: of this worker, at least 0: the samples it has seen, say.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise `PeerFailed` if another worker has failed; cheap enough to be asked in every round."""


class SerialCommunicator(Communicator):
    """One worker alone."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def barrier(self) -> None:
        pass

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.stack([array])

    def broadcast(self, array: Array, root: int = 0) -> None:
        pass

    def allreduce_mean(self, arrays: list[Array], weight: float) -> None:
        pass
