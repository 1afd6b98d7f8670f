"""Rounds, samples and losses of a replica since the last average."""

from __future__ import annotations

import math
from typing import Any

from cupynet.backend.array import Array
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.synchronizers.base import is_finite, refuse_divergence
from cupynet.parallel.synchronizers.replica_view import ReplicaView


class RoundStatistics:
    """Counts since the last average.

    Args:
        score: True to sum losses too.

    Attributes:
        rounds: rounds since then; the same on every worker.
        samples: samples that this replica has trained on since then.
    """

    def __init__(self, *, score: bool) -> None:
        self.score = score
        self.rounds = self.samples = 0
        self._scored = 0  # those of the samples whose losses this worker has; the next is the sum of these losses
        self._losses: Array = 0.0

    def add(self, replica: ReplicaView, samples: int) -> None:
        """Count a round of this replica, with a batch of so many samples."""
        self.rounds, self.samples = self.rounds + 1, self.samples + samples
        if self.score and samples and replica.losses is not None:
            self._scored, self._losses = self._scored + samples, self._losses + replica.losses

    def gather(self, replica: ReplicaView, communicator: Communicator, iteration: int | None) -> float:
        """Return the mean loss of all samples of all replicas since the last average; NaN if no worker has it.

        iteration: the one that was just trained; None at the end of an epoch or of the fit.

        Raises:
            DivergedError: on every worker alike, if any replica is not finite.
        """
        loss = float(self._losses)
        finite = math.isfinite(loss) and is_finite(*replica.params.vectors)
        gathered = communicator.gather_numbers(self._scored, loss, finite).tolist()  # (W, 3)
        refuse_divergence([fine for _, _, fine in gathered], iteration)
        scored = sum(count for count, _, _ in gathered)
        return sum(total for _, total, _ in gathered) / scored if scored else math.nan

    def clear(self) -> None:
        """Reset all counts."""
        self.rounds = self.samples = self._scored = 0
        self._losses = 0.0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers by name."""
        counts = {"rounds": self.rounds, "samples": self.samples}
        return {**counts, "scored": self._scored, "losses": float(self._losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.rounds, self.samples = state["rounds"], state["samples"]
        self._scored, self._losses = state["scored"], state["losses"]
