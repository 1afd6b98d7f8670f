"""Checks of the machine: Python and packages, cores and memory, BLAS, the compiler, the GPU."""

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
from typing import Any

from cupynet.commands.doctor.finding import ROOM, Finding
from cupynet.core.checks import amount, one_line

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES")
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml"}  # package -> the module it provides, if the names differ


def check_packages(asked: list[str]) -> Iterator[Finding]:
    """Check that the required packages are installed in the required versions and can be imported."""
    yield Finding("python", "ok", f"{platform.python_version()} in {sys.prefix}, {platform.platform()}")
    wanted, good = requirements(), []
    if not wanted:
        yield Finding("packages", "note", "the requirements are not known here", "pip install cupynet")
    for each in wanted:
        fault = unusable(each)
        way_out = f"pip install '{each.name}{each.specifier}'"
        if fault is None:
            good.append(f"{each.name} {importlib.metadata.version(each.name)}")
        elif each.name == "numba":
            yield Finding(each.name, "note", f"{fault}, and NumPy alone is slower", way_out)
        else:
            yield Finding(each.name, "problem", fault, way_out, 1)
    if good:
        yield Finding("packages", "ok", ", ".join(good))


def requirements() -> list[Any]:
    """Return what the installed package requires without extras; an empty list if it is not installed."""
    try:
        from packaging.requirements import Requirement

        stated = map(Requirement, importlib.metadata.requires("cupynet") or [])
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []
    return [each for each in stated if each.marker is None]


def unusable(requirement: Any) -> str | None:
    """Return why a package cannot be used, or None."""
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
    """Check the cores and the memory that this process may use."""
    from cupynet.backend.environment import available_cores, cpu_model, memory

    cores, there, busy = available_cores(), os.cpu_count() or 1, os.getloadavg()[0]
    share = f"{cores}" if cores == there else f"{cores} of {there} (by affinity or a container's quota)"
    yield Finding("cpu", "ok", f"{share} cores of {cpu_model()}")
    if busy > 1.5 * cores:
        yield Finding("cpu", "note", f"{busy:.1f} processes want to run now: times say little", "end other programs")
    found = memory()
    if found is not None:
        size, whose = found
        small = size < ROOM
        way_out = "lower workers and batch_size" if small else ""
        yield Finding("memory", "note" if small else "ok", f"{whose} {amount(size)}", way_out)


def check_blas(asked: list[str]) -> Iterator[Finding]:
    """Check the library that multiplies matrices, and the settings of its threads."""
    import numpy as np

    from cupynet.backend import available_cores, blas

    ones = np.ones((64, 64), np.float32)
    if (ones @ ones != 64).any():
        yield Finding("blas", "problem", f"{blas.description()} multiplies wrongly", "install another NumPy", 1)
        return
    threads, cores = blas.threads_now(), available_cores()
    yield Finding("blas", "ok", f"{blas.description()}, threads: {threads}")
    if threads > cores:
        yield Finding("blas", "note", f"{threads} threads for {cores} cores", f"set OPENBLAS_NUM_THREADS={cores}")
    if bound := [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]:
        yield Finding("blas", "note", f"{', '.join(bound)} decide how its threads run", "unset them if unintended")


def check_numba(asked: list[str]) -> Iterator[Finding]:
    """Check that kernels are compiled, compute correctly and are cached."""
    if importlib.util.find_spec("numba") is None:
        return  # check_packages says it
    import numpy as np

    from cupynet.backend.cpu.kernels import update as update_kernels
    from cupynet.backend.update_rules import Move

    began, vector = time.perf_counter(), np.full(8, 2, np.float32)
    update_kernels.sgd(vector, np.ones_like(vector), tuple(map(np.float32, Move(rate=0.5).in_order())))
    version = importlib.metadata.version("numba")
    if (vector != 1.5).any() or update_kernels.squared_norm(vector) != 18:
        yield Finding("numba", "problem", f"{version} computes wrongly", "use backend=numpy, or another numba", 1)
        return
    seconds, cache = time.perf_counter() - began, update_kernels.squared_norm._cache  # type: ignore[attr-defined]
    where = f"kernels are kept in {cache.cache_path}" if cache.cache_path else "compiled kernels are not kept"
    yield Finding("numba", "ok", f"{version} compiles ({seconds:.1f} s), {where}")


def check_gpu(asked: list[str]) -> Iterator[Finding]:
    """Check the driver, CuPy, each GPU, and NCCL."""
    driver = drivers()
    if driver:
        yield Finding("driver", "ok", driver)
    if importlib.util.find_spec("cupy") is None:
        way_out = "pip install 'cupynet[cuda12x]', or cuda13x, by its CUDA" if driver else ""
        yield Finding("gpu", "note", f"there is no {'' if driver else 'NVIDIA driver and no '}CuPy", way_out)
        return
    from cupynet.backend import cuda

    fault = cuda.probe()
    if fault is not None:
        way_out = "pip install the CuPy of its CUDA, see nvidia-smi" if driver else "install NVIDIA's driver"
        yield Finding("gpu", "note", fault, way_out)
        return
    found = cuda.inventory()
    runtime, newest = (tuple(map(int, found[name].split("."))) for name in ("runtime", "driver"))
    text = f"{found['cupy']} for CUDA {found['runtime']}; the driver takes up to {found['driver']}"
    way_out = "install a newer driver, or the CuPy of its CUDA" if runtime > newest else ""
    yield Finding("cupy", "note" if way_out else "ok", text, way_out)
    for count, each in enumerate(found["devices"]):
        free, total = each["free"] / 1e9, each["memory"] / 1e9
        text = f"{each['name']}, compute capability {each['capability']}, {free:.1f} GB free of {total:.1f} GB"
        yield Finding(f"gpu {count}", "ok", text)
    if found["nccl"]:
        yield Finding("nccl", "ok", found["nccl"])
    else:
        yield Finding("nccl", "note", "is not there: several GPUs are averaged on the first of them, or on the host")


def drivers() -> str:
    """Return what nvidia-smi prints about the driver and its GPUs; "" if there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return f"nvidia-smi fails ({one_line(done.stdout + done.stderr)[:80]})"
    return f"NVIDIA {lines[0].split(',')[0]}, GPUs: {len(lines)}"
