"""What a machine is made of: Python and packages, cores and memory, BLAS, the compiler, the GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cupynet.commands.doctor.finding import ROOM, Finding
from cupynet.core.checks import one_line

THREADS = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
)
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml"}  # package -> the module it provides, if the names differ


def check_packages(asked: list[str]) -> Iterator[Finding]:
    """Python and what must be installed, in the versions that are asked for, and importable."""
    here, wanted = platform.python_version(), requirements()
    python = next((each for each in wanted if each.name == "python"), None)
    if python is not None and here not in python.specifier:
        yield Finding(
            "python", "problem", f"{here}, needed is {python.specifier}", "make an environment with another", 1
        )
    else:
        yield Finding("python", "ok", f"{here} in {sys.prefix}, {platform.platform()}")
    if not wanted:
        yield Finding("packages", "note", "what is required is not known here", "pip install it, or see pyproject.toml")
    good = []
    for each in wanted:
        if each.name == "python" or each.marker is not None:
            continue
        fault = unusable(each)
        optional = each.name == "numba"
        if fault is None:
            good.append(f"{each.name} {importlib.metadata.version(each.name)}")
        elif optional:
            yield Finding(each.name, "note", f"{fault}, and NumPy alone is slower", f"pip install '{plain(each)}'")
        else:
            yield Finding(each.name, "problem", fault, f"pip install '{plain(each)}'", 1)
    if good:
        yield Finding("packages", "ok", ", ".join(good))


def requirements() -> list[Any]:
    """What the installed package requires, and `python` with it; empty where neither says so."""
    try:
        from packaging.requirements import Requirement

        stated = importlib.metadata.metadata("cupynet")
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []
    return [Requirement(f"python{stated['Requires-Python']}"), *map(Requirement, stated.get_all("Requires-Dist") or [])]


def plain(requirement: Any) -> str:
    """As pip takes it."""
    return f"{requirement.name}{requirement.specifier}"


def unusable(requirement: Any) -> str | None:
    """Why a package cannot be used, or None."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, needed is {requirement.specifier}"
    try:
        importlib.import_module(MODULES.get(requirement.name, requirement.name))
    except Exception as error:  # built for another Python, a library that does not load
        return f"{version} cannot be imported ({type(error).__name__}: {one_line(error)})"
    return None


def check_cpu(asked: list[str]) -> Iterator[Finding]:
    """Cores and memory that this process may use."""
    from cupynet.backend import available_cores, cpu_model, usable_cores

    cores, there = available_cores(), os.cpu_count() or 1
    text = f"{cores} core{'s' * (cores > 1)} of {cpu_model()}"
    if cores < len(usable_cores()):
        text += f": a container's quota, of {there}"
    elif cores < there:
        text += f": this process may not use the others of {there}"
    yield Finding("cpu", "ok", text)
    with suppress(OSError):
        busy = os.getloadavg()[0]
        if busy > 1.5 * cores:
            text = f"{busy:.1f} processes want {cores} core{'s' * (cores > 1)} at this moment: times say little"
            yield Finding("cpu", "note", text, "end other programs")
    free, total = memory()
    if total:
        text = f"{free / 1e9:.1f} GB free of {total / 1e9:.1f} GB"
        small = free < ROOM
        way_out = "end other programs, or take fewer workers and smaller batches" if small else ""
        yield Finding("memory", "note" if small else "ok", text, way_out)


