"""Which backend a run uses: the one asked for, or the first by priority that works on this machine."""

from __future__ import annotations

import importlib
import importlib.util

from cupynet.backend.backend import Backend
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.core import checks
from cupynet.core.checks import BACKENDS
from cupynet.core.errors import ConfigError

CUPY = "pip install 'cupynet[cuda12x]', or cuda13x, by the driver's CUDA"  # what brings it


def select_backend(
    name: str = "auto", *, gpu_priority: int = 100, cpu_priority: int = 0, device: int = 0
) -> tuple[str, str | None]:
    """The name of the backend to use, and why the preferred one is not it (None where it is).

    `auto` takes the kind with the highest priority that works, as Deeplearning4j's BACKEND_PRIORITY_GPU and _CPU do:
    the GPU is cupy, the CPU is numba, or numpy where numba is not installed. A backend asked for by name is taken or
    refused, never replaced. device: the GPU on which it is tried whether they work, this process's own.

    Raises:
        ConfigError: the name is unknown, or that backend cannot work here.
    """
    if name == "auto":
        if gpu_priority < cpu_priority:
            cpu, reason = _cpu()
            return cpu, reason
        missing = _missing("cupy", device)
        if missing is None:
            return "cupy", None
        cpu, reason = _cpu()
        return cpu, missing if reason is None else f"{missing}; {reason}"
    checks.one_of("backend", name, ("auto", *BACKENDS))
    missing = _missing(name, device)
    if missing is not None:
        brings = f": {CUPY}" if missing.startswith("CuPy is not installed") else ""
        raise ConfigError(f"backend={name}: {missing}{brings}; use backend=auto to take what works here")
    return name, None


def create_backend(
    name: str,
    dtype: str = "float",
    device: int = 0,
    *,
    max_block_size: int = 256,
    max_grid_size: int | None = None,
    tf32: bool = False,
) -> Backend:
    """A new backend for one replica, with its own workspace.

    Args:
        name: numpy, numba or cupy; auto takes what `select_backend` would.
        dtype: half, float or double, see `DtypePolicy`.
        device: number of the GPU.
        max_block_size, max_grid_size: threads of a block and blocks of a grid that cupy launches at most.
        tf32: whether cupy multiplies floats in TF32, in which a number has 10 bits behind the point.

    Raises:
        ConfigError: there is no such backend or dtype, or CuPy is not installed, or a size is out of range; tf32 on a
            CPU, or in another precision than float.
    """
    checks.one_of("backend", name, ("auto", *BACKENDS))
    if name == "auto":
        name, _ = select_backend()
    checks.tf32_products("tf32", tf32, name, dtype)
    if name == "cupy":
        from cupynet.backend.cuda import CupyBackend

        try:
            return CupyBackend(dtype, device, max_block_size, max_grid_size, tf32=tf32)
        except ImportError as error:
            raise ConfigError(
                f"backend=cupy: CuPy is not installed ({error}): {CUPY}; take auto for what works here"
            ) from error
    if name == "numba":
        from cupynet.backend.cpu.numba_backend import NumbaBackend  # numba is imported only if it is used

        return NumbaBackend(dtype, device)
    return NumpyBackend(dtype, device)


def device_count(name: str) -> int:
    """How many devices the backend has; 0 for a CPU backend."""
    if name != "cupy":
        return 0
    from cupynet.backend import cuda

    return cuda.device_count()


def _cpu() -> tuple[str, str | None]:
    missing = _missing("numba")
    return ("numba", None) if missing is None else ("numpy", missing)


def _missing(name: str, device: int = 0) -> str | None:
    """Why a backend cannot be used here, or None; that of GPUs is tried on one of them."""
    if name == "cupy":
        from cupynet.backend import cuda

        return cuda.probe(device)
    if name == "numba":
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed"
        try:
            importlib.import_module("cupynet.backend.cpu.kernels.jit")
        except (ImportError, RuntimeError) as error:  # too old for this NumPy
            reason = str(error).partition("\n")[0]
            return f"numba cannot be used ({reason})"
    return None
