"""Replicas as seen by synchronizers, conversion of flat vectors for checkpoints, and loss statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.errors import DivergedError
from cupynet.nn.params import Params
from cupynet.parallel.communicators.base import Communicator


class ReplicaView(Protocol):
    """The weights and optimizer state of one worker, which has a whole network or a stage."""

    @property
    def backend(self) -> Backend:
        """Backend of the vectors."""

    @property
    def params(self) -> Params:
        """Flat vectors (P,) of weights and gradients, and vectors of buffers."""

    @property
    def optimizer_state(self) -> Mapping[str, Array]:
        """Optimizer vectors (P,) by name."""

    def tally(self, *, losses: bool = True) -> Tally:
        """Return a tally to which the replica adds its iterations, and their losses if `losses` is True."""

    def complete(self) -> None:
        """Wait for enqueued iterations, so that tallies are up to date."""


def by_name(replica: ReplicaView, vector: Array) -> dict[str, NDArray[Any]]:
    """Split a (P,) vector by parameter name, and copy the parts to the host."""
    return copies(replica.backend, replica.params.views(vector))


def take_by_name(replica: ReplicaView, vector: Array, saved: Mapping[str, NDArray[Any]]) -> None:
    """Overwrite a (P,) vector with the result of `by_name`. The precision may differ."""
    overwrite(replica.backend, replica.params.views(vector), saved)


def copies(backend: Backend, views: Iterable[tuple[str, Array]]) -> dict[str, NDArray[Any]]:
    """Copy arrays to the host, and return them by name."""
    return {name: np.array(backend.to_host(view)) for name, view in views}


def overwrite(backend: Backend, views: Iterable[tuple[str, Array]], saved: Mapping[str, NDArray[Any]]) -> None:
    """Overwrite arrays with the result of `copies`. The precision may differ."""
    for name, view in views:
        part = saved[name]
        if part.shape != view.shape:
            raise ValueError(f"{name}: expected an array of shape {view.shape}, found {part.shape}")
        view[...] = part if isinstance(view, np.ndarray) else backend.asarray(part, view.dtype)


def is_finite(*vectors: Array) -> bool:
    """Return True if the sum of each vector is finite, in one pass without a temporary array."""
    return all(math.isfinite(float(vector.sum())) for vector in vectors)


def distance(backend: Backend, pairs: Iterable[tuple[Array, Array]]) -> float:
    """Return |vector - mean| / |mean|. `pairs` has corresponding parts of the vector and the mean."""
    difference = norm = 0.0
    for vector, mean in pairs:
        difference += float(backend.squared_norm(vector - mean))
        norm += float(backend.squared_norm(mean))
    return math.sqrt(difference / max(norm, 1e-30))


def check_finite_replicas(finite: Sequence[float], iteration: int | None) -> None:
    """Raise DivergedError on every worker if a replica is not finite. Call this before averaging.

    iteration: the last iteration (from 0); None at the end of an epoch.
    """
    bad = [str(rank) for rank, ok in enumerate(finite) if not ok]
    if bad:
        when = "at the end of an epoch" if iteration is None else f"after iteration {iteration + 1}"
        raise DivergedError(
            f"weights or losses of replica {', '.join(bad)} are not finite {when}, and were not averaged. "
            "Lower learning_rate, or train in a wider dtype"
        )


class Tally:
    """Counts the samples of a replica and sums their losses since the last `clear`.

    On a GPU, the host may run ahead of a replica. Iterations are then added later, at the latest by its `complete`.

    Args:
        losses: True to also sum the losses.

    Attributes:
        scored: number of samples with losses on this worker.
        losses: sum of these losses, a number or a 0-d array on the device.
        hits: number of these samples classified correctly, of the same type as `losses`; not part of `state`.
    """

    def __init__(self, *, losses: bool = True) -> None:
        self._sums = losses
        self.iterations = self.samples = self.scored = 0
        self.losses: Array = 0.0
        self.hits: Array = 0

    def add(self, iterations: int, samples: int, losses: Array | None, hits: Array = 0) -> None:
        """Add iterations. `losses` and `hits` are sums over samples; `losses` is None if another worker adds them."""
        self.iterations, self.samples = self.iterations + iterations, self.samples + samples
        if self._sums and samples and losses is not None:
            self.scored, self.losses, self.hits = self.scored + samples, self.losses + losses, self.hits + hits

    def gather(self, replica: ReplicaView, communicator: Communicator, iteration: int | None) -> float:
        """Return the mean loss over the samples of all replicas since the last `clear`; NaN if there are none.

        Raise DivergedError as `check_finite_replicas` does.
        """
        loss = float(self.losses)
        finite = math.isfinite(loss) and is_finite(*replica.params.vectors)
        gathered = communicator.gather_numbers(self.scored, loss, finite).tolist()  # (W, 3)
        check_finite_replicas([ok for _, _, ok in gathered], iteration)
        scored = sum(count for count, _, _ in gathered)
        return sum(total for _, total, _ in gathered) / scored if scored else math.nan

    def clear(self) -> None:
        self.iterations = self.samples = self.scored = 0
        self.losses, self.hits = 0.0, 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers by name."""
        return {"rounds": self.iterations, "samples": self.samples, "scored": self.scored, "losses": float(self.losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.iterations, self.samples = state["rounds"], state["samples"]
        self.scored, self.losses = state["scored"], state["losses"]
