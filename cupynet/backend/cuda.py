"""The GPU backend, on CuPy: the only file of the package that imports it.

CuPy imports without a GPU and fails on first use in several ways; `probe` tries a real kernel and a real product and
returns the reason as text. All GEMMs are 2-D (see `Backend._product`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.base import Backend
from cupynet.backend.policy import DtypePolicy

LINE = "\n"


def probe() -> str | None:
    """Why CuPy cannot be used on this machine, in a few words, or None where it can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # installed and broken: built for another NumPy, a library that does not load
        return f"CuPy cannot be imported ({str(error).partition(LINE)[0]})"
    try:
        if not cupy.is_available():
            return "CuPy finds no usable GPU or driver"
        x = cupy.ones((2, 2), np.float32)
        (x @ x + 1).get()
    except Exception as error:  # the compiler's is neither an ImportError nor a RuntimeError
        return f"CuPy cannot run a kernel ({str(error).partition(LINE)[0]})"
    return None


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


class CupyBackend(Backend):
    """The reference operations on CuPy arrays of one device.

    Each worker calls `activate` once, in its own thread: the current device and stream are the thread's, and every
    array and kernel of the worker belongs to its stream. What other threads ask of this backend (a
    prefetcher making batches, a caller reading weights) is put on the same stream: it happens in the order it was asked
    for, and memory that was freed is written again only after its last use.
    """

    name = "cupy"

    def __init__(self, dtype: str = "float", device: int = 0) -> None:
        import cupy

        self.xp = cupy
        self._stream: Any = None
        super().__init__(DtypePolicy.of(dtype, half_arithmetic=True), device)

    def activate(self) -> None:
        self.xp.cuda.Device(self.device).use()
        # one that waits for the null stream, and that one for it: there the caller's own thread makes and reads weights
        self._stream = self.xp.cuda.Stream()
        self._stream.__enter__()  # after `use`, the end of a `with` block would bring the null stream back

    @contextmanager
    def _here(self) -> Iterator[None]:
        """This backend's device and stream as the calling thread's, for a while."""
        with self.xp.cuda.Device(self.device), self._stream or nullcontext():
            yield

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        with self._here():
            return super().allocate(shape, dtype)

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        with self._here():
            return super().asarray(array, dtype)

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def to_host(self, array: Array) -> Any:
        with self._here():
            return self.xp.asnumpy(array)

    def load_images(self, images: Any, samples: Any) -> Array:
        with self._here():
            return super().load_images(images, samples)

    def synchronize(self) -> None:
        with self._here():
            self.xp.cuda.get_current_stream().synchronize()


def limit_pools(devices: list[int], limit: int | float) -> None:
    """Cap what each device's pool may hold, used and cached: bytes, or a float as a fraction of the device."""
    import cupy

    for device in devices:
        with cupy.cuda.Device(device):
            pool = cupy.get_default_memory_pool()
            if isinstance(limit, float):
                pool.set_limit(fraction=limit)
            else:
                pool.set_limit(size=limit)


def trim_pools(devices: list[int], device_above: int | None, pinned_above: int | None) -> None:
    """Free what the pools keep unused.

    Args:
        devices: the GPUs.
        device_above: bytes; a device pool that keeps more is emptied. None keeps all.
        pinned_above: free blocks, for that is all the pinned pool can tell; with more it is emptied. None keeps all.
    """
    import cupy

    for device in devices if device_above is not None else ():
        with cupy.cuda.Device(device):
            pool = cupy.get_default_memory_pool()
            if pool.free_bytes() > device_above:
                pool.free_all_blocks()
    pinned = cupy.get_default_pinned_memory_pool()
    if pinned_above is not None and pinned.n_free_blocks() > pinned_above:
        pinned.free_all_blocks()
