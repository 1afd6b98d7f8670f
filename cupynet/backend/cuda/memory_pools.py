"""CuPy's memory pools: one for each device and one of pinned host memory, all of this process.

A pool keeps what is freed for the next array. It counts neither what was once in use nor what was once held. What it
holds only grows until it is emptied, so what it holds just before is the most that it has held; but where it comes to
its limit, CuPy empties it unasked, and it holds less for a while. What is in use is seen only by looking. (A hook of
CuPy's would see every allocation, but of its own thread alone, and at the price of a call of Python for each.)
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

LIMITED_BY = "CUPY_GPU_MEMORY_LIMIT"  # CuPy's own variable
_before: dict[int, int] = {}  # the limits that pools had when they were first limited here: CuPy's variable sets one
_asked: dict[int, str] = {}  # who asked for the limit of a device, in words


@dataclass(frozen=True)
class Pool:
    """What the pool of a device holds, in bytes.

    Attributes:
        used: in arrays. held: in arrays, and kept for the next ones.
        limit: the most that it may hold; None for no limit.
        limited_by: what set the limit, in words; "" without one.
    """

    used: int
    held: int
    limit: int | None
    limited_by: str


def pool(device: int) -> Pool:
    """What a device's pool holds now."""
    import cupy

    with cupy.cuda.Device(device):
        found = cupy.get_default_memory_pool()
        limit = int(found.get_limit()) or None
        by = ""
        if limit is not None:
            by = _asked.get(device, LIMITED_BY if os.environ.get(LIMITED_BY) else "CuPy's set_limit")
        return Pool(int(found.used_bytes()), int(found.total_bytes()), limit, by)


def pinned_blocks() -> int:
    """Free blocks that the pool of pinned host memory keeps: it tells no bytes, and takes no limit."""
    import cupy

    return int(cupy.get_default_pinned_memory_pool().n_free_blocks())


def limit_pools(devices: list[int], limit: int | float | None, asked: str = "limit_pools") -> None:
    """Cap what each device's pool may hold, used and kept: bytes, or a float as a fraction of the device.

    Each is emptied first of what nobody uses, so that what it has held is counted from here on. None: as it was before
    it was capped here.

    asked: who wants it so, for messages.
    """
    import cupy

    gc.collect()  # a backend that is not needed any more is in circles, and so is all that it has lent
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
    """Free what the pools keep unused, which waits for all that their devices are doing.

    Args:
        devices: the GPUs.
        device_above: bytes; a device pool that keeps more is emptied. None keeps all.
        pinned_above: free blocks, for that is all the pinned pool can tell; with more it is emptied. None keeps all.
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