def memory() -> tuple[int, int]:
    """Return free and total bytes of memory for this process and its container; 0, 0 if unknown."""
    try:
        lines = dict(each.split(":", 1) for each in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    except (OSError, ValueError, KeyError):
        return 0, 0
    for most, now in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            allowed = int(Path("/sys/fs/cgroup", most).read_text())
            used = int(Path("/sys/fs/cgroup", now).read_text())
            free, total = min(free, max(allowed - used, 0)), min(total, allowed)
    return free, total


def check_blas(asked: list[str]) -> Iterator[Finding]:
    """What NumPy multiplies with, and what binds it."""
    import numpy as np

    from cupynet.backend import available_cores, blas

    ones = np.ones((64, 64), np.float32)
    if (ones @ ones != 64).any():
        yield Finding("blas", "problem", f"{blas.description()} multiplies wrongly", "install another NumPy", 1)
        return
    threads, cores = blas.threads_now(), available_cores()
    yield Finding("blas", "ok", f"{blas.description()}, {threads} thread{'s' * (threads > 1)}")
    if threads > cores:
        yield Finding("blas", "note", f"{threads} threads for {cores} cores", f"set OPENBLAS_NUM_THREADS={cores}")
    bound = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    if bound:
        yield Finding(
            "blas", "note", f"{', '.join(bound)} decide how its threads run", "unset them, unless that is meant"
        )
    below = blas.held_below()
    if below:
        yield Finding("blas", "note", below)


def check_numba(asked: list[str]) -> Iterator[Finding]:
    """Whether kernels are compiled, in several threads at once, and kept."""
    if importlib.util.find_spec("numba") is None:
        return  # check_packages says it
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from cupynet.backend.cpu.kernels import update as update_kernels
    from cupynet.backend.update_rules import Move

    def work(of: int) -> bool:
        """Another type for each, so that both compile."""
        vector = np.full(8, 2, (np.float32, np.float64)[of % 2])
        numbers = Move(rate=0.5).in_order()
        update_kernels.sgd(vector, np.ones_like(vector), tuple(vector.dtype.type(each) for each in numbers))
        return bool((vector == 1.5).all() and update_kernels.squared_norm(vector) == 18)

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        right = all(pool.map(work, range(8)))
    version = importlib.metadata.version("numba")
    if not right:
        yield Finding("numba", "problem", f"{version} computes wrongly", "take backend=numpy, or another numba", 1)
        return
    seconds, cache = time.perf_counter() - began, update_kernels.squared_norm._cache  # type: ignore[attr-defined]
    where = "compiled kernels are not kept" if cache.trouble else f"kernels are kept in {cache.cache_path}"
    yield Finding("numba", "ok", f"{version} compiles in threads ({seconds:.1f} s), {where}")


def check_gpu(asked: list[str]) -> Iterator[Finding]:
    """The driver, CuPy, each GPU, and what would connect several."""
    driver = drivers()
    if driver:
        yield Finding("driver", "ok", driver)
    if importlib.util.find_spec("cupy") is None:
        missing = "there is no CuPy" if driver else "there is no NVIDIA driver and no CuPy: the processor computes"
        yield Finding(
            "gpu", "note", missing, "pip install 'cupynet[cuda12x]', or cuda13x, by its CUDA" if driver else ""
        )
        return
    from cupynet.backend import cuda

    fault = cuda.probe()
    if fault is not None:
        way_out = "pip install the CuPy of its CUDA, see nvidia-smi" if driver else "install NVIDIA's driver"
        yield Finding("gpu", "note", f"{fault}: the processor computes", way_out)
        return
    found = cuda.inventory()
    yield Finding(
        "cupy", "ok", f"{found['cupy']} for CUDA {found['runtime']}; the driver takes up to {found['driver']}"
    )
    if release(found["runtime"]) > release(found["driver"]):
        yield Finding("cupy", "note", "it is newer than the driver", "install a newer driver, or the CuPy of its CUDA")
    for count, each in enumerate(found["devices"]):
        free, total = each["free"] / 1e9, each["memory"] / 1e9
        text = f"{each['name']}, compute capability {each['capability']}, {free:.1f} GB free of {total:.1f} GB"
        yield Finding(f"gpu {count}", "ok", text)
    yield Finding("nccl", "ok" if found["nccl"] else "note", nccl_said(found["nccl"]))


def release(version: str) -> tuple[int, ...]:
    """A version as numbers: 12.10 is later than 12.9."""
    return tuple(map(int, version.split(".")))


def nccl_said(version: str | None) -> str:
    """What is made of NCCL."""
    if version:
        return f"{version} is there: averages of several GPUs go over it"
    return "is not there: averages of several GPUs are made on the first of them, or between processes on the host"


def drivers() -> str:
    """Return what nvidia-smi prints about the driver and its GPUs; "" if it cannot be run."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = [each for each in done.stdout.splitlines() if each.strip()]
    if done.returncode or not lines:
        return f"nvidia-smi fails ({one_line(done.stdout + done.stderr)[:80]})"
    return f"NVIDIA {lines[0].split(',')[0]}, {len(lines)} GPU{'s' * (len(lines) > 1)}"
