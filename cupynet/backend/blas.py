from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from cupynet.backend.environment import available_cores, numpy_blas, thread_pools

THREADS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def threads_per_worker(backend_name: str, workers: int) -> int:
    """Return the number of BLAS threads per worker: at most cores / workers, and at most the current number."""
    share = max(1, available_cores() // workers)
    set_by_user = any(name in os.environ for name in THREADS_VARIABLES)
    # one thread by default with Numba, because the remaining matrix products are small
    return 1 if backend_name == "numba" and not set_by_user else min(share, threads_now())


def threads_now() -> int:
    return min((info["num_threads"] for info in numpy_blas()), default=1)


class Limit(AbstractContextManager["Limit"]):
    """Limits the BLAS libraries of `thread_pools` to `threads` threads in the whole process.

    The last context entered applies until all have exited.
    """

    _lock = threading.Lock()
    _entered = 0
    _before: Any = None

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> Limit:
        with Limit._lock:
            _release_control()
            limits = thread_pools().limit(limits=self._threads, user_api="blas")
            if not Limit._entered:
                Limit._before = limits
            Limit._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        with Limit._lock:
            Limit._entered -= 1
            if not Limit._entered:
                _release_control()
                Limit._before.restore_original_limits()
                _release_control()


def _release_control() -> None:
    """Let any thread set limits. Since threadpoolctl 3.8, OpenBLAS otherwise ignores all threads but the first."""
    for library in thread_pools().lib_controllers:
        if hasattr(library, "clear_controlling_thread"):
            library.clear_controlling_thread(force=True)


def description() -> str:
    """Describe NumPy's BLAS, for example `openblas 0.3.31, SkylakeX kernels`."""
    info = next(iter(numpy_blas()), {})
    version = ".".join(str(info.get("version") or "").split(".")[:3])
    kernels = f", {info['architecture']} kernels" if info.get("architecture") else ""
    return f"{info.get('internal_api', 'unknown')} {version}".rstrip() + kernels
