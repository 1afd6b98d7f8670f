"""Compilation of kernels.

Kernels release the GIL and are single-threaded, because a kernel compiled with `parallel=True` aborts the process if
several workers call it at the same time. Arrays are C-contiguous, unless a kernel says otherwise. The fast-math flags
allow contraction, reassociation and reciprocals, and ignore the sign of zero, but preserve NaN and infinity.
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
    raise ImportError("NUMBA_DISABLE_JIT is set, so kernels cannot be compiled")

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

FILES = [*sorted(Path(__file__).parent.glob("*.py")), Path(update_rules.__file__)]  # sources of the kernels
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:8]


def kernel(function: Kernel) -> Kernel:
    """Compile a function on first use, for the dtypes of its arguments.

    The cache file is named after the constants in the kernel's closure and a hash of `FILES`. Otherwise, Numba would
    confuse kernels with the same name across processes, and would only notice changes in the kernel's own file.
    """
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    constants = (getattr(constant, "__name__", str(constant)) for constant in cells)
    name = function.__qualname__.partition("-")[0]  # without the suffix of an earlier call
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
    """Inline a function into the kernels that call it. Literal arguments become compile-time constants."""
    # Only kernels call the function, so a wrapper for C would be compiled in vain.
    numba.extending.overload(function, strict=False, prefer_literal=True, jit_options={"no_cfunc_wrapper": True})(
        lambda *_: function
    )
    return function
