"""Kernels of a .cu file, compiled for the CPU and launched as on a GPU.

`host_library(path)["relu"](grid, block, arguments)`. g++ compiles the file unchanged, behind
include/cuda_host.h. What a kernel takes is known from its C++ type, so what CUDA would silently misread is refused: a
number of another size, an array of another kind, one too few.
"""

from __future__ import annotations

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

INCLUDE = Path(__file__).parent / "include"
FLAGS = ["-std=c++20", "-fPIC", "-shared", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off", "-Wall", "-Wextra"]
FLAGS += ["-Wno-unused-parameter", "-Wno-unknown-pragmas", "-Wno-clobbered", "-Werror"]
# a few runs of small kernels: compiling is what takes the time
OPTIMIZED, SANITIZED = ["-O1"], ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"  # before or behind `void`
EXPORTED = re.compile(rf'extern\s+"C"\s+__global__\s+{BOUNDS}void\s+{BOUNDS}(\w+)\s*\(')
STATUS = {
    1: "some threads of a block came to the end while others waited for them in __syncthreads()",
    2: "a __syncthreads() was met that the text of the file did not show",
}


@functools.cache  # NumPy puts it together each time
def named(dtype: np.dtype[Any]) -> str:
    """The name of a type."""
    return dtype.name


class LaunchError(Exception):
    """What a kernel was given is not what it takes, or it did what no kernel may do."""


class HostKernel:
    """One kernel of a library.

    Attributes:
        name: as in the file.
        takes: a word for each parameter: a type (`float32`, `int32`), or `in:` or `out:` and one for a pointer.
    """

    def __init__(self, library: ctypes.CDLL, name: str, with_barriers: bool) -> None:
        self.name, self._with_barriers = name, with_barriers
        signature = getattr(library, f"signature_of_{name}")
        signature.restype = ctypes.c_char_p
        self.takes: list[str] = signature().decode().split()
        self._launch = getattr(library, f"launch_{name}")
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any]) -> None:
        """Run it to its end.

        arguments: NumPy scalars for numbers; for pointers NumPy arrays, or addresses (int), None for a null pointer.
        """
        if len(arguments) != len(self.takes):
            raise LaunchError(f"{self.name}: takes {len(self.takes)} arguments, was given {len(arguments)}")
        boxes = [self._box(i, argument) for i, argument in enumerate(arguments)]
        addresses = (ctypes.c_void_p * len(boxes))(*(box.__array_interface__["data"][0] for box in boxes))
        if min(*grid, *block) < 1 or math.prod(block) > 1024:
            raise LaunchError(
                f"{self.name}: cannot be launched with a grid of {tuple(grid)} and blocks of {tuple(block)}"
            )
        sizes = [(ctypes.c_uint32 * 3)(*of, *(1,) * (3 - len(of))) for of in (grid, block)]
        status = self._launch(*sizes, self._with_barriers, addresses)
        if status:
            raise LaunchError(f"{self.name}: {STATUS[status]}")

    def _box(self, position: int, argument: Any) -> Any:
        """The argument's bytes, in an array that holds nothing else."""
        way, _, kind = self.takes[position].rpartition(":")
        if not way:
            if not isinstance(argument, np.generic) or named(argument.dtype) != kind:
                raise LaunchError(f"{self.name}: argument {position} must be a NumPy {kind}, is {argument!r:.80}")
            return np.array([argument])
        if isinstance(argument, np.ndarray):
            if named(argument.dtype) != kind or not argument.flags.c_contiguous:
                form = "" if argument.flags.c_contiguous else ", not contiguous"
                raise LaunchError(f"{self.name}: argument {position} must be {kind}, is {argument.dtype.name}{form}")
            argument = argument.ctypes.data
        return np.array([argument or 0], np.uint64)


@functools.cache
def host_library(source: Path | str, sanitized: bool = False, options: tuple[str, ...] = ()) -> dict[str, HostKernel]:
    """The kernels of a .cu file, or of a text, by name. Compiled once for each content of it and of the headers.

    sanitized: with AddressSanitizer and UndefinedBehaviorSanitizer; the process must have been started with the former
    loaded (LD_PRELOAD). options: of the compiler of kernels; those for names and folders (-D, -I) mean something here.
    """
    text = source.read_text() if isinstance(source, Path) else source
    given = [option for option in options if option[:2] in ("-D", "-I")]
    flags = [*FLAGS, *(SANITIZED if sanitized else OPTIMIZED), f"-I{INCLUDE}", *given]
    folders = [Path(option[2:]) for option in given if option.startswith("-I")]
    folders += [source.parent] if isinstance(source, Path) else []
    headers = [*sorted(INCLUDE.glob("*.h")), *(each for folder in folders for each in sorted(folder.glob("*.cuh")))]
    own = f"-I{INCLUDE}"  # its headers are looked at, wherever they lie
    parts = [text, *(each.read_text() for each in headers), *(flag for flag in flags if flag != own)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    stem = source.stem if isinstance(source, Path) else "text"
    built = kept() / f"{stem}-{key}.so"
    if not built.exists():
        path = source if isinstance(source, Path) else _written(text, key)
        names = exported(path, given)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            unit, made = Path(folder) / f"{stem}.cpp", Path(folder) / "made.so"
            exports = "\n".join(f"STANDIN_EXPORT({name})" for name in names)
            unit.write_text(
                f'#include "cuda_host.h"\n#include "{path}"\n{exports}\nSTANDIN_NAMES("{" ".join(names)}")\n'
            )
            _compile([*flags, str(unit), "-o", str(made)])
            os.replace(made, built)
    library = ctypes.CDLL(str(built))
    library.exported_names.restype = ctypes.c_char_p
    names = library.exported_names().decode().split()
    return {name: HostKernel(library, name, "__syncthreads" in text) for name in names}


def _written(text: str, key: str) -> Path:
    """A file with that text, for a compiler."""
    path = kept() / f"text-{key}.cu"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_text(text)
            os.replace(written, path)
    return path


def exported(path: Path, options: Sequence[str] = ()) -> list[str]:
    """The names of the kernels that a .cu file has for others, those that its macros make too."""
    arguments = ["-E", "-P", "-x", "c++", f"-I{INCLUDE}", "-DSTANDIN_NAMES_ONLY", *options, str(path)]
    return EXPORTED.findall(_compile(arguments))


@functools.cache
def exported_by(text: str, options: tuple[str, ...]) -> list[str]:
    """Return the names that a text exports, cached between test runs."""
    headers = [header.read_text() for header in sorted(INCLUDE.glob("*.h"))]
    key = hashlib.sha256("\0".join([text, *headers, *options]).encode()).hexdigest()[:20]
    listed = kept() / f"names-{key}.txt"
    if not listed.exists():
        names = exported(_written(text, key), options)
        with tempfile.TemporaryDirectory(dir=listed.parent) as folder:
            written = Path(folder) / listed.name
            written.write_text(" ".join(names))
            os.replace(written, listed)
    return listed.read_text().split()


def compiler() -> str | None:
    """The C++ compiler, or None where there is none."""
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


def kept() -> Path:
    """Where compiled files are kept from one test run to the next; each name says what its content follows from."""
    folder = Path(tempfile.gettempdir()) / f"cupynet-standin-{os.getuid()}-{sysconfig.get_platform()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
