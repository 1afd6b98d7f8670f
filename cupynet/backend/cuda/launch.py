"""Kernels of the .cu files in `kernels/`, compiled when they are first asked for and launched through one door.

CuPy's own checks nothing: an array of another precision, a view with gaps, an array of another device or a Python
float for a C float are read as they lie there. Here every array is looked at, and every number is cast to the exact
type of its parameter, as the table `INSTANCES` has it (a test compares that with the C++ text).
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend.policy import stored_dtype
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.backend.update_rules import RULES
from cupynet.core.checks import block_size, grid_size
from cupynet.core.errors import ConfigError

FOLDER = Path(__file__).parent / "kernels"
HEADER = "common.cuh"
OPTIONS = ("-std=c++17",)
MOST_BLOCKS, MOST_BLOCKS_DOWN = (1 << 31) - 1, 65535  # of a grid, along x and along y

# Precisions: what is stored (S) and what is accumulated in (A).
KINDS = {
    "half": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float": ("float32", "float32"),
    "double": ("float64", "float64"),
}
KIND_OF = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}  # of a vector
WIDE = ("float", "double")
TERMS = 16  # of a sum, in one pass
WINNERS = ("uint8", "int32")
_IMAGES = "int32 " * 12  # N, then the geometry: H W C, rows cols, kernel, stride, zeros above and left

# file -> kernel -> what it takes: a word for each parameter, `in:` or `out:` before an array's, `?` behind one that may
# be null; S, A and W stand for the types of an instance: what is stored and accumulated in, and the winners' integer.
TAKES = {
    "images": {"load_images": "in:uint8 in:int64? in:A in:A out:S int32 int32 int32"},
    "conv": {
        "im2col": f"in:S out:S {_IMAGES} int32 int32",
        "col2im": f"in:S out:S {_IMAGES} int32 int32",
        "depthwise": f"in:S in:S out:S {_IMAGES} int32 int32 int32",
        "depthwise_input": f"in:S in:S out:S {_IMAGES} int32 int32 int32",
        "depthwise_weight": f"in:S in:S out:A {_IMAGES} int32 int32 int32 int32",
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
        **{f"{kind}_loss": "in:S in:int64 out:A out:S A A in:float64? int32 int32" for kind in TARGET_LOSSES},
        "column_sums": "in:S out:A int64 int32 int64 int32 int32",
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
            f"{rule.name}_update": f"{'out:A ' * (2 + len(rule.states))}out:S? {'A ' * 12}in:float64? int64"
            for rule in RULES.values()
        },
        "trust_weights": "out:A out:A out:S? in:A in:A in:int64 A in:float64? int32",
        "stretch_squares": "in:A in:int64 out:A int32",
        "layer_squares": "in:A in:int64 out:A int32 int32 int32",
        "clip_norms": "out:A in:A in:int64 A in:float64? int32",
        "widen": "in:S out:A int64",
        "narrow": "in:A out:S int64",
        "clip_norm": "out:A in:A A in:float64? int64",
        "judge": "out:float64 in:A in:A int32 int32 float64 float64",
        "undo": "out:A in:A in:float64 int64",
        "steer": "out:float64 float64 float64 float64 float64",
        "begin": "out:float64 float64 float64 float64",
    },
}
# of what is never narrower
OF_WIDE = {
    **dict.fromkeys(
        (
            "sum_vector",
            "moment_merge",
            "track_moments",
            "clip_norm",
            "judge",
            "undo",
            "stretch_squares",
            "layer_squares",
            "clip_norms",
        ),
        WIDE,
    ),  # fmt: skip
    "steer": ("double",),
    "begin": ("double",),
}


@dataclass(frozen=True)
class Parameter:
    """What a kernel takes at one place: an array (`array`) or a number, of a NumPy type; `null`: or no array."""

    type: str
    array: bool
    null: bool = False


@dataclass(frozen=True)
class Instance:
    """A kernel in one precision: its file, without `.cu`, and its parameters in order."""

    file: str
    takes: tuple[Parameter, ...]


def _instances() -> Iterator[tuple[str, Instance]]:
    for file, kernels in TAKES.items():
        for name, words in kernels.items():
            for kind in OF_WIDE.get(name, KINDS):
                stored, wide = KINDS[kind]
                for winners in WINNERS if ":W" in words else ("",):
                    types = {"S": stored, "A": wide, "W": winners}
                    takes = tuple(_parameter(word, types) for word in words.split())
                    yield "_".join(filter(None, (name, kind, winners))), Instance(file, takes)


def _parameter(word: str, types: dict[str, str]) -> Parameter:
    way, _, kind = word.rstrip("?").rpartition(":")
    return Parameter(types.get(kind, kind), bool(way), word.endswith("?"))


INSTANCES = dict(_instances())


def source(file: str) -> str:
    """The text of a .cu file with the header in place of the line that includes it.

    CuPy keeps compiled kernels by the text it is given, and would not see that a header has changed.
    """
    text, line = (FOLDER / f"{file}.cu").read_text("utf-8"), f'#include "{HEADER}"\n'
    before, found, after = text.partition(line)
    if not found:
        raise ConfigError(f"{FOLDER / file}.cu: does not include {HEADER}")
    return before + (FOLDER / HEADER).read_text("utf-8") + after


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


# Held while something is done for the first time, and while a stream is captured: modules and libraries that are
# loaded, and handles that are made, may wait for the whole device, which no capture on it survives. Who takes a
# backend's `apart` too takes that first.
first_use = threading.RLock()


class Kernels:
    """The kernels of one backend.

    Args:
        xp: CuPy.
        device: number of the GPU whose arrays are taken.
        here: a context in which that device is current, and the stream that launches go to.
        max_block_size: threads of a block, at most; the largest power of two up to it is used.
        max_grid_size: blocks of a grid, at most; None for no limit. Each then does the work of several.

    Raises:
        ConfigError: one of the two is out of range.
    """

    def __init__(
        self,
        xp: ModuleType,
        device: int,
        here: Callable[[], AbstractContextManager[None]],
        max_block_size: int = 256,
        max_grid_size: int | None = None,
    ) -> None:
        self._xp, self._device, self._here = xp, device, here
        self.threads = power_of_two(block_size("max_block_size", max_block_size) + 1) // 2
        self.blocks = grid_size("max_grid_size", max_grid_size) or MOST_BLOCKS
        self._modules: dict[str, Any] = {}
        self._functions: dict[str, tuple[Any, list[tuple[Parameter, Any]]]] = {}

    def launched(self, here: Callable[[], AbstractContextManager[None]]) -> Kernels:
        """The same kernels, launched where that context is."""
        other = copy.copy(self)
        other._here = here
        return other

    # how work is laid out -------------------------------------------------------------------------------------------

    def flat(self, name: str, count: int, *arguments: Any, at_once: int = 1) -> None:
        """A thread for each `at_once` of `count` values; nothing is launched for none."""
        if count:
            blocks = min(-(-count // (at_once * self.threads)), self.blocks)
            self.launch(name, (blocks,), (self.threads,), *arguments)

    def images(self, name: str, count: int, values: int, *arguments: Any) -> None:
        """A thread for each of the `values` of each of `count` images, which are shared by the blocks along y."""
        if count and values:
            threads = min(self.threads, max(32, power_of_two(values)))
            down = min(count, MOST_BLOCKS_DOWN, self.blocks)
            self.launch(name, (min(-(-values // threads), max(1, self.blocks // down)), down), (threads,), *arguments)

    def rows(self, name: str, rows: int, columns: int, *arguments: Any) -> None:
        """Threads along x for the columns of a row, threads along y for as many rows as a block has room for."""
        if rows and columns:
            across = min(self.threads, power_of_two(columns))
            down = self.threads // across
            self.launch(name, (min(-(-rows // down), self.blocks),), (across, down), *arguments)

    # the door -------------------------------------------------------------------------------------------------------

    def launch(self, name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any) -> None:
        """Launch an instance, such as `relu_half`; it runs later, in the stream's order.

        Args:
            arguments: arrays and numbers as `INSTANCES` lists them, None for an array that may be missing.

        Raises:
            ConfigError: an array has another precision than the kernel takes, gaps, or is on another device.
        """
        function, takes = self._functions.get(name) or self._function(name)
        if len(arguments) != len(takes):
            raise ConfigError(f"kernel {name}: takes {len(takes)} arguments, was given {len(arguments)}")
        each = enumerate(zip(takes, arguments, strict=True))
        given = tuple(self._checked(name, position, *taken, argument) for position, (taken, argument) in each)
        with self._here():
            function(grid, block, given)

    def _checked(self, name: str, position: int, parameter: Parameter, dtype: Any, argument: Any) -> Any:
        """An argument as the launch takes it."""
        if not parameter.array:
            return dtype.type(argument if dtype.kind == "f" else operator.index(argument))
        if argument is None and parameter.null:
            return np.uint64(0)
        found = getattr(argument, "dtype", type(argument).__name__)
        device = getattr(getattr(argument, "device", None), "id", None)  # of NumPy's it is a word
        if found != dtype or not argument.flags.c_contiguous or device != self._device:
            wrong = f"is {found}"
            if found == dtype:
                where = "on the host" if device is None else f"on device {device}"
                wrong = "has gaps" if not argument.flags.c_contiguous else f"is {where}"
            raise ConfigError(
                f"kernel {name}: argument {position} must be a contiguous array of {dtype} on device {self._device}, "
                f"this one {wrong}"
            )
        return argument

    def _function(self, name: str) -> tuple[Any, list[tuple[Parameter, Any]]]:
        """The compiled kernel and what it takes; kept."""
        instance = INSTANCES[name]
        with self._here(), first_use:
            module = self._modules.get(instance.file)
            if module is None:
                module = self._modules[instance.file] = self._xp.RawModule(code=source(instance.file), options=OPTIONS)
            function = module.get_function(name)
        takes = [(parameter, stored_dtype(parameter.type)) for parameter in instance.takes]
        self._functions[name] = function, takes
        return function, takes
