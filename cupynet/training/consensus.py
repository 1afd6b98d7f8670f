"""Stop consensus: all workers end a fit after the same round. The same exchange carries bytes sent and divergence."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np

from cupynet.parallel import Average, Communicator, Groups
from cupynet.training.clock import Statistics
from cupynet.training.events import Stop, StopReason

AGREE_EVERY = 10  # rounds between two exchanges without an average
HEARD_S = 0.5  # workers with slow rounds exchange stop requests after about this time


class StopConsensus:
    """Lets all workers end a fit after the same round. Every worker makes the same calls, after the same rounds.

    Args:
        groups: all workers, and the stages of this one's replica.
        statistics: of this worker.

    Attributes:
        request: this worker's first request to stop in this fit; None if there is none.
    """

    def __init__(self, groups: Groups, statistics: Statistics) -> None:
        self.groups, self._statistics = groups, statistics
        self.request: Stop | None = None
        self._counted = 0  # bytes already in the clock
        self._often = 1  # rounds between two exchanges of requests alone
        self._since, self._rounds = time.perf_counter(), 0  # since the last full exchange

    def propose(self, stop: Stop) -> None:
        """Request a stop, from any thread or signal handler."""
        self.request = self.request or stop

    def after_round(self, iteration: int, *, averaged: bool) -> Stop | None:
        """Return why the fit ends after this round; None if it continues, or if no exchange is due.

        averaged: True if this round ended with an average, for which all waited anyway.
        """
        began, world = time.perf_counter(), self.groups.world
        self._rounds += 1
        together = averaged and self.groups.stages.size == 1  # stages may average after different rounds
        if together or world.size == 1 or iteration % AGREE_EVERY == 0:
            stop = self.exchange()
        elif iteration % self._often == 0:
            stop = self._exchange_requests()
        else:
            return None
        self._statistics.clock.extend("averaging_s", began)
        return stop

    def exchange(self, *, begun: bool = True) -> Stop | None:
        """Exchange stop requests, bytes sent and divergence; return the request of the lowest rank that has one.

        begun: False at the start of a fit: a resumed one must not report earlier than an uninterrupted one.
        """
        world = self.groups.world
        if world.size == 1:
            return self.request
        self.count_bytes()
        statistics = self._statistics
        apart, sent = begun and statistics.of_stage is not None, statistics.clock.bytes_sent
        gathered = world.gather_numbers(self._reason, sent, apart, self._pace())  # (W, 4)
        reasons, all_sent, measured, paces = gathered.T
        self._often = max(1, int(HEARD_S / max(float(paces.max()), 1e-9)))
        if measured.any():
            statistics.record_divergence(_gather_divergence(self.groups.stages, statistics.of_stage))
            statistics.of_stage = None
        statistics.bytes_sent = int(all_sent.sum())
        return self._of_lowest_rank(reasons)

    def count_bytes(self) -> None:
        """Add the bytes sent since the last call to the clock."""
        clock, sent = self._statistics.clock, self.groups.world.traffic.bytes_sent
        clock.bytes_sent, self._counted = clock.bytes_sent + sent - self._counted, sent

    def _exchange_requests(self) -> Stop | None:
        """Exchange stop requests alone. How often depends on timing, so this must not affect results."""
        world = self.groups.world
        sent = world.traffic.bytes_sent
        stop = self._of_lowest_rank(world.gather_numbers(self._reason)[:, 0])
        world.traffic.bytes_sent = sent
        return stop

    @property
    def _reason(self) -> int:
        return self.request.reason if self.request else 0

    def _pace(self) -> float:
        """Return the seconds of a round since the last full exchange."""
        now = time.perf_counter()
        pace = (now - self._since) / self._rounds if self._rounds else HEARD_S
        self._since, self._rounds = now, 0
        return pace

    def _of_lowest_rank(self, reasons: Any) -> Stop | None:
        """Return the request of the lowest rank that has one. reasons: (W,), 0 for none."""
        requests = np.flatnonzero(reasons)
        if not len(requests):
            return None
        first = int(requests[0])
        text = "" if self.request is None else self.request.text
        texts = self.groups.world.all_gather(np.frombuffer(text.encode(), np.uint8))
        return Stop(StopReason(int(reasons[first])), texts[first].tobytes().decode())


def _gather_divergence(stages: Communicator, own: Average | None) -> Average:
    """Return the layers of all stages, and their largest divergence: an upper bound of the whole network's.

    Every stage calls it. own: None if this one measured nothing.
    """
    message: list[Any] = [math.nan, {}]
    if own is not None:
        message = [float(own.divergence), {name: float(apart) for name, apart in own.by_layer.items()}]
    texts = stages.all_gather(np.frombuffer(json.dumps(message).encode(), np.uint8))
    found = [json.loads(text.tobytes()) for text in texts]
    largest = max((apart for apart, _ in found if not math.isnan(apart)), default=math.nan)
    return Average(math.nan, largest, {name: apart for _, layers in found for name, apart in layers.items()})
