"""The modules `cupy`, `cupy.cuda` and those below it, put into `sys.modules` for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend.cuda import cublas as binding
from tests.standin import collectives, cublas, kernels, memory, streams
from tests.standin.arrays import ndarray
from tests.standin.errors import CUDARuntimeError
from tests.standin.functions import FUNCTIONS
from tests.standin.machine import Machine, activate, active
from tests.standin.peers import HOST_TO_DEVICE, memcpy_async, memcpy_peer_async
from tests.standin.pinned import PinnedPool

VERSION, CUDA = "14.2.0", 12090
TYPES = (
    "bool_", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "dtype",
)  # fmt: skip


class Module(ModuleType):
    """A module that says what it lacks."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name, "Stands in for CuPy in tests.")
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)  # as for one that is installed: importlib.util.find_spec asks
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the stand-in has no {self.__name__}.{name}: look up what CuPy does, add it to tests/standin"
        )


@contextmanager
def installed(devices: int = 2, memory: int = 1 << 30, *, patience_s: float = 20.0) -> Iterator[Machine]:
    """CuPy is the stand-in in here, on a machine of its own, and so is the cuBLAS that cupynet loads.

    Args:
        devices: how many there are. memory: bytes of each.
        patience_s: how long a collective operation waits for the other ranks.

    Raises:
        Misuse: at the end, whatever was found and not cleared from `Machine.misuses`: what was swallowed, too; and a
            communicator of NCCL that was not ended.
    """
    machine = Machine(devices, memory, patience_s)
    before = activate(machine)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "cupy" or name.startswith("cupy.")}
    machine.cublas = cublas.Cublas(machine)
    loads, library = binding.library, binding.Library(machine.cublas)
    try:
        binding.library = lambda cuda: library  # type: ignore[assignment]
        machine.begin([streams.Stream.null] * devices)
        machine.pinned = PinnedPool(machine)
        sys.modules.update(_modules())
        yield machine
        with machine.lock:
            machine.intact("something")
        collectives.all_ended(machine)
        if machine.misuses:
            raise machine.misuses[0]
    finally:
        machine.on = False
        activate(before)
        binding.library = loads
        for name in [name for name in sys.modules if name == "cupy" or name.startswith("cupy.")]:
            del sys.modules[name]
        sys.modules.update(kept)


def _properties(device: int) -> dict[str, Any]:
    return {"name": b"made-up device", "major": 9, "minor": 0, "totalGlobalMem": active().memory}


def _modules() -> dict[str, ModuleType]:
    """All modules by name; long, because it is the list of what there is."""
    default, pinned = memory.MemoryPool(), active().pinned
    runtime = Module(
        "cupy.cuda.runtime",
        getDeviceCount=lambda: active().devices,
        getDevice=lambda: active().seat.device,
        memGetInfo=lambda: streams.Device().mem_info,
        getDeviceProperties=_properties,
        driverGetVersion=lambda: CUDA,
        runtimeGetVersion=lambda: CUDA,
        deviceSynchronize=lambda: streams.Device().synchronize(),
        memcpyPeerAsync=memcpy_peer_async,
        memcpyAsync=memcpy_async,
        memcpyHostToDevice=HOST_TO_DEVICE,
        deviceGetPCIBusId=lambda device: f"0000:{device:02X}:00.0",
        CUDARuntimeError=CUDARuntimeError,
    )
    nccl = Module(
        "cupy.cuda.nccl",
        available=True,
        get_version=collectives.get_version,
        get_unique_id=collectives.get_unique_id,
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
        MemoryPool=memory.MemoryPool,
        MemoryPointer=memory.MemoryPointer,
        UnownedMemory=memory.UnownedMemory,
        using_allocator=using_allocator,
        alloc=default.malloc,
        alloc_pinned_memory=pinned.malloc,
        is_available=lambda: True,
    )
    cupy = Module(
        "cupy",
        __version__=VERSION,
        cuda=cuda,
        ndarray=ndarray,
        RawModule=kernels.RawModule,
        is_available=lambda: True,
        get_default_memory_pool=lambda: default,
        get_default_pinned_memory_pool=lambda: pinned,
        **FUNCTIONS,
        **{name: getattr(np, name) for name in TYPES},
    )
    return {module.__name__: module for module in (cupy, cuda, runtime, nccl, blocks)}


@contextmanager
def using_allocator(allocator: Any = None) -> Iterator[None]:
    """Arrays of this thread take their memory from here."""
    seat = active().seat
    seat.allocators.append(allocator)
    try:
        yield
    finally:
        seat.allocators.pop()
