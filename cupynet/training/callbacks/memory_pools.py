"""Measures and trims GPU memory pools. Freeing memory waits for collectives, so barriers precede and follow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cupynet.runs.run import Run
from cupynet.training.callbacks.base import Callback
from cupynet.training.events import EpochRecord
from cupynet.training.trainer import Trainer


class Pools(Callback):
    """Measures the memory pools after each epoch and fit. Trims them after each epoch if there are limits.

    Args:
        devices: the device of each worker, in rank order. The first worker on a device manages its pool.
        processes: True if workers are processes, each with its own pools.
        device_above, pinned_above: limits in bytes and in pinned blocks, above which unused memory is freed (see
            `trim_pools`). None for no limit.

    Attributes:
        found: after a fit, a dictionary for each pool with `device`, `rank`, the peaks `used_bytes`, `held_bytes` and
            `pinned_blocks`, and `limit_bytes` (None for no limit).
    """

    every_rank = True

    def __init__(
        self,
        devices: Sequence[int],
        *,
        processes: bool = False,
        device_above: int | None = None,
        pinned_above: int | None = None,
    ) -> None:
        self.devices, self.processes = list(devices), processes
        self.device_above, self.pinned_above = device_above, pinned_above
        self.found: list[dict[str, Any]] = []
        self._used = self._held = self._limit = self._pinned = 0

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self.device = self.devices[trainer.rank]
        self._leads = self._manages(trainer.rank)

    def _manages(self, rank: int) -> bool:
        return self.processes or self.devices.index(self.devices[rank]) == rank

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self._measure()
        if self.device_above is None and self.pinned_above is None:
            return
        trainer.world.barrier()
        if self._leads:
            from cupynet.backend.cuda import gpus

            first = self.processes or trainer.rank == 0  # each process has one pinned pool
            gpus.trim_pools([self.device], self.device_above, self.pinned_above if first else None)
        trainer.world.barrier()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._measure()
        self.found = []
        pools = trainer.world.gather_numbers(self._used, self._held, self._limit, self._pinned)  # (W, 4)
        for rank, (used, held, limit, pinned) in enumerate(pools.astype(int).tolist()):
            if self._manages(rank):
                place = {"device": f"cuda:{self.devices[rank]}", "rank": rank, "used_bytes": used, "held_bytes": held}
                self.found.append({**place, "limit_bytes": limit or None, "pinned_blocks": pinned})

    def _measure(self) -> None:
        if self._leads:
            from cupynet.backend.cuda import gpus

            now = gpus.pool(self.device)
            self._used, self._held = max(self._used, now.used), max(self._held, now.held)
            self._limit = now.limit or 0
            self._pinned = max(self._pinned, gpus.pinned_blocks())
