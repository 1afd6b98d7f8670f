"""Stop consensus: all workers end a fit after the same round."""

from __future__ import annotations

import numpy as np

from cupynet.parallel import Communicator
from cupynet.training.events import Stop, StopReason

AGREE_EVERY = 10  # rounds between two exchanges without an average


class StopConsensus:
    """Lets all workers end a fit after the same round. Every worker makes the same calls, after the same rounds.

    Args:
        world: all workers.

    Attributes:
        request: this worker's first request to stop in this fit; None if there is none.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self.request: Stop | None = None

    def propose(self, stop: Stop) -> None:
        """Request a stop, from any thread or signal handler."""
        self.request = self.request or stop

    def due(self, iteration: int, *, averaged: bool) -> bool:
        """Return True if workers exchange their requests after this round.

        averaged: True if this round ended with an average, for which all waited anyway.
        """
        return averaged or self._world.size == 1 or iteration % AGREE_EVERY == 0

    def exchange(self) -> Stop | None:
        """Return the request of the lowest rank that has one; None if there is none."""
        request, world = self.request, self._world
        if world.size == 1:
            return request
        with world.traffic.uncounted():
            reasons = world.gather_numbers(request.reason if request else 0)[:, 0]
            requests = np.flatnonzero(reasons)
            if not len(requests):
                return None
            first = int(requests[0])
            texts = world.all_gather(np.frombuffer((request.text if request else "").encode(), np.uint8))
        return Stop(StopReason(int(reasons[first])), texts[first].tobytes().decode())
