"""The kernels of a .cu file, compiled for the CPU and launched as on a GPU.

`host_library(path)["relu"](grid, block, arguments)`. g++ compiles the file unchanged, after include/cuda_host.h. The
kernel's C++ type gives its parameters, so arguments that CUDA would misread are rejected.
"""

import ctypes
import functools
import hashlib
import math
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

# Under AddressSanitizer and UndefinedBehaviorSanitizer; the process must have loaded the former first (LD_PRELOAD).
SANITIZED = "CUPYNET_TEST_SANITIZED" in os.environ
INCLUDE = Path(__file__).parent / "include"
FLAGS = ["-std=c++20", "-fPIC", "-shared", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-clobbered", "-Werror"]
# compilation takes most of the time, because kernels are small and rarely run
OPTIMIZED, INSTRUMENTED = ["-O1"], ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# differences of a GPU's arithmetic, see `installed`
ARITHMETIC = {
    "fused": ["-ffp-contract=fast", "-fexpensive-optimizations", "-march=native"],
    "flushed": ["-DSTANDIN_FLUSHED"],
}
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


class LaunchError(Exception):
    """A kernel got wrong arguments, or did something invalid."""


class HostKernel:
    """One kernel of a library.

    Attributes:
        takes: each parameter's type (`float32`, `int32`), with the prefix `in:` or `out:` for a pointer.
    """

    def __init__(self, library: ctypes.CDLL, name: str, with_barriers: bool) -> None:
        self.name, self._with_barriers = name, with_barriers
        signature = getattr(library, f"signature_of_{name}")
        signature.restype = ctypes.c_char_p
        self.takes: list[str] = signature().decode().split()
        self._launch = getattr(library, f"launch_{name}")
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run the kernel to completion.

        arguments: NumPy scalars for numbers; for pointers, NumPy arrays, addresses (int), or None for null.
        """
        if len(arguments) != len(self.takes) or min(*grid, *block) < 1 or math.prod(block) > 1024:
            raise LaunchError(f"{self.name}: {len(arguments)} arguments, a grid of {grid}, blocks of {block}")
        boxes = [self._box(takes, argument) for takes, argument in zip(self.takes, arguments, strict=True)]
        addresses = (ctypes.c_void_p * len(boxes))(*(box.__array_interface__["data"][0] for box in boxes))
        sizes = [(ctypes.c_uint32 * 3)(*of, *(1,) * (3 - len(of))) for of in (grid, block)]
        status = self._launch(*sizes, self._with_barriers, addresses)
        if status:
            raise LaunchError(f"{self.name}: {STATUS[status]}")

    def _box(self, takes: str, argument: Any) -> Any:
        """Return a separate array with the argument's bytes."""
        way, _, kind = takes.rpartition(":")
        if not way:
            if not isinstance(argument, np.generic) or named(argument.dtype) != kind:
                raise LaunchError(f"{self.name}: a parameter must be a NumPy {kind}, not {argument!r:.80}")
            return np.array([argument])
        if isinstance(argument, np.ndarray):
            if named(argument.dtype) != kind or not argument.flags.c_contiguous:
                raise LaunchError(f"{self.name}: a parameter must be a contiguous {kind}, not {argument.dtype.name}")
            argument = argument.ctypes.data
        return np.array([argument or 0], np.uint64)


@functools.cache
def host_library(
    source: Path | str, options: tuple[str, ...] = (), arithmetic: tuple[str, ...] = ()
) -> dict[str, HostKernel]:
    """Return the kernels of a .cu file or a text by name. They are compiled once for each content, including headers.

    Args:
        source: the file or the text.
        options: compiler options for kernels; only those for macros and folders (-D, -I) have an effect.
        arithmetic: names from `ARITHMETIC`.
    """
    text = source.read_text() if isinstance(source, Path) else source
    given = [option for option in options if option[:2] in ("-D", "-I")]
    flags = [*FLAGS, *(INSTRUMENTED if SANITIZED else OPTIMIZED)]
    flags += [flag for name in arithmetic for flag in ARITHMETIC[name]]
    folders = [Path(option[2:]) for option in given if option.startswith("-I")]
    folders += [source.parent] if isinstance(source, Path) else []
    headers = [*sorted(INCLUDE.glob("*.h")), *(each for folder in folders for each in sorted(folder.glob("*.cuh")))]
    key = _key(text, *(each.read_text() for each in headers), *flags, *given)
    stem = source.stem if isinstance(source, Path) else "text"

    def compile(made: Path) -> None:
        path = source if isinstance(source, Path) else _written(text, key)
        names = exported(path, given)
        exports = "\n".join(f"STANDIN_EXPORT({name})" for name in names)
        unit = made.with_suffix(".cpp")
        unit.write_text(f'#include "cuda_host.h"\n#include "{path}"\n{exports}\nSTANDIN_NAMES("{" ".join(names)}")\n')
        _compile([*flags, f"-I{INCLUDE}", *given, str(unit), "-o", str(made)])

    library = ctypes.CDLL(str(once(f"{stem}-{key}.so", compile)))
    library.exported_names.restype = ctypes.c_char_p
    names = library.exported_names().decode().split()
    return {name: HostKernel(library, name, "__syncthreads" in text) for name in names}


def exported(path: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the names of the kernels that a .cu file exports, including those that macros define."""
    arguments = ["-E", "-P", "-x", "c++", f"-I{INCLUDE}", "-DSTANDIN_NAMES_ONLY", *options, str(path)]
    return EXPORTED.findall(_compile(arguments))


@functools.cache
def exported_by(text: str, options: tuple[str, ...]) -> list[str]:
    """Return the names that a text exports, cached between test runs."""
    key = _key(text, *(header.read_text() for header in sorted(INCLUDE.glob("*.h"))), *options)
    names = once(f"names-{key}.txt", lambda made: made.write_text(" ".join(exported(_written(text, key), options))))
    return names.read_text().split()


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _compile(arguments: list[str]) -> str:
    found = compiler()
    if found is None:
        raise LaunchError("there is no C++ compiler: install g++, or name one in CXX")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([found, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"{' '.join(arguments[-3:])}: {done.stderr}")
    return done.stdout


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _written(text: str, key: str) -> Path:
    return once(f"text-{key}.cu", lambda made: made.write_text(text))


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
