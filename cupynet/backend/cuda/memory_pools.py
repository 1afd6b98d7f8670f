"""CuPy's memory pools of this process: one for each device, and one of pinned host memory.

A pool keeps freed memory for the next array. CuPy tracks neither the peak use of a pool nor its peak size.
What a pool holds only grows until it is emptied, so its size just before that is its peak size, except that CuPy
empties a pool by itself at its limit. Use can only be sampled: an allocation hook sees one thread and costs a Python
call for each allocation.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

LIMITED_BY = "CUPY_GPU_MEMORY_LIMIT"  # CuPy's own variable
_before: dict[int, int] = {}  # by device: the limit before the first `limit_pools`, perhaps from CuPy's variable
_asked: dict[int, str] = {}  # by device: the source of its limit, for messages


@dataclass(frozen=True)
class Pool:
    """The state of a device's memory pool, in bytes.

    Attributes:
        used: in arrays.
        held: in arrays, and kept for the next ones.
        limit: the most that it may hold; None for no limit.
        limited_by: the setting or variable of the limit; "" without one.
    """

    used: int
    held: int
    limit: int | None
    limited_by: str


def pool(device: int) -> Pool:
    """Return the state of a device's pool."""
    import cupy

    with cupy.cuda.Device(device):
        found = cupy.get_default_memory_pool()
        limit = int(found.get_limit()) or None
        by = ""
        if limit is not None:
            by = _asked.get(device, LIMITED_BY if os.environ.get(LIMITED_BY) else "CuPy's set_limit")
        return Pool(int(found.used_bytes()), int(found.total_bytes()), limit, by)


def pinned_blocks() -> int:
    """Free blocks in the pool of pinned host memory, which reports no bytes and has no limit."""
    import cupy

    return int(cupy.get_default_pinned_memory_pool().n_free_blocks())


def limit_pools(devices: list[int], limit: int | float | None, asked: str = "limit_pools") -> None:
    """Limit the pool of each device to `limit` bytes, or to a float as a fraction of the device; None restores it.

    Empties the pools first, so that peak sizes are measured from here on.

    Args:
        asked: the source of the limit, for messages.
    """
    import cupy

    gc.collect()  # backends that are no longer used are in reference cycles, with all the memory they lent
    for device in devices:
        with cupy.cuda.Device(device):
            found = cupy.get_default_memory_pool()
            found.free_all_blocks()
            before = _before.setdefault(device, int(found.get_limit()))
            if limit is None:
                found.set_limit(size=before)
                _asked.pop(device, None)
                continue
            if isinstance(limit, float):
                found.set_limit(fraction=limit)
            else:
                found.set_limit(size=limit)
            _asked[device] = asked


def trim_pools(devices: list[int], device_above: int | None, pinned_above: int | None) -> None:
    """Free the unused memory of pools, which waits for all work of their devices.

    Args:
        devices: the GPUs.
        device_above: empty a device's pool if it keeps more unused bytes; None never does.
        pinned_above: empty the pool of pinned memory if it keeps more free blocks; None never does.
    """
    import cupy

    for device in devices if device_above is not None else ():
        with cupy.cuda.Device(device):
            found = cupy.get_default_memory_pool()
            if found.free_bytes() > device_above:
                found.free_all_blocks()
    pinned = cupy.get_default_pinned_memory_pool()
    if pinned_above is not None and pinned.n_free_blocks() > pinned_above:
        pinned.free_all_blocks()
