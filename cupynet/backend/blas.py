"""The BLAS library that NumPy multiplies with: how many threads each worker gives it, and which kernels it runs.

OpenBLAS chooses its kernels when it is loaded, by the processor, or by OPENBLAS_CORETYPE where that is set.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from types import TracebackType
from typing import Any, ClassVar

from threadpoolctl import threadpool_info, threadpool_limits

from cupynet.backend.environment import available_cores, cpu_flags
from cupynet.core.checks import integer

THREADS_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
CORE_VARIABLE = "OPENBLAS_CORETYPE"

# Vector instructions, from the weakest: what /proc/cpuinfo must have for them, and OpenBLAS's kernels that use them.
INSTRUCTIONS: dict[str, tuple[set[str], set[str]]] = {
    "SSE": (set(), {"katmai", "coppermine", "northwood", "prescott", "banias", "core2", "penryn", "dunnington",
                    "nehalem", "atom", "nano", "athlon", "opteron", "opteron_sse3", "barcelona", "bobcat"}),
    "AVX": ({"avx"}, {"sandybridge", "bulldozer", "piledriver", "steamroller"}),
    "AVX2": ({"avx2", "fma"}, {"haswell", "zen", "excavator"}),
    "AVX-512": ({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
                {"skylakex", "cooperlake", "sapphirerapids"}),
}  # fmt: skip


# threads --------------------------------------------------------------------------------------------------------------


def threads_per_worker(backend_name: str, workers: int) -> int:
    """BLAS threads that each of `workers` replicas on this machine's processor uses.

    Never more than cores / workers, so that all of them together use the cores once, nor more than are set now. One
    with numba, unless the user has set a number: its large operations are kernels of its own; the products that are
    left gain nothing from a second thread, and on a machine that is busy with other things the threads' waiting for
    each other costs a multiple of their work.
    """
    share = max(1, available_cores() // integer("workers", workers, 1))
    asked = any(name in os.environ for name in THREADS_VARIABLES)
    return 1 if backend_name == "numba" and not asked else min(share, threads_now())


def threads_now() -> int:
    """BLAS threads as they are set: by the user's OPENBLAS_NUM_THREADS or the like, else one per core."""
    return min((info["num_threads"] for info in _libraries()), default=1)


class Limit:
    """Gives BLAS no more than `threads` threads, in the whole process, until it is closed; a context manager.

    Of several limits the lowest counts, whatever the order they are closed in; after the last one BLAS has what it had
    before the first. One that is dropped is closed.
    """

    _held: ClassVar[dict[int, int]] = {}  # limits that are not closed -> threads
    _before: ClassVar[Any] = None  # knows what was set before the first of them
    _lock: ClassVar[threading.RLock] = threading.RLock()  # reentrant: a dropped one is closed at any moment

    def __init__(self, threads: int) -> None:
        threads, key = integer("threads", threads, 1), next(_numbers)
        with self._lock:
            if not self._held:
                Limit._before = threadpool_limits(threads, user_api="blas")
            self._held[key] = threads
            self._apply()
        self.close = weakref.finalize(self, Limit._release, key)

    def __enter__(self) -> Limit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def _release(cls, key: int) -> None:
        with cls._lock:
            del cls._held[key]
            cls._apply()

    @classmethod
    def _apply(cls) -> None:
        if cls._held:
            threadpool_limits(min(cls._held.values()), user_api="blas")
        else:
            cls._before.restore_original_limits()


_numbers = itertools.count()


def limited(threads: int) -> Limit:
    """Give BLAS `threads` threads, in the whole process, until `close` of what is returned; a context manager too."""
    return Limit(threads)


# kernels --------------------------------------------------------------------------------------------------------------


def architecture() -> str | None:
    """The processor whose kernels NumPy's BLAS runs, as threadpoolctl names it; None where it does not tell."""
    name: str | None = _numpys().get("architecture")
    return name


def description() -> str:
    """NumPy's BLAS in words, such as `OpenBLAS 0.3.31, SkylakeX kernels`."""
    info = _numpys()
    api = info.get("internal_api")
    if api is None:
        return "of an unknown kind"
    name = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS"}.get(api, api)
    version = ".".join(str(info.get("version") or "").split(".")[:3])
    kernels = f", {info['architecture']} kernels" if info.get("architecture") else ""
    return f"{name} {version}".rstrip() + kernels


def held_below() -> str | None:
    """One line where OPENBLAS_CORETYPE holds BLAS to kernels below what the processor has; None where it does not."""
    asked, kernels = os.environ.get(CORE_VARIABLE), (architecture() or "").lower()
    levels = list(INSTRUCTIONS)
    used = next((levels.index(level) for level, (_, cores) in INSTRUCTIONS.items() if kernels in cores), None)
    if not asked or used is None:
        return None
    flags = set(cpu_flags())
    there = max(levels.index(level) for level, (needed, _) in INSTRUCTIONS.items() if needed <= flags)
    if used >= there:
        return None
    return f"{CORE_VARIABLE}={asked} holds BLAS to {levels[used]} kernels, this processor has {levels[there]}: unset it"


def _libraries() -> list[dict[str, Any]]:
    """What threadpoolctl knows of the BLAS libraries that are loaded."""
    return [info for info in threadpool_info() if info.get("user_api") == "blas"]


def _numpys() -> dict[str, Any]:
    """The library that NumPy brings (SciPy brings one of its own), else the first loaded; empty where none is known."""
    return min(_libraries(), key=lambda info: "numpy" not in str(info.get("filepath")), default={})
