"""How kernels are compiled.

Kernels release the GIL and run in the calling thread only: `parallel=True` aborts the process when several workers
call it. Compiled code is kept on disk, see `cache`. Arrays are C-contiguous. The fast-math flags allow contraction and
reassociation, and keep NaN and infinity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from cupynet.backend import update_rules
from cupynet.backend.cpu.kernels.cache import keep

if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, so nothing would be compiled")

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

FILES = [*sorted(Path(__file__).parent.glob("*.py")), Path(update_rules.__file__)]  # that kernels are built from
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:8]


def kernel(function: Kernel) -> Kernel:
    """Compile a function on first use, for the dtypes of its arguments.

    The cache file of a kernel is named after the constants that it closes over and a hash of `FILES`. numba numbers
    files of the same name, so one process would load what another compiled at the same time; and it checks only the
    kernel's own file for changes, not the files that the kernel is built from (`vectors`, `narrow`).
    """
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    constants = (getattr(constant, "__name__", str(constant)) for constant in cells)
    name = function.__qualname__.partition("-")[0]  # without what an earlier call has added
    function.__qualname__ = "-".join((name, *constants, SOURCES))
    compile_ = numba.njit(
        nogil=True,
        boundscheck=False,
        error_model="numpy",
        fastmath={"contract", "reassoc", "nsz", "arcp"},
        no_cfunc_wrapper=True,
    )
    compiled = compile_(function)
    keep(compiled, function)
    return cast(Kernel, compiled)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a kernel's loop into the kernel. Constants that it is given are constants in it."""
    numba.extending.overload(function, strict=False, prefer_literal=True)(lambda *_: function)
    return function
