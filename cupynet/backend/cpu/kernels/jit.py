"""How kernels are compiled.

Each kernel releases the GIL and runs on the calling thread alone (`parallel=True` aborts the process when several
workers enter it). Compiled code is kept on disk, see `cache`. Arrays are C-contiguous. The fast-math flags allow
contraction and reassociation but keep NaN and infinity meaningful.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from cupynet.backend.cpu.kernels.cache import KernelCache

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

SOURCES = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:8]

KERNELS: list[Any] = []  # all that were made in this process


def kernel(function: Kernel) -> Kernel:
    """Compile on first use, for the dtypes it is called with.

    A kernel that is made for some constants has a cache file named after them and after the state of this folder's
    sources. Files of one name are numbered by numba: of two processes that compile at once, one would find the other's
    code. And numba looks at a kernel's own file only, not at what it is made of (`vectors`).
    """
    if function.__closure__:
        constants = (str(cell.cell_contents) for cell in function.__closure__)
        function.__qualname__ = "-".join((function.__qualname__, *constants, SOURCES))
    compile_ = numba.njit(
        nogil=True, boundscheck=False, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"}
    )
    compiled = compile_(function)
    compiled._cache = KernelCache(function)  # in place of what cache=True makes, whose errors would be the run's
    KERNELS.append(compiled)
    return cast(Kernel, compiled)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a kernel's loop, compiled into it."""
    found: Callable[..., Any] = numba.extending.register_jitable(function)
    return found


def compiled() -> bool:
    """Return True if any kernel was compiled or loaded in this process; importing the package must not do it."""
    return any(len(each.signatures) > 0 for each in KERNELS)
