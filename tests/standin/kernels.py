"""`cupy.RawModule` and its kernels: a .cu file's text, compiled for the CPU (host.py).

CuPy 14.2 passes arguments unchecked (cupy/_core/raw.pyx, cupy/cuda/function.pyx). Python's numbers become doubles or
64-bit integers. Here arguments must match the parameters, and arrays must be contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.standin.arrays import ndarray
from tests.standin.errors import BadLaunch, InCapture
from tests.standin.host import HostKernel, exported_by, host_library, named
from tests.standin.machine import Operation, active
from tests.standin.order import label

MOST_BLOCKS, MOST_THREADS = (2**31 - 1, 65535, 65535), (1024, 1024, 64)


class RawModule:
    """The kernels of a text, which are compiled and loaded together."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        self.code, self.options = code, options

    def compile(self) -> None:
        """Compile the module and load it on the current device now, not at the first launch."""
        compiled(self.code, self.options)
        self.load("RawModule.compile")

    def get_function(self, name: str) -> Kernel:
        return Kernel(self, name)

    def load(self, name: str) -> None:
        """Load the module on the current device if it is not there yet. Loading waits for the device."""
        machine = active()
        with machine.lock:
            key = machine.seat.device, (self.code, self.options)
            if key not in machine.loaded:
                if machine.line.capture is not None:
                    raise InCapture(f"{label(name)} is launched for the first time while {machine.line} captures")
                machine.must_not_wait(f"the first launch of {name}, which loads it,")
                machine.loaded.add(key)


class Kernel:
    def __init__(self, module: RawModule, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        for sizes, limits in ((grid, MOST_BLOCKS), (block, MOST_THREADS), ((math.prod(block),), MOST_THREADS)):
            if any(not 1 <= size <= limit for size, limit in zip(sizes, limits, strict=False)):
                raise BadLaunch(f"{self.name}: a size in {sizes} exceeds {limits}: the launch would fail")
        host = compiled(self.module.code, self.module.options)[self.name]
        self.module.load(self.name)
        if len(args) != len(host.takes):
            raise BadLaunch(f"{self.name}: takes {len(host.takes)} arguments, but {len(args)} were given")
        given = [self._given(takes, arg) for takes, arg in zip(host.takes, args, strict=True)]
        arrays = [(takes, arg) for takes, arg in zip(host.takes, args, strict=True) if isinstance(arg, ndarray)]
        reads = [span for takes, array in arrays if takes.startswith("in:") for span in array.span]
        writes = [span for takes, array in arrays if takes.startswith("out:") for span in array.span]

        active().run(Operation(self.name, reads, writes, lambda: host(grid, block, given), checked=True))

    def _given(self, takes: str, arg: Any) -> Any:
        """Return a number, or an array's address; reject what the kernel would misread."""
        way, _, kind = takes.rpartition(":")
        if not way:
            if not isinstance(arg, np.generic) or named(arg.dtype) != kind:
                raise BadLaunch(f"{self.name}: a parameter {kind} is given {arg!r:.60}, which CuPy does not convert")
            return arg
        if arg is None or (isinstance(arg, np.uint64) and not arg):  # a null pointer has eight bytes
            return np.uint64(0)
        if not isinstance(arg, ndarray) or named(arg.dtype) != kind or not arg.flags.c_contiguous:
            raise BadLaunch(f"{self.name}: a parameter must be a contiguous array of {kind}, not a {type(arg)}")
        return np.uint64(arg.data.ptr)


def compiled(code: str, options: tuple[str, ...]) -> dict[str, HostKernel]:
    """Return the kernels of a text compiled with these options.

    Options such as -DONLY_HALF select some of its kernels. The text is compiled once, without them.
    """
    some = tuple(option for option in options if option.startswith("-DONLY_"))
    found = host_library(code, tuple(option for option in options if option not in some))
    return {name: found[name] for name in exported_by(code, some)} if some else found
