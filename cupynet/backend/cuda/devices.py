"""The GPUs of this machine, as CuPy sees them.

CuPy imports without a GPU and fails on first use in several ways; `probe` tries a real kernel and a real product and
returns the reason as text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LINE = "\n"


def probe(device: int = 0) -> str | None:
    """Why CuPy cannot be used on this machine, in a few words, or None where it can.

    device: the one that it is tried on, counted round those that are there. On others nothing is left behind: each
    process that tries a device takes some of its memory, for as long as it lives.
    """
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # installed and broken: built for another NumPy, a library that does not load
        return f"CuPy cannot be imported ({str(error).partition(LINE)[0]})"
    try:
        if not cupy.is_available():
            return f"CuPy finds no usable GPU: {_lacking(cupy.cuda.runtime)}"
        with cupy.cuda.Device(device % device_count()):
            x = cupy.ones((2, 2), np.float32)
            (x @ x + 1).get()
    except Exception as error:  # the compiler's is neither an ImportError nor a RuntimeError
        return f"CuPy cannot run a kernel ({str(error).partition(LINE)[0]})"
    return None


def _lacking(runtime: Any) -> str:
    """Why there is none, in a few words: CUDA says the same of no driver and of one that is too old."""
    driver = int(runtime.driverGetVersion())
    if not driver:
        return "there is no NVIDIA driver"
    try:
        runtime.getDeviceCount()
        reason = "none is there"
    except Exception as error:
        reason = str(error).partition(LINE)[0]
    made_for = _version(int(runtime.runtimeGetVersion()))
    return f"{reason} (the driver takes CUDA up to {_version(driver)}, CuPy was made for {made_for})"


def device_count() -> int:
    """How many GPUs CuPy sees; call after `probe` has returned None."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def inventory() -> dict[str, Any]:
    """What there is, for people; call after `probe` has returned None.

    The versions of CuPy (`cupy`), of the CUDA it was made for (`runtime`), of the newest that the driver takes
    (`driver`) and of NCCL (`nccl`, None where it is missing); and `devices`, each with name, capability, and bytes of
    memory, there and free.
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
    """12.4, which CUDA writes 12040."""
    return f"{code // 1000}.{code % 1000 // 10}"


def memory(devices: list[int]) -> int:
    """Bytes of the smallest of the devices' memories."""
    import cupy

    sizes = []
    for device in devices:
        with cupy.cuda.Device(device):
            sizes.append(int(cupy.cuda.runtime.memGetInfo()[1]))
    return min(sizes)
