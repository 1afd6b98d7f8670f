"""How the workers of a run talk to each other: every worker runs the same code, only its communicator differs.

Methods carry MPI's names and move arrays and numbers, never objects: a worker may be a thread, a process or another
machine. Every worker makes the same calls in the same order. Sums are made in rank order, so the same inputs give the
same bits whatever the timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.errors import CupynetError

REDUCES = ("auto", "nccl", "device", "host")  # where means of arrays on devices are computed


class PeerFailed(CupynetError):
    """Another worker failed; this one stops because of it. The failed worker's own error is the one that is shown."""


class WorkerTimeout(CupynetError):
    """A worker did not arrive where the others waited for it."""


@dataclass
class Traffic:
    """What one worker has sent to others, counted alike however they are connected.

    An all-reduce of n bytes is counted as the bandwidth-optimal algorithms send it, chunks exchanged and then gathered;
    arrays of the host that only synchronise (counts, flags) count too. Threads hand over references: there it is what
    would have travelled.

    Attributes:
        bytes_sent: so far.
    """

    bytes_sent: int = 0

    def all_reduce(self, nbytes: int, workers: int) -> None:
        """Of a vector of `nbytes`: 2 (W - 1) / W of them."""
        self.bytes_sent += 2 * (workers - 1) * nbytes // workers

    def all_gather(self, nbytes: int, workers: int) -> None:
        """Of `nbytes` of this worker's own, to all others."""
        self.bytes_sent += (workers - 1) * nbytes

    def message(self, nbytes: int) -> None:
        """To one other worker."""
        self.bytes_sent += nbytes


class Communicator:
    """One worker's end of the connection.

    Attributes:
        rank: this worker's number, from 0.
        size: how many workers there are.
        traffic: what this worker has sent, through this communicator and all that were split from it.
    """

    rank: int
    size: int
    traffic: Traffic

    def split(self, color: int, key: int) -> Communicator:
        """The workers that give the same colour, in the order of their keys, then of their ranks here.

        Every worker calls it. The new communicator is attached to the same backend.
        """
        raise NotImplementedError

    def attach(self, backend: Backend, reduce: str = "auto") -> None:
        """Learn where this worker's arrays live: `backend` brings them to the host and back, and computes the means.

        Called by the worker once it has its backend; before that, only arrays of the host are moved.

        reduce: where means of arrays on a device are computed, one of `REDUCES`.
        """

    def close(self) -> None:
        """Let go of what the device's means hold; all workers call it, in their own threads, or none."""

    def abandon(self) -> None:
        """Let go of it after a failure, without the others: whoever waits on a device for this worker ends too."""

    def barrier(self) -> None:
        """Wait until every worker is here."""
        raise NotImplementedError

    def all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Every worker's array in rank order, (size, ...), on every worker.

        array: on the host, of the same shape and dtype on every worker; for small things.
        """
        raise NotImplementedError

    def all_gather_ragged(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        """Every worker's vector (n_rank,) in rank order, on every worker.

        vector: on the host, of the same dtype on every worker; the lengths may differ.
        """
        raise NotImplementedError

    def send(self, array: Array, to: int) -> None:
        """Send `array`, of the host or of this worker's device, to worker `to`.

        Returns at once: the array may be changed, and two workers may send to each other before they receive.
        """
        raise NotImplementedError

    def recv(self, array: Array, source: int) -> None:
        """Overwrite `array` with the next one that worker `source` sent here, of the same shape and dtype.

        Messages from one worker to another arrive in the order in which they were sent.
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


def same_form(expected: Array, got: Array) -> Array:
    """`got`, if a receiver that expects an array like `expected` can take it; else RuntimeError."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise RuntimeError(
            f"a message of {got.dtype} {got.shape} came where {expected.dtype} {expected.shape} was expected: "
            "the workers do not make the same calls"
        )
    return got
