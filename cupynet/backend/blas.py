"""The BLAS library of NumPy, and the threads that it uses for each worker."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from threadpoolctl import threadpool_info, threadpool_limits

from cupynet.backend.environment import available_cores
from cupynet.core.checks import integer

THREADS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def threads_per_worker(backend_name: str, workers: int) -> int:
    """Return the number of BLAS threads for each of `workers` replicas on this machine's processor.

    At most cores / workers, and at most the number that is set now. With numba it is one, unless the user has set a
    number: the large operations are kernels, the remaining products gain nothing from a second thread, and on a busy
    machine waiting threads cost several times the work they do.
    """
    share = max(1, available_cores() // integer("workers", workers, 1))
    asked = any(name in os.environ for name in THREADS_VARIABLES)
    return 1 if backend_name == "numba" and not asked else min(share, threads_now())


def threads_now() -> int:
    """Return the number of BLAS threads that is set, by OPENBLAS_NUM_THREADS or similar; one per core by default."""
    return min((info["num_threads"] for info in _libraries()), default=1)


class Limit(AbstractContextManager["Limit"]):
    """Limits BLAS to `threads` threads, in the whole process, until `close`; a context manager.

    The lowest of several limits applies, in whatever order they are closed. After the last one, BLAS has the threads
    that it had before the first. A limit that is garbage-collected is closed.
    """

    _held: ClassVar[list[int]] = []  # the threads of each limit that is not closed
    _before: ClassVar[Any] = None  # restores the threads from before the first limit
    _lock: ClassVar[threading.RLock] = threading.RLock()  # reentrant: garbage is collected at any moment

    def __init__(self, threads: int) -> None:
        threads = integer("threads", threads, 1)
        with self._lock:
            if not self._held:
                Limit._before = threadpool_limits(threads, user_api="blas")
            self._held.append(threads)
            self._apply()
        self.close = weakref.finalize(self, Limit._release, threads)

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _release(cls, threads: int) -> None:
        with cls._lock:
            cls._held.remove(threads)
            cls._apply()

    @classmethod
    def _apply(cls) -> None:
        if cls._held:
            threadpool_limits(min(cls._held), user_api="blas")
        else:
            cls._before.restore_original_limits()


def description() -> str:
    """Describe the BLAS of NumPy, such as `OpenBLAS 0.3.31, SkylakeX kernels`."""
    # NumPy's own library, or the first: SciPy brings another one
    info = min(_libraries(), key=lambda info: "numpy" not in str(info.get("filepath")), default={})
    api = info.get("internal_api")
    if api is None:
        return "of an unknown kind"
    name = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS"}.get(api, api)
    version = ".".join(str(info.get("version") or "").split(".")[:3])
    kernels = f", {info['architecture']} kernels" if info.get("architecture") else ""
    return f"{name} {version}".rstrip() + kernels


def _libraries() -> list[dict[str, Any]]:
    """Return the loaded BLAS libraries, as threadpoolctl describes them."""
    return [info for info in threadpool_info() if info.get("user_api") == "blas"]
