"""The kernels of a .cu file, compiled for the CPU and launched as on a GPU.

`host_library(text)["relu"](grid, block, arguments)`. g++ compiles the text unchanged, after include/cuda_host.h. The
kernel's C++ type gives its parameters.
"""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.standin.errors import BadLaunch

# Under AddressSanitizer and UndefinedBehaviorSanitizer; the process must have loaded the former first (LD_PRELOAD).
SANITIZED = "CUPYNET_TEST_SANITIZED" in os.environ
INCLUDE = Path(__file__).parent / "include"
FLAGS = ["-std=c++20", "-fPIC", "-shared", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-clobbered", "-Werror"]
# compilation takes most of the time, because kernels are small and rarely run
OPTIMIZED, INSTRUMENTED = ["-O1"], ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"  # before or after `void`
EXPORTED = re.compile(rf'extern\s+"C"\s+__global__\s+{BOUNDS}void\s+{BOUNDS}(\w+)\s*\(')
STATUS = {
    1: "some threads of a block ended while others waited for them in __syncthreads()",
    2: "a __syncthreads() was called that does not appear in the source",
}


@functools.cache  # NumPy creates it again at each access
def named(dtype: np.dtype[Any]) -> str:
    name: str = dtype.name
    return name


class HostKernel:
    """One kernel of a library. `takes`: each parameter's type, such as `int32`, or `in:float32` for a pointer."""

    def __init__(self, library: ctypes.CDLL, name: str, with_barriers: bool) -> None:
        self.name, self._with_barriers = name, with_barriers
        signature = getattr(library, f"signature_of_{name}")
        signature.restype = ctypes.c_char_p
        self.takes: list[str] = signature().decode().split()
        self._launch = getattr(library, f"launch_{name}")
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[np.generic]) -> None:
        """Run the kernel to completion. arguments: of the types that it takes; addresses for pointers."""
        boxes = [np.array([argument]) for argument in arguments]
        addresses = (ctypes.c_void_p * len(boxes))(*(box.__array_interface__["data"][0] for box in boxes))
        sizes = [(ctypes.c_uint32 * 3)(*of, *(1,) * (3 - len(of))) for of in (grid, block)]
        status = self._launch(*sizes, self._with_barriers, addresses)
        if status:
            raise BadLaunch(f"{self.name}: {STATUS[status]}")


@functools.cache
def host_library(text: str, options: tuple[str, ...] = ()) -> dict[str, HostKernel]:
    """Return the kernels of a .cu file's text, with its headers, by name. They are compiled once for each content.

    Of the compiler's options, only macros (-D) have an effect.
    """
    macros = tuple(option for option in options if option.startswith("-D"))
    flags = [*FLAGS, *(INSTRUMENTED if SANITIZED else OPTIMIZED)]

    def compile(made: Path) -> None:
        names = exported_by(text, macros)
        exports = "\n".join(f"STANDIN_EXPORT({name})" for name in names)
        unit = made.with_suffix(".cpp")
        unit.write_text(f'#include "cuda_host.h"\n{text}\n{exports}\nSTANDIN_NAMES("{" ".join(names)}")\n')
        _compile([*flags, f"-I{INCLUDE}", *macros, str(unit), "-o", str(made)])

    library = ctypes.CDLL(str(once(f"text-{_key(text, *flags, *macros)}.so", compile)))
    library.exported_names.restype = ctypes.c_char_p
    names = library.exported_names().decode().split()
    return {name: HostKernel(library, name, "__syncthreads" in text) for name in names}


@functools.cache
def exported_by(text: str, options: tuple[str, ...]) -> list[str]:
    """Return the names of the kernels that a text exports, including those that macros define."""

    def find(made: Path) -> None:
        unit = made.with_suffix(".cu")
        unit.write_text(text)
        arguments = ["-E", "-P", "-x", "c++", f"-I{INCLUDE}", "-DSTANDIN_NAMES_ONLY", *options, str(unit)]
        made.write_text(" ".join(EXPORTED.findall(_compile(arguments))))

    return once(f"names-{_key(text, *options)}.txt", find).read_text().split()


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _compile(arguments: list[str]) -> str:
    found = compiler()
    if found is None:
        raise RuntimeError("there is no C++ compiler: install g++, or name one in CXX")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([found, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[-3:])}: {done.stderr}")
    return done.stdout


def _key(text: str, *options: str) -> str:
    """Return a name for what is made of a text and the headers."""
    headers = [header.read_text() for header in sorted(INCLUDE.glob("*.h"))]
    return hashlib.sha256("\0".join([text, *headers, *options]).encode()).hexdigest()[:20]


def once(name: str, make: Callable[[Path], object]) -> Path:
    """Return a compiled file, cached between test runs. Its name identifies everything that its content depends on."""
    kept = Path(tempfile.gettempdir()) / f"cupynet-standin-{os.getuid()}-{sysconfig.get_platform()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    if not (kept / name).exists():
        with tempfile.TemporaryDirectory(dir=kept) as folder:
            made = Path(folder) / name
            make(made)
            os.replace(made, kept / name)
    return kept / name
