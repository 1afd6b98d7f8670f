"""NumPy's BLAS library and its threads."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from threadpoolctl import threadpool_limits

from cupynet.backend.environment import available_cores, numpy_blas
from cupynet.core.checks import integer

THREADS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def threads_per_worker(backend_name: str, workers: int) -> int:
    """Return the number of BLAS threads for each of `workers` replicas: at most cores / workers and the present number.

    One with numba, unless the user has set a number: the remaining products are small, and waiting threads cost several
    times the work they do.
    """
    share = max(1, available_cores() // integer("workers", workers, 1))
    asked = any(name in os.environ for name in THREADS_VARIABLES)
    return 1 if backend_name == "numba" and not asked else min(share, threads_now())


def threads_now() -> int:
    """Return the current number of BLAS threads, set by OPENBLAS_NUM_THREADS or similar; one per core by default."""
    return min((info["num_threads"] for info in numpy_blas()), default=1)


class Limit(AbstractContextManager["Limit"]):
    """Context that limits BLAS to `threads` threads in the whole process; of nested limits, the last one applies."""

    _lock = threading.Lock()
    _entered = 0
    _before: Any = None

    def __init__(self, threads: int) -> None:
        self._threads = integer("threads", threads, 1)

    def __enter__(self) -> Limit:
        with Limit._lock:
            set_now = threadpool_limits(self._threads, user_api="blas")
            if not Limit._entered:
                Limit._before = set_now
            Limit._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        with Limit._lock:
            Limit._entered -= 1
            if not Limit._entered:
                Limit._before.restore_original_limits()


def description() -> str:
    """Describe NumPy's BLAS, such as `openblas 0.3.31, SkylakeX kernels`."""
    info = next(iter(numpy_blas()), {})
    version = ".".join(str(info.get("version") or "").split(".")[:3])
    kernels = f", {info['architecture']} kernels" if info.get("architecture") else ""
    return f"{info.get('internal_api', 'unknown')} {version}".rstrip() + kernels
