"""What this machine is, and which commit runs on it: recorded beside every result.

Cores that a process may use, BLAS kernels and threads, versions.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_info

PACKAGES = ("cupynet", "numpy", "numba", "hydra-core", "safetensors", "cupy-cuda12x", "cupy-cuda13x")
SOURCES = ("cupynet", "conf")  # what a result follows from, at the top of the source tree
GIT_TIMEOUT_S = 2.0  # it takes milliseconds, but a network file system may hang


def available_cores() -> int:
    """Cores this process may use: by affinity, and by the cgroup quota that containers are given (rounded up)."""
    cores = len(usable_cores())
    quota = _cgroup_quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def usable_cores() -> set[int]:
    """The numbers of the cores that this process may run on, by its affinity."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return set(affinity(0)) if affinity is not None else set(range(os.cpu_count() or 1))


def _cgroup_quota() -> float | None:
    """Cores granted by the cgroup (version 2, else 1), None where there is no quota."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text()
        period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError):
        return None


def memory() -> tuple[int, str] | None:
    """Bytes that this process may use, swap included, and whose they are, as the subject of a sentence that has them.

    The least of what the machine has, what its cgroup is granted and the limits of the shell (ulimit -v, -d). None
    where the system does not tell.
    """
    bounds = [(size, "this process may use") for size in (*_cgroup_memory(), *_limits())]
    physical = _physical_memory()
    if physical is not None:
        bounds.append((physical, "this machine has"))
    return min(bounds, default=None)


def _physical_memory() -> int | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows; a system without these names
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return size + sum(1024 * int(line.split()[1]) for line in lines if line.startswith("SwapTotal:"))
    except (OSError, ValueError, IndexError):
        return size


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What this process's cgroup and those that it lies in are granted (versions 2 and 1)."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        below = Path(path.lstrip("/"))
        for folder in (below, *below.parents):  # in a container the path may be one of outside: what is there counts
            with contextlib.suppress(OSError, ValueError):  # no limit: `max`, or none at the root
                found.append(int((top / folder / name).read_text()))
    return found


def _limits() -> list[int]:
    """The limits of a process on its memory, where they are set."""
    try:
        import resource
    except ImportError:  # Windows
        return []
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def cpu_model() -> str:
    """The processor's name as the operating system has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """The vector instructions of the processor, by the operating system's names; empty where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return sorted(
        flag for flag in flags if flag.startswith(("sse", "avx", "fma", "f16c", "amx", "asimd", "sve", "neon"))
    )


def commit(tree: Path = Path(__file__).parents[2]) -> str | None:
    """The git commit of the source tree that the package runs from; None where there is none to tell.

    `-dirty` is appended where tracked files under cupynet/ or conf/ differ from it. None: an installed wheel, no git, a
    repository that git refuses to read. A copy without .git has what the variable CUPYNET_COMMIT says, if it is one.

    Args:
        tree: the folder that holds the package and .git.
    """
    if not (tree / ".git").exists():  # a wheel may lie inside somebody else's repository
        return said if re.fullmatch("[0-9a-f]{7,64}", said := os.environ.get("CUPYNET_COMMIT", "")) else None
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(tree), "status", "--porcelain=v2"]
    command += ["--branch", "--no-ahead-behind", "--untracked-files=no", "--", *SOURCES]
    elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set in a hook, for the repository that it runs for
    variables = {name: value for name, value in os.environ.items() if name not in elsewhere}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=variables, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    oid = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not oid.isalnum():  # `(initial)`: nothing has been committed yet
        return None
    return f"{oid}-dirty" if any(not line.startswith("#") for line in lines) else oid


def environment() -> dict[str, Any]:
    """A JSON-ready fingerprint of the machine and the program.

    Python, system, processor and its vector instructions, cores, BLAS libraries with kernels and threads, versions.
    """
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    blas = [
        {key: info.get(key) for key in ("internal_api", "version", "architecture", "num_threads")}
        for info in threadpool_info()
        if info.get("user_api") == "blas"
    ]
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cpu_flags": cpu_flags(),
        "cores": available_cores(),
        "blas": blas,
        "versions": versions,
    }
