"""The GPUs of this machine, as CuPy sees them.

CuPy imports without a GPU and fails on first use in several ways; `probe` tries a real kernel and a real product and
returns the reason as text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LINE = "\n"


def probe(device: int = 0) -> str | None:
    """Return why CuPy cannot be used on this machine, in a few words, or None.

    device: the device to try, modulo the number of devices. No other is used: a process that uses a device occupies
        some of its memory until it ends.
    """
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # installed and broken: built for another NumPy, a library that does not load
        return f"CuPy cannot be imported ({str(error).partition(LINE)[0]})"
    try:
        with cupy.cuda.Device(device % device_count()):
            x = cupy.ones((2, 2), np.float32)
            (x @ x + 1).get()
    except Exception as error:  # the compiler's is neither an ImportError nor a RuntimeError
        return f"CuPy finds no usable GPU ({str(error).partition(LINE)[0]})"
    return None


def device_count() -> int:
    """Return the number of GPUs that CuPy sees; call it after `probe` has returned None."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def inventory() -> dict[str, Any]:
    """Describe the GPUs; call it after `probe` has returned None.

    Returns:
        The versions of CuPy (`cupy`), of the CUDA it was built for (`runtime`), of the newest CUDA of the driver
        (`driver`) and of NCCL (`nccl`, None if it is missing); and `devices`, each with its name, capability, and
        bytes of memory, total and free.
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
    """Return the bytes of the smallest memory of the devices."""
    import cupy

    sizes = []
    for device in devices:
        with cupy.cuda.Device(device):
            sizes.append(int(cupy.cuda.runtime.memGetInfo()[1]))
    return min(sizes)
