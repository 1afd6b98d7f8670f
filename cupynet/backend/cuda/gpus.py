"""The GPUs of this machine and their memory pools.

CuPy does not track peak memory. A pool only grows until it is emptied, so its peak size is its size just before that.
CuPy empties a pool that has reached its limit.
"""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LINE = "\n"
OLDEST = 14  # minimum version of CuPy, as in pyproject.toml; version 13 lacks some NCCL and graph functions
NOT_INSTALLED = "CuPy is not installed"
_before: dict[int, int] = {}  # original limit by device, before `limit_pools`


def has_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def probe(device: int = 0) -> str | None:
    """Run a kernel and a matrix product on GPU `device` (modulo the number of GPUs). Return why CuPy fails, or None."""
    try:
        import cupy
    except ImportError as error:
        return f"{NOT_INSTALLED} ({error})"
    except Exception as error:  # for example, CuPy was built for another NumPy, or a library is missing
        return f"CuPy cannot be imported ({str(error).partition(LINE)[0]})"
    if int(str(cupy.__version__).partition(".")[0]) < OLDEST:
        return f"CuPy {cupy.__version__} is too old. Install CuPy {OLDEST} or later"
    try:
        with cupy.cuda.Device(device % device_count()):
            x = cupy.ones((2, 2), np.float32)
            (x @ x + 1).get()
    except Exception as error:  # compiler errors are neither an ImportError nor a RuntimeError
        return f"CuPy finds no usable GPU ({str(error).partition(LINE)[0]})"
    return None


def device_count() -> int:
    """Return the number of GPUs. Call `probe` first."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def inventory() -> dict[str, Any]:
    """Describe the GPUs, with memory in bytes, and the CUDA software. nccl: None if missing. Call `probe` first."""
    import cupy

    runtime = cupy.cuda.runtime
    try:
        from cupy.cuda import nccl

        code = int(nccl.get_version())
        nccl_version = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    except Exception:  # CuPy was built without NCCL, or its library cannot be loaded
        nccl_version = None
    devices = []
    for number in range(int(runtime.getDeviceCount())):
        with cupy.cuda.Device(number) as device:
            free, total = device.mem_info
            properties = runtime.getDeviceProperties(number)
            capability = f"{properties['major']}.{properties['minor']}"
            description = {"name": properties["name"].decode(), "capability": capability, "memory": total, "free": free}
            devices.append(description)
    cuda = {name: _version(getattr(runtime, f"{name}GetVersion")()) for name in ("driver", "runtime")}
    return {"cupy": str(cupy.__version__), **cuda, "nccl": nccl_version, "devices": devices}


def _version(code: int) -> str:
    return f"{code // 1000}.{code % 1000 // 10}"


@dataclass(frozen=True)
class Pool:
    """A device's memory pool: bytes `used` by arrays, bytes `held` with free blocks, and the limit or None."""

    used: int
    held: int
    limit: int | None


def pool(device: int) -> Pool:
    import cupy

    with cupy.cuda.Device(device):
        memory_pool = cupy.get_default_memory_pool()
        return Pool(int(memory_pool.used_bytes()), int(memory_pool.total_bytes()), int(memory_pool.get_limit()) or None)


def pinned_blocks() -> int:
    """Return the number of free blocks in the pinned host memory pool, which does not report bytes."""
    import cupy

    return int(cupy.get_default_pinned_memory_pool().n_free_blocks())


def limit_pools(devices: list[int], limit: int | float | None) -> None:
    """Empty and limit each device's memory pool: to bytes (int), a fraction (float), or its original limit (None)."""
    import cupy

    gc.collect()  # unused backends in reference cycles still hold memory
    for device in devices:
        with cupy.cuda.Device(device):
            memory_pool = cupy.get_default_memory_pool()
            memory_pool.free_all_blocks()
            original = _before.setdefault(device, int(memory_pool.get_limit()))
            if isinstance(limit, float):
                memory_pool.set_limit(fraction=limit)
            else:
                memory_pool.set_limit(size=original if limit is None else limit)


def trim_pools(devices: list[int], device_above: int | None, pinned_above: int | None) -> None:
    """Free the unused memory of pools above these limits, in bytes and in pinned blocks. Synchronizes the devices."""
    import cupy

    for device in devices if device_above is not None else ():
        with cupy.cuda.Device(device):
            memory_pool = cupy.get_default_memory_pool()
            if memory_pool.free_bytes() > device_above:
                memory_pool.free_all_blocks()
    pinned = cupy.get_default_pinned_memory_pool()
    if pinned_above is not None and pinned.n_free_blocks() > pinned_above:
        pinned.free_all_blocks()
