"""Which BLAS kernels suit this processor; for the commands, before anything imports NumPy.

OpenBLAS chooses its kernels by the processor's model when it is loaded. A model that it does not know yet gets the
kernels of an old one: a Zen 5 gets AVX2 kernels, at half the speed of its AVX-512. OPENBLAS_CORETYPE tells it better.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
FIRST_UNKNOWN_FAMILY = 26  # of AMD: Zen 5; OpenBLAS knows Zen 4 (family 25)

chosen: str | None = None  # what `choose_blas_kernels` chose in this process


def choose_blas_kernels(cpuinfo: str | None = None, environment: MutableMapping[str, str] | None = None) -> str | None:
    """Set OPENBLAS_CORETYPE where OpenBLAS would take AVX2 kernels although the processor has AVX-512.

    Never against the user's own setting, nor after NumPy has been imported, when it is too late. Returns what was set.

    Args:
        cpuinfo: the content of /proc/cpuinfo; read unless given.
        environment: where to set it; the process's own unless given.
    """
    global chosen
    own = environment is None
    environment = os.environ if environment is None else environment
    if VARIABLE in environment or (own and "numpy" in sys.modules):
        return None
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            return None
    if not needs_help(cpuinfo):
        return None
    environment[VARIABLE] = "SkylakeX"
    if own:
        chosen = environment[VARIABLE]
    return environment[VARIABLE]


def needs_help(cpuinfo: str) -> bool:
    """Whether this is an AMD processor with AVX-512 that OpenBLAS does not know."""
    first = cpuinfo.partition("\n\n")[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    family = fields.get("cpu family", "")
    known = not family.isdigit() or int(family) < FIRST_UNKNOWN_FAMILY
    return fields.get("vendor_id") == "AuthenticAMD" and not known and set(fields.get("flags", "").split()) >= AVX512
