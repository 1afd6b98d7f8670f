from __future__ import annotations

import importlib

from cupynet.backend.backend import Backend
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.cuda.gpus import NOT_INSTALLED
from cupynet.core import checks, shared_options
from cupynet.core.errors import ConfigError
from cupynet.core.shared_options import BACKENDS

CUPY = "Run pip install 'cupynet[cuda12x]', or cuda13x, depending on the driver"


def select_backend(
    name: str = "auto", *, gpu_priority: int = 100, cpu_priority: int = 0, device: int = 0
) -> tuple[str, str | None]:
    """Return the name of the backend to use, and the reason why it is not the preferred one, or None.

    `auto` chooses between GPU (cupy) and CPU (numba, or else numpy) by availability and priority, like
    BACKEND_PRIORITY_GPU and BACKEND_PRIORITY_CPU in Deeplearning4j. A backend chosen by name is never replaced.
    device: the GPU on which to test cupy.

    Raises:
        ConfigError: the name is unknown, or the backend with this name is not available.
    """
    if name == "auto":
        reasons: list[str] = []
        for candidate in ("cupy", "numba") if gpu_priority >= cpu_priority else ("numba",):
            missing = _missing(candidate, device)
            if missing is None:
                return candidate, "; ".join(reasons) or None
            reasons.append(missing)
        return "numpy", "; ".join(reasons)
    checks.one_of("backend", name, ("auto", *BACKENDS))
    missing = _missing(name, device)
    if missing is not None:
        remedy = f". {CUPY}" if missing.startswith(NOT_INSTALLED) else ""
        raise ConfigError(f"{missing}{remedy}. backend=auto selects an available backend", "backend", name)
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
    """Create a backend for one replica, with a separate workspace.

    Args:
        name: numpy, numba, cupy, or auto (see `select_backend`).
        dtype: half, bfloat16, float or double (see `DtypePolicy`).
        device: GPU index.
        max_block_size, max_grid_size: maximum number of threads per block, and of blocks per grid, of GPU kernels.
        tf32: True to multiply floats with cupy in TF32, which has a 10-bit mantissa.

    Raises:
        ConfigError: an argument is invalid, or tf32 is used on a CPU or with a dtype other than float.
        ImportError: CuPy or Numba is not installed.
    """
    checks.one_of("backend", name, ("auto", *BACKENDS))
    if name == "auto":
        name, _ = select_backend()
    shared_options.tf32_products("tf32", tf32, name, dtype)
    if name == "cupy":
        from cupynet.backend.cuda.backend import CupyBackend

        return CupyBackend(dtype, device, max_block_size, max_grid_size, tf32=tf32)
    if name == "numba":
        from cupynet.backend.cpu.numba_backend import NumbaBackend  # Numba is imported only if used

        return NumbaBackend(dtype, device)
    return NumpyBackend(dtype, device)


def device_count(name: str) -> int:
    """Return the number of GPUs that a backend can use; 0 for a CPU backend."""
    if name != "cupy":
        return 0
    from cupynet.backend.cuda import gpus

    return gpus.device_count()


def _missing(name: str, device: int) -> str | None:
    if name == "cupy":
        from cupynet.backend.cuda import gpus

        return gpus.probe(device)
    if name == "numba":
        try:
            importlib.import_module("cupynet.backend.cpu.kernels.jit")
        except (ImportError, RuntimeError) as error:  # for example, Numba is too old for this NumPy
            reason = str(error).partition("\n")[0]
            return f"Numba cannot be used ({reason})"
    return None
