from __future__ import annotations

import time

import numpy as np

from cupynet.parallel import Communicator
from cupynet.training.events import Stop, StopReason

AGREE_EVERY = 10  # iterations between exchanges
SLOW_S = 0.05  # seconds per iteration above which workers exchange after every iteration


class StopConsensus:
    """Stops all workers after the same iteration. All workers must make the same calls.

    request: this worker's first request to stop in this fit, or None.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self.request: Stop | None = None
        # iterations between exchanges, iterations since the last exchange, and its time
        self._every, self._iterations, self._since = AGREE_EVERY, 0, 0.0

    def propose(self, stop: Stop) -> None:
        self.request = self.request or stop

    def due(self, iteration: int, *, reported: bool) -> bool:
        """Return True if workers must exchange requests after this iteration.

        reported: True after `on_log`, so that requests made there take effect in this iteration.
        """
        self._iterations += 1
        return self._world.size == 1 or reported or iteration % self._every == 0

    def exchange(self) -> Stop | None:
        """Return the request of the lowest rank that has one, or None."""
        request, world = self.request, self._world
        if world.size == 1:
            return request
        with world.traffic.uncounted():
            now = time.monotonic()
            pace_s = (now - self._since) / self._iterations if self._iterations else SLOW_S
            reasons, paces = world.gather_numbers(request.reason if request else 0, pace_s).T
            self._every = 1 if paces.max() >= SLOW_S else AGREE_EVERY
            self._iterations, self._since = 0, now
            requests = np.flatnonzero(reasons)
            if not len(requests):
                return None
            first = int(requests[0])
            texts = world.gather_json(request.text if request else "")
        return Stop(StopReason(int(reasons[first])), texts[first])
