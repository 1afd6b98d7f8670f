"""The modules `cupy`, `cupy.cuda` and its submodules, installed temporarily in `sys.modules`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend.cuda import cublas as binding
from tests.standin import collectives, cublas, kernels, memory, pinned, streams
from tests.standin.arrays import ndarray
from tests.standin.errors import CUDARuntimeError
from tests.standin.functions import FUNCTIONS
from tests.standin.machine import Machine, activate, active

VERSION, CUDA = "14.2.0", 12090
PROPERTIES = {"name": b"made-up device", "major": 9, "minor": 0}
TYPES = ["bool_", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
TYPES += ["float16", "float32", "float64", "dtype"]


class Module(ModuleType):
    """A module with helpful errors for missing attributes."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name, "Stands in for CuPy in tests.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)  # for importlib.util.find_spec
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stand-in has no {self.__name__}.{name}: see what CuPy does, add it to tests/standin")


@contextmanager
def installed(devices: int = 2, memory: int = 1 << 30) -> Iterator[Machine]:
    """Install the stand-ins of CuPy and of the cuBLAS that cupynet loads, on devices with `memory` bytes each.

    At the end, raise the first misuse left in `Machine.misuses`, even if it was swallowed.
    """
    machine = Machine(devices, memory)
    before = activate(machine)
    real = _taken_out()
    machine.cublas = cublas.Cublas(machine)
    loads, library = binding.library, binding.Library(machine.cublas)
    try:
        binding.library = lambda cuda: library  # type: ignore[assignment]
        machine.null_streams = [streams.Stream.null] * devices
        machine.pinned = pinned.PinnedPool(machine)
        sys.modules.update(_modules())
        yield machine
        collectives.check_all_ended(machine)
        if machine.misuses:
            raise machine.misuses[0]
    finally:
        machine.on = False
        activate(before)
        binding.library = loads
        _taken_out()
        sys.modules.update(real)


def _taken_out() -> dict[str, ModuleType]:
    """Remove CuPy's modules from `sys.modules`, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "cupy"}


def _modules() -> dict[str, ModuleType]:
    default, pinned_pool = active().pool, active().pinned
    runtime = Module(
        "cupy.cuda.runtime",
        getDeviceCount=lambda: active().devices,
        getDevice=lambda: active().seat.device,
        memGetInfo=lambda: streams.Device().mem_info,
        getDeviceProperties=lambda device: PROPERTIES | {"totalGlobalMem": active().memory},
        driverGetVersion=lambda: CUDA,
        runtimeGetVersion=lambda: CUDA,
        memcpyPeerAsync=pinned.memcpy_peer_async,
        memcpyAsync=pinned.memcpy_async,
        memcpyHostToDevice=pinned.HOST_TO_DEVICE,
        deviceGetPCIBusId=lambda device: f"0000:{device:02X}:00.0",
        CUDARuntimeError=CUDARuntimeError,
    )
    nccl = Module(
        "cupy.cuda.nccl",
        available=True,
        get_version=lambda: collectives.VERSION,
        get_unique_id=lambda: os.urandom(128),
        NcclCommunicator=collectives.NcclCommunicator,
        NcclError=collectives.NcclError,
        **collectives.CONSTANTS,
    )
    blocks = Module("cupy.cuda.memory", OutOfMemoryError=memory.OutOfMemoryError)
    cuda = Module(
        "cupy.cuda",
        runtime=runtime,
        nccl=nccl,
        memory=blocks,
        Device=streams.Device,
        Stream=streams.Stream,
        Event=streams.Event,
        get_current_stream=streams.get_current_stream,
        MemoryPointer=memory.MemoryPointer,
        UnownedMemory=memory.UnownedMemory,
        using_allocator=using_allocator,
        alloc=default.malloc,
        alloc_pinned_memory=pinned_pool.malloc,
    )
    cupy = Module(
        "cupy",
        __version__=VERSION,
        cuda=cuda,
        ndarray=ndarray,
        RawModule=kernels.RawModule,
        get_default_memory_pool=lambda: default,
        get_default_pinned_memory_pool=lambda: pinned_pool,
        **FUNCTIONS,
        **{name: getattr(np, name) for name in TYPES},
    )
    return {module.__name__: module for module in (cupy, cuda, runtime, nccl, blocks)}


@contextmanager
def using_allocator(allocator: Any = None) -> Iterator[None]:
    """Allocate this thread's arrays with `allocator`."""
    seat = active().seat
    seat.allocators.append(allocator)
    try:
        yield
    finally:
        seat.allocators.pop()
