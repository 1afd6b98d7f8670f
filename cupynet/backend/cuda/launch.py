"""Compilation and launch of the kernels in `kernels/`.

CuPy does not check kernel arguments. A kernel would misread an array with the wrong dtype or device, a view with gaps,
or a Python float passed for a C float. This module checks arrays and casts numbers according to `INSTANCES`.

Each module is one file compiled for one precision, because NVRTC would take much longer to compile all four. CuPy
caches modules on disk.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend.environment import usable_cores
from cupynet.backend.policy import stored_dtype
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.backend.update_rules import RULES
from cupynet.core.errors import ConfigError
from cupynet.core.shared_options import block_size, grid_size

FOLDER = Path(__file__).parent / "kernels"
HEADER = "common.cuh"
OPTIONS = ("-std=c++17",)
MAX_BLOCKS, MAX_BLOCKS_DOWN = (1 << 31) - 1, 65535  # maximum grid size along x and y

# precision -> dtypes of storage (S) and accumulation (A)
KINDS = {
    "half": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float": ("float32", "float32"),
    "double": ("float64", "float64"),
}
KIND_OF = {stored: kind for kind, (stored, _) in KINDS.items()}
WIDE = ("float", "double")
COMPILERS = 4  # threads that compile modules
TERMS = 16  # maximum number of terms in one pass of `weighted_sum`
IMAGE_THREADS = 256  # maximum block size of kernels for images, as in common.cuh
INDEX_DTYPES = ("uint8", "int32")
_IMAGES = "int32 " * 12  # N H W C, output rows and columns, kernel, stride, padding (top, left)
_POOLED = _IMAGES + "int32 " * 9  # also the pool's rows and columns, kernel, stride, padding (top, left); and filters

# file -> kernel -> parameters, one word each. Arrays have the prefix `in:` or `out:`, and the suffix `?` if they may be
# null. S, A and W are the dtypes of an instance for storage, accumulation and the indices of maxima.
TAKES = {
    "images": {
        "load_images": "in:uint8 in:int64? in:A in:A out:S int32 int32 int32",
        "next_batch": "in:uint8 in:int64 in:int64? in:float32? in:A in:A out:S out:int64? out:float32? out:int64? "
        "int32 int32 int32 int32",
    },
    "conv": {
        "im2col": f"in:S out:S {_IMAGES} int32 int32",
        "col2im": f"in:S out:S {_IMAGES} int32 int32",
        "depthwise": f"in:S in:S out:S {_IMAGES} int32 int32 int32",
        "depthwise_input": f"in:S in:S out:S {_IMAGES} int32 int32 int32",
        "depthwise_weight": f"in:S in:S out:A {_IMAGES} int32 int32 int32 int32",
    },
    "conv_pool": {
        "conv_pool": f"in:S in:S in:S? out:S out:uint8 {_POOLED} int32",
        "conv_pool_weight": f"in:S in:S in:uint8 out:A out:A? {_POOLED} int32",
    },
    "pool": {
        "max_pool": f"in:S in:S? out:S out:W {_IMAGES} int32",
        "max_pool_backward": f"in:S in:W out:S {_IMAGES}",
        "avg_pool": f"in:S out:S {_IMAGES}",
        "avg_pool_backward": f"in:S out:S {_IMAGES}",
    },
    "activation": {
        "add_bias": "out:S in:S int64 int32 int32",
        "relu": "out:S int64",
        "relu_backward": "out:S in:S int64",
        "pointwise": "in:S out:S int32 A int64",
        "pointwise_backward": "out:S in:S int32 A int64",
    },
    "reductions": {
        "softmax": "out:S int64 int32",
        "softmax_backward": "out:S in:S int64 int32",
        "softmax_cross_entropy": "in:S in:int64 in:A? out:A out:S A A in:float64? int32 int32",
        "count_hits": "in:S in:int64? in:float32? out:int64 int32 int32 int32",
        "soft_cross_entropy": "in:S in:float32 in:A? out:A out:S A A in:float64? int32 int32 int32",
        **{
            f"{kind}_loss": "in:S in:int64? in:float32? out:A out:S A A in:float64? int32 int32 int32"
            for kind in TARGET_LOSSES
        },
        "column_sums": "out:S in:S? out:A int64 int32 int64 int32 int32",
        "sum_vector": "in:A out:A int64 int32",
        "moment_parts": "in:S out:A int64 int32 int64 int32",
        "moment_merge": "in:A out:A int64 int32 int64 int32",
        "normalize_sums": "out:S in:S in:S? in:A in:A out:A A int64 int32 int64 int32",
        "normalize_rows": "in:S in:S in:S out:S out:A A int64 int32",
        "normalize_rows_sums": "in:S in:S in:A out:A int64 int32 int64 int32",
        "normalize_rows_backward": "out:S in:S in:A in:S int64 int32",
    },
    "norm": {
        "normalize": "in:S in:A in:A in:S in:S out:S A int64 int32 int32",
        "normalize_backward": "out:S in:S in:A in:A in:S in:A A A int64 int32",
        "track_moments": "out:A out:A in:A A A int64",
    },
    "dropout": {"dropout": "in:S out:S in:int64 in:int64 uint32 uint32 uint32 A int32 int32"},
    "averages": {"weighted_sum": f"out:S {'in:S? ' * TERMS}{'float64 ' * TERMS}int32 int64"},
    "update": {
        **{
            f"{rule.name}_update": f"{'out:A ' * (2 + len(rule.states))}out:S? {'A ' * 13}in:A? in:float64? int64"
            for rule in RULES.values()
        },
        "trust_weights": "out:A out:A out:S? in:A in:A in:int64 A in:float64? int32",
        "stretch_squares": "in:A in:int64 out:A int32",
        "layer_squares": "in:A in:int64 out:A int32 int32 int32",
        "clip_norms": "out:A in:A in:int64 A in:float64? int32",
        "widen": "in:S out:A int64",
        "narrow": "in:A out:S int64",
        "clip_norm": "out:A in:A A in:float64? int64",
        "judge": "out:float64 in:A in:A out:A in:int64 out:float64 out:int64? int32 int32 int32 int32 float64 float64",
        "undo": "out:A in:A in:float64 int64",
        "steer": "out:float64 out:float64",
        "begin": "out:float64 float64 float64 float64",
    },
}
# kernels without 16-bit instances
OF_WIDE = {
    **dict.fromkeys(("sum_vector", "moment_merge", "track_moments", "clip_norm", "clip_norms", "judge", "undo"), WIDE),
    **dict.fromkeys(("stretch_squares", "layer_squares"), WIDE),
    **dict.fromkeys(("steer", "begin"), ("double",)),
}


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: an array or a number of a NumPy dtype. null: True if the array may be missing."""

    type: str
    array: bool
    null: bool = False


