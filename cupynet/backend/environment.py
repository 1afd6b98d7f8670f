"""Information about the machine and the source code, recorded with every result."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController

PACKAGES = ("cupynet", "numpy", "numba", "hydra-core", "safetensors", "cupy-cuda12x", "cupy-cuda13x", "torch")
SOURCES = ("cupynet", "conf")  # folders of the source tree that affect results
GIT_TIMEOUT_S = 2.0  # a network file system may hang


def available_cores() -> int:
    """Return the number of cores that this process may use, given its affinity and cgroup quota (rounded up)."""
    cores = len(usable_cores())
    with contextlib.suppress(OSError, ValueError):  # the file is missing or contains `max`
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = max(1, min(cores, math.ceil(int(quota) / int(period))))
    return cores


def usable_cores() -> set[int]:
    affinity = getattr(os, "sched_getaffinity", None)  # missing on macOS
    return set(affinity(0)) if affinity is not None else set(range(os.cpu_count() or 1))


def memory() -> tuple[int, str] | None:
    """Return the memory limit in bytes and a phrase that names its source (machine or cgroup), or None if unknown."""
    bounds = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not available on every system
        bounds.append((os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has"))
    with contextlib.suppress(OSError):
        group = Path(Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/"))
        for folder in (group, *group.parents):  # in a container the path may not exist
            with contextlib.suppress(OSError, ValueError):  # the file is missing or contains `max`
                limit = int(("/sys/fs/cgroup" / folder / "memory.max").read_text())
                bounds.append((limit, "this process may use"))
    return min(bounds, default=None)


def cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """Return the processor's vector instruction sets, by their Linux names; empty if unknown."""
    kinds = ("sse", "avx", "fma", "f16c", "amx", "asimd", "sve", "neon")
    return sorted(flag for flag in _cpuinfo("flags", "Features").split() if flag.startswith(kinds))


def _cpuinfo(*keys: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return ""


def commit(tree: Path = Path(__file__).parents[2]) -> str | None:
    """Return the git commit of the source tree, followed by `-dirty` if tracked files in cupynet/ or conf/ changed.

    CUPYNET_COMMIT takes precedence if it is a valid commit. Return None without .git or any commit, or if git fails.
    """
    if re.fullmatch("[0-9a-f]{7,64}", variable := os.environ.get("CUPYNET_COMMIT", "")):
        return variable
    if not (tree / ".git").exists():  # a wheel may be installed inside another repository
        return None
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(tree), "status", "--porcelain=v2"]
    command += ["--branch", "--no-ahead-behind", "--untracked-files=no", "--", *SOURCES]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.decode(errors="replace").splitlines()
    oid = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not oid.isalnum():  # `(initial)` before the first commit
        return None
    return f"{oid}-dirty" if any(not line.startswith("#") for line in lines) else oid


@functools.cache  # finding the libraries takes milliseconds
def thread_pools() -> ThreadpoolController:
    """Return the thread pools of the libraries that were loaded before the first call, NumPy's BLAS among them."""
    import numpy  # noqa: F401 - loads its BLAS

    return ThreadpoolController()


def numpy_blas() -> list[dict[str, Any]]:
    """Return threadpoolctl's description of NumPy's BLAS libraries, or of all BLAS libraries if NumPy's are unknown."""
    libraries = [info for info in thread_pools().info() if info.get("user_api") == "blas"]
    return [info for info in libraries if "numpy" in str(info.get("filepath"))] or libraries


@functools.cache  # a call takes 2 ms, and each checkpoint needs it
def package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def environment() -> dict[str, Any]:
    blas = [
        {key: info.get(key) for key in ("internal_api", "version", "architecture", "num_threads")}
        for info in numpy_blas()
    ]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cpu_flags": cpu_flags(),
        "cores": available_cores(),
        "blas": blas,
        "versions": dict(package_versions()),
    }
