"""The GPUs of this machine and their memory, as CuPy sees them.

A memory pool only grows until it is emptied, so its size just before then is its peak. (At its limit, CuPy empties it.)
CuPy does not track peak use, and an allocation hook would be too slow.
"""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LINE = "\n"
OLDEST = 14  # CuPy, as in pyproject.toml: version 13 lacks NCCL and graph functions used here
NOT_INSTALLED = "CuPy is not installed"
_before: dict[int, int] = {}  # by device: the limit before the first `limit_pools`, perhaps from CuPy's variable


def has_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def probe(device: int = 0) -> str | None:
    """Run a kernel and a matrix product on GPU `device` (modulo their number). Return why CuPy fails, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"{NOT_INSTALLED} ({error})"
    except Exception as error:  # installed and broken: built for another NumPy, a library that does not load
        return f"CuPy cannot be imported ({str(error).partition(LINE)[0]})"
    if int(str(cupy.__version__).partition(".")[0]) < OLDEST:
        return f"CuPy {cupy.__version__} is too old: install CuPy {OLDEST} or later"
    try:
        with cupy.cuda.Device(device % device_count()):
            x = cupy.ones((2, 2), np.float32)
            (x @ x + 1).get()
    except Exception as error:  # the compiler's is neither an ImportError nor a RuntimeError
        return f"CuPy finds no usable GPU ({str(error).partition(LINE)[0]})"
    return None


def device_count() -> int:
    """Return the number of GPUs. Call `probe` first."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def inventory() -> dict[str, Any]:
    """Describe the GPUs. Call `probe` first.

    Returns:
        The versions of CuPy (`cupy`), of the CUDA it was built for (`runtime`), of the newest CUDA that the driver
        supports (`driver`) and of NCCL (`nccl`, or None); and `devices`, each with its name, capability, and bytes of
        memory, total and free.
    """
    import cupy

    runtime = cupy.cuda.runtime
    try:
        from cupy.cuda import nccl

        code = int(nccl.get_version())
        connects = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    except Exception:  # built without it, or its library does not load
        connects = None
    devices = []
    for number in range(int(runtime.getDeviceCount())):
        with cupy.cuda.Device(number) as device:
            free, total = device.mem_info
            properties = runtime.getDeviceProperties(number)
            capability = f"{properties['major']}.{properties['minor']}"
            found = {"name": properties["name"].decode(), "capability": capability, "memory": total, "free": free}
            devices.append(found)
    cuda = {name: _version(getattr(runtime, f"{name}GetVersion")()) for name in ("driver", "runtime")}
    return {"cupy": str(cupy.__version__), **cuda, "nccl": connects, "devices": devices}


def _version(code: int) -> str:
    """12040 -> 12.4."""
    return f"{code // 1000}.{code % 1000 // 10}"


def memory(devices: list[int]) -> int:
    """Return the smallest memory of the devices, in bytes."""
    import cupy

    sizes = []
    for device in devices:
        with cupy.cuda.Device(device):
            sizes.append(int(cupy.cuda.runtime.memGetInfo()[1]))
    return min(sizes)


@dataclass(frozen=True)
class Pool:
    """The state of a device's memory pool in bytes: in arrays (`used`), with free blocks (`held`), and the limit."""

    used: int
    held: int
    limit: int | None


def pool(device: int) -> Pool:
    import cupy

    with cupy.cuda.Device(device):
        found = cupy.get_default_memory_pool()
        return Pool(int(found.used_bytes()), int(found.total_bytes()), int(found.get_limit()) or None)


def pinned_blocks() -> int:
    """Return the number of free blocks in the pool of pinned host memory, which reports no bytes."""
    import cupy

    return int(cupy.get_default_pinned_memory_pool().n_free_blocks())


def limit_pools(devices: list[int], limit: int | float | None) -> None:
    """Empty the pool of each device and limit it to `limit` bytes, or a fraction if it is a float. None: as before."""
    import cupy

    gc.collect()  # backends that are no longer used are in reference cycles, with all the memory they lent
    for device in devices:
        with cupy.cuda.Device(device):
            found = cupy.get_default_memory_pool()
            found.free_all_blocks()
            before = _before.setdefault(device, int(found.get_limit()))
            if isinstance(limit, float):
                found.set_limit(fraction=limit)
            else:
                found.set_limit(size=before if limit is None else limit)


def trim_pools(devices: list[int], device_above: int | None, pinned_above: int | None) -> None:
    """Free unused pool memory that exceeds these limits, in bytes or pinned blocks. This synchronizes the devices."""
    import cupy

    for device in devices if device_above is not None else ():
        with cupy.cuda.Device(device):
            found = cupy.get_default_memory_pool()
            if found.free_bytes() > device_above:
                found.free_all_blocks()
    pinned = cupy.get_default_pinned_memory_pool()
    if pinned_above is not None and pinned.n_free_blocks() > pinned_above:
        pinned.free_all_blocks()
