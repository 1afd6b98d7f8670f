"""GPU memory pools of a run: limits, trimming and release."""

from __future__ import annotations

import gc

from cupynet.config.schema import MemorySettings, size
from cupynet.parallel import Placement
from cupynet.training import Callback, Pools


def limit(settings: MemorySettings, devices: list[int]) -> None:
    if devices:
        from cupynet.backend.cuda import gpus

        most = settings.device_pool_limit
        gpus.limit_pools(devices, None if most is None else size(most, share=True))


def release(devices: list[int]) -> None:
    gc.collect()  # models have reference cycles
    if devices:
        from cupynet.backend.cuda import gpus

        gpus.trim_pools(devices, 0, 0)


def callbacks(settings: MemorySettings, placement: Placement, *, processes: bool) -> list[Callback]:
    """Return the callback that trims the pools; empty on a CPU. processes: True if workers are processes."""
    if not placement.devices:
        return []
    above = settings.device_pool_trim_above
    return [
        Pools(
            [placement.device(rank) for rank in range(placement.ranks)],
            processes=processes,
            device_above=None if above is None else int(size(above)),
            pinned_above=settings.pinned_pool_trim_above,
        )
    ]