@dataclass(frozen=True)
class Instance:
    """A kernel in one precision. modules: precisions of the modules that contain it."""

    file: str
    takes: tuple[Parameter, ...]
    kind: str
    modules: tuple[str, ...]


def _instances() -> Iterator[tuple[str, Instance]]:
    for file, kernels in TAKES.items():
        for name, words in kernels.items():
            for kind in OF_WIDE.get(name, KINDS):
                (stored, wide), modules = KINDS[kind], _modules_with(kind, OF_WIDE.get(name, ()))
                for index in INDEX_DTYPES if ":W" in words else ("",):
                    types = {"S": stored, "A": wide, "W": index}
                    parameters = tuple(_parameter(word, types) for word in words.split())
                    yield "_".join(filter(None, (name, kind, index))), Instance(file, parameters, kind, modules)


def _modules_with(kind: str, instances: tuple[str, ...]) -> tuple[str, ...]:
    """Return the precisions of the modules that contain an instance (see "instances" in common.cuh)."""
    if len(instances) == 1:
        return tuple(KINDS)
    return tuple(module for module, (_, wide) in KINDS.items() if KIND_OF[wide] == kind) if instances else (kind,)


def _parameter(word: str, types: dict[str, str]) -> Parameter:
    direction, _, kind = word.rstrip("?").rpartition(":")
    return Parameter(types.get(kind, kind), bool(direction), word.endswith("?"))


INSTANCES = dict(_instances())


def source(file: str) -> str:
    """Return the text of a .cu file with its header inserted, because CuPy's cache does not notice changed headers."""
    text, line = (FOLDER / f"{file}.cu").read_text("utf-8"), f'#include "{HEADER}"\n'
    return text.replace(line, (FOLDER / HEADER).read_text("utf-8"))


def power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def options(kind: str) -> tuple[str, ...]:
    return *OPTIONS, f"-DONLY_{kind.upper()}"


