"""`cupy.RawModule` and its kernels: the text of a .cu file, compiled for the CPU (host.py).

As CuPy 14.2 has them (cupy/_core/raw.pyx, and cupy/cuda/function.pyx for what becomes of an argument). CuPy passes what
it is given: no dtype, stride or device is looked at, a number of Python is a double or a long long. Here each argument
must be what the kernel's parameter is. An array must be contiguous; a kernel that takes strides is given `array.data`.
After a launch nothing but what the kernel may write has changed: not the canaries around any block, and not the rest of
a block of which an array is a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.standin.arrays import ndarray
from tests.standin.errors import BadLaunch, InCapture, Overrun
from tests.standin.host import HostKernel, LaunchError, exported_by, host_library, named
from tests.standin.machine import Operation, Span, active
from tests.standin.memory import Chunk, MemoryPointer
from tests.standin.order import label

LIMITS = (2**31 - 1, 65535, 65535), (1024, 1024, 64)  # of a grid, and of a block


class Kernel:
    """One kernel of a module: all of them are loaded together."""

    def __init__(self, code: str, name: str, options: tuple[str, ...]) -> None:
        self.code, self.name, self.options = code, name, options
        self._host: HostKernel | None = None

    def compile(self) -> None:
        """Now, and not at the first launch."""
        found = compiled(self.code, self.options)
        if self.name not in found:
            raise BadLaunch(f'there is no kernel {self.name!r}, as extern "C", among {", ".join(found)}')
        self._host = found[self.name]

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int = 0) -> None:
        """Launch it on the stream that is current."""
        for sizes, limits in zip((grid, block), LIMITS, strict=True):
            if not isinstance(sizes, tuple) or not 1 <= len(sizes) <= 3:
                raise TypeError(f"{self.name}: a grid and a block are tuples of one to three numbers, not {sizes!r}")
            if any(not 1 <= size <= limit for size, limit in zip(sizes, limits, strict=False)):
                raise BadLaunch(f"{self.name}: a size of {sizes} is outside of {limits}: the launch would fail")
        if shared_mem:
            raise AttributeError("the stand-in has no dynamic shared memory: add it to tests/standin/include")
        if self._host is None:
            self.compile()
        host = self._host
        assert host is not None
        load(self.name, self.code, self.options)
        if len(args) != len(host.takes):
            raise BadLaunch(f"{self.name}: takes {len(host.takes)} arguments, was given {len(args)}")
        prepared = [self._argument(i, takes, arg) for i, (takes, arg) in enumerate(zip(host.takes, args, strict=True))]
        reads = [span for _, way, span in prepared if way == "in" and span is not None]
        writes = [span for _, way, span in prepared if way == "out" and span is not None]
        given = [value for value, _, _ in prepared]

        def work() -> None:
            chunks = {id(span.chunk): span.chunk for span in (*reads, *writes)}.values()
            before = [(chunk, chunk.memory.copy()) for chunk in chunks]
            try:
                host(grid, block, given)
            except LaunchError as error:
                raise BadLaunch(str(error)) from error
            for chunk, bytes_before in before:
                self._only(chunk, bytes_before, writes)

        machine = active()
        machine.launches[self.name] = machine.launches.get(self.name, 0) + 1
        machine.run(Operation(self.name, reads, writes, work, checked=True))

    def _argument(self, position: int, takes: str, given: Any) -> tuple[Any, str, Span | None]:
        """What the host's kernel is given; for a pointer whether it is read or written, and what."""
        way, _, kind = takes.rpartition(":")
        what = f"{self.name}: argument {position}"
        if not way:
            weak = {bool: np.bool_, int: np.int64, float: np.float64}.get(type(given))
            number = given if weak is None else weak(given)
            if not isinstance(number, np.generic) or named(number.dtype) != kind:
                passed = f", which CuPy passes as {number.dtype.name}" if weak is not None else ""
                raise BadLaunch(f"{what} must be a NumPy {kind}, is {given!r:.60}{passed}")
            return number, "", None
        if given is None or (isinstance(given, np.uint64) and not given):  # a null pointer has eight bytes
            return None, way, None
        if isinstance(given, MemoryPointer):
            chunk = given.mem.chunk
            if chunk is None:
                return None, way, None
            return given.ptr, way, Span(chunk, chunk.memory[given.offset :])
        if not isinstance(given, ndarray):
            raise BadLaunch(f"{what} must be an array of {kind}, is {given!r:.60}")
        if named(given.dtype) != kind:
            raise BadLaunch(f"{what} must be an array of {kind}, is {given}")
        if not given.flags.c_contiguous:
            raise BadLaunch(f"{what} is not contiguous: {given}, strides {given.strides}")
        return (given.data.ptr or None), way, (given.span[0] if given.span else None)

    def _only(self, chunk: Chunk, before: NDArray[Any], writes: list[Span]) -> None:
        """Raise Overrun where a block has changed outside of what may be written."""
        changed = chunk.memory != before
        for span in writes:
            if span.chunk is chunk:
                changed[slice(*span.bytes)] = False
        if changed.any():
            raise Overrun(f"{self.name} has written byte {int(changed.argmax())} of {chunk}, outside of its arrays")


def compiled(code: str, options: tuple[str, ...]) -> dict[str, HostKernel]:
    """Return the kernels of a text that is compiled with these options.

    Options such as -DONLY_HALF select some of its kernels. The text is compiled once, without them.
    """
    some = tuple(option for option in options if option.startswith("-DONLY_"))
    found = host_library(code, options=tuple(option for option in options if option not in some))
    return {name: found[name] for name in exported_by(code, some)} if some else found


def load(name: str, code: str, options: tuple[str, ...]) -> None:
    """Load a module on the device, as the first launch or `RawModule.compile` does. This waits for the device."""
    machine = active()
    with machine.lock:
        key = machine.seat.device, (code, options)
        if key not in machine.loaded:
            if machine.line.capture is not None:
                raise InCapture(f"{label(name)} is launched for the first time while {machine.line} captures")
            machine.must_not_wait(f"the first launch of {name}, which loads it,")
            machine.loaded.add(key)


class RawModule:
    """Kernels of a text."""

    def __init__(
        self, code: str | None = None, *, path: str | None = None, options: tuple[str, ...] = (), backend: str = "nvrtc"
    ) -> None:
        if code is None or path is not None:
            raise AttributeError("the stand-in compiles text, and no cubin: RawModule(code=...)")
        if isinstance(code, Path):
            raise TypeError("code must be text")
        self.code, self.options = code, options

    def get_function(self, name: str) -> Kernel:
        """The kernel of that name."""
        return Kernel(self.code, name, self.options)

    def compile(self) -> None:
        """Compile and load it on the current device now, not at the first launch."""
        compiled(self.code, self.options)
        load("RawModule.compile", self.code, self.options)