# Held during graph capture, and while modules and libraries are loaded or handles are created, because loading and
# creation may wait for the whole device, which invalidates any capture. A thread that also needs a backend's `apart`
# lock must acquire that lock first.
first_use = threading.RLock()


class Kernels:
    """The kernels of one backend in precision `kind`. here: context manager that activates its device and stream."""

    def __init__(
        self,
        xp: ModuleType,
        device: int,
        here: Callable[[], AbstractContextManager[None]],
        kind: str = "float",
        max_block_size: int = 256,
        max_grid_size: int | None = None,
    ) -> None:
        self._xp, self._device, self._here, self._kind = xp, device, here, kind
        self.threads = power_of_two(block_size("max_block_size", max_block_size) + 1) // 2
        self.blocks = grid_size("max_grid_size", max_grid_size) or MAX_BLOCKS
        self._modules: dict[tuple[str, str], Any] = {}  # by file and precision
        self._functions: dict[str, tuple[Any, list[tuple[Parameter, Any]]]] = {}

    def prepare(self) -> None:
        """Compile all files for this precision in parallel, and load them."""
        with self._here(), first_use, ThreadPoolExecutor(min(COMPILERS, len(usable_cores()))) as pool:
            list(pool.map(self._load, [self._module(file, self._kind) for file in TAKES]))

    def _load(self, module: Any) -> None:
        with self._xp.cuda.Device(self._device):
            module.compile()

    def flat(self, name: str, count: int, *arguments: Any, at_once: int = 1) -> None:
        """Launch a kernel on `count` values, with one thread per `at_once` values."""
        if count:
            blocks = min(-(-count // (at_once * self.threads)), self.blocks)
            self.launch(name, (blocks,), (self.threads,), *arguments)

    def images(self, name: str, count: int, threads: int, *arguments: Any) -> None:
        """Launch `threads` threads per image along x, and blocks for `count` images along y."""
        if count and threads:
            block = min(self.threads, IMAGE_THREADS, max(32, power_of_two(threads)))
            down = min(count, MAX_BLOCKS_DOWN, self.blocks)
            self.launch(name, (min(-(-threads // block), max(1, self.blocks // down)), down), (block,), *arguments)

    def rows(self, name: str, rows: int, columns: int, *arguments: Any) -> None:
        """Launch threads for the columns of a row along x, and for as many rows as fit into a block along y."""
        if rows and columns:
            across = min(self.threads, power_of_two(columns))
            down = self.threads // across
            self.launch(name, (min(-(-rows // down), self.blocks),), (across, down), *arguments)

    def launch(self, name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any) -> None:
        """Launch an instance, such as `relu_half`. Raise ConfigError for arrays that it would misread."""
        function, parameters = self._functions.get(name) or self._function(name)
        arguments_by_position = enumerate(zip(parameters, arguments, strict=True))
        checked = tuple(
            self._checked(name, position, *parameter, argument)
            for position, (parameter, argument) in arguments_by_position
        )
        with self._here():
            function(grid, block, checked)

    def _checked(self, name: str, position: int, parameter: Parameter, dtype: Any, argument: Any) -> Any:
        if not parameter.array:
            return dtype.type(argument if dtype.kind == "f" else operator.index(argument))
        if argument is None and parameter.null:
            return np.uint64(0)
        actual = getattr(argument, "dtype", type(argument).__name__)
        device = getattr(getattr(argument, "device", None), "id", "cpu")  # NumPy's device has no id
        if actual != dtype or not argument.flags.c_contiguous or device != self._device:
            raise ConfigError(
                f"kernel {name}: argument {position} must be a contiguous array of {dtype} on device {self._device}, "
                f"got {actual} on device {device}{', with gaps' if device == self._device and actual == dtype else ''}"
            )
        return argument

    def _function(self, name: str) -> tuple[Any, list[tuple[Parameter, Any]]]:
        instance = INSTANCES[name]
        with self._here(), first_use:
            kind = self._kind if self._kind in instance.modules else instance.kind
            function = self._module(instance.file, kind).get_function(name)
        parameters = [(parameter, stored_dtype(parameter.type)) for parameter in instance.takes]
        self._functions[name] = function, parameters
        return function, parameters

    def _module(self, file: str, kind: str) -> Any:
        key = file, kind
        if key not in self._modules:
            self._modules[key] = self._xp.RawModule(code=source(file), options=options(kind))
        return self._modules[key]
