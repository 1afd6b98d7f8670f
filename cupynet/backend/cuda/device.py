from __future__ import annotations

import math
import platform
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.cublas import Cublas
from cupynet.backend.cuda.failures import failure
from cupynet.backend.cuda.launch import Kernels
from cupynet.backend.device import Device, Failure
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.window import Window
from cupynet.backend.workspace import Buffer, Loan, ThreadWorkspaces
from cupynet.core.errors import ConfigError

MAX_VALUES = 1 << 31  # limit on the number of values in an image or its windows: kernels use 32-bit indices
SIXTEEN = 16  # bytes per memory access

_thread = threading.local()  # `mark` identifies the backend most recently activated in the thread


class CudaDevice(Device):
    """Creates and moves CuPy arrays on one GPU.

    Each worker calls `activate` once, in its thread, and gets a separate non-blocking stream. Other threads that use
    the backend share this stream, so that freed memory is not reused too early, and wait while the worker captures a
    graph.
    """

    name = "cupy"

    def __init__(
        self,
        dtype: str = "float",
        device: int = 0,
        max_block_size: int = 256,
        max_grid_size: int | None = None,
        *,
        tf32: bool = False,
    ) -> None:
        import cupy

        self.xp = cupy
        self._stream: Any = None
        self._before = 0
        self._mark = object()  # set on the thread whose current device and stream belong to this backend
        self.apart = threading.RLock()  # held by the worker during capture, and by other threads in every call
        super().__init__(DtypePolicy.of(dtype, half_arithmetic=True), device)
        self.controls: Array | None = None  # scalars of a captured step (see `Recorder`)
        self._totals: dict[str, Array] = {}
        self._losses: dict[int, Array] = {}
        self.options = {"max_block_size": max_block_size, "max_grid_size": max_grid_size, "tf32": tf32}
        self._cublas: Cublas | None = None  # for the stream of the last matrix product
        self._kind = self.policy.name
        self.kernels = Kernels(cupy, device, self.activated, self._kind, max_block_size, max_grid_size)
        self._wide = "double" if self.policy.accumulate == np.float64 else "float"

    def activate(self) -> None:
        if getattr(_thread, "mark", None) is self._mark:
            return
        self._before = int(self.xp.cuda.runtime.getDevice())
        self.xp.cuda.Device(self.device).use()
        if self._stream is None:  # otherwise another thread continues on the same stream, for example after a failure
            self._stream = self.xp.cuda.Stream(non_blocking=True)
            self._workspaces = ThreadWorkspaces(self.allocator, self.lend)  # existing buffers belong to other streams
        self._stream.__enter__()  # not `use`, because then the end of a `with` block would restore the null stream
        _thread.mark = self._mark = object()  # the previous worker thread no longer matches

    def deactivate(self) -> None:
        if getattr(_thread, "mark", None) is self._mark:
            self._stream.__exit__(None, None, None)
            self.xp.cuda.Device(self._before).use()
            _thread.mark = None

    def activated(self) -> AbstractContextManager[Any]:
        """See `Device.activated`. Does nothing in the worker's thread, where device and stream are current."""
        if getattr(_thread, "mark", None) is self._mark:
            current = self.xp.cuda.get_current_stream()
            if current.ptr == self._stream.ptr:  # otherwise the thread has entered another stream
                return nullcontext()
        stack = ExitStack()
        stack.enter_context(self.apart)
        stack.enter_context(self.xp.cuda.Device(self.device))
        if self._stream is not None:
            stack.enter_context(self._stream)
        return stack

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        with self.activated():
            return super().allocate(shape, dtype)

    def lend(self, buffer: Buffer, shape: tuple[int, ...], loan: Loan) -> Array:
        cuda, memory = self.xp.cuda, buffer.memory
        owned = cuda.UnownedMemory(memory.data.ptr, memory.nbytes, loan, self.device)
        return self.xp.ndarray(shape, memory.dtype, cuda.MemoryPointer(owned, 0))

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        with self.activated():
            return super().asarray(array, dtype)

    def data_ptr(self, array: Array) -> int:
        return int(getattr(array.data, "ptr", 0))  # 0 for an array on the host

    def to_host(self, array: Array) -> Any:
        with self.activated():
            return self.xp.asnumpy(array)

    def synchronize(self) -> None:
        worker = getattr(_thread, "mark", None) is self._mark
        with nullcontext() if worker else self.apart, self.xp.cuda.Device(self.device):
            self.xp.cuda.get_current_stream().synchronize()  # the stream of the calling thread, which may differ
            if self._stream is not None:
                self._stream.synchronize()

    def stream(self) -> int:
        """Return the handle of the stream (cudaStream_t), for libraries such as NCCL."""
        return int(self._stream.ptr)

    def place(self) -> str:
        """Return the host name and the GPU's PCI bus ID, which identify the GPU across processes."""
        return f"{platform.node()} {self.xp.cuda.runtime.deviceGetPCIBusId(self.device)}"

    def prepare(self) -> None:
        self.kernels.prepare()

    def failure(self, error: BaseException, device: int) -> Failure | None:
        return failure(error, device)

    def record_event(self) -> Any:
        """Record an event after all queued work. Other streams can wait for it."""
        with self.activated():
            event = self.xp.cuda.Event(disable_timing=True)
            event.record()
            return event

    def wait_event(self, *events: Any) -> None:
        """Make later work on this stream wait for events of other backends, without blocking the host."""
        with self.activated():
            for event in events:
                self.xp.cuda.get_current_stream().wait_event(event)

    def fetch(self, out: Array, array: Array, source: Device) -> None:
        """Copy `array` from the device of `source` to `out`, which has the same shape and dtype."""
        with self.activated():
            if source.device == self.device:
                out[...] = array
                return
            stream = self.xp.cuda.get_current_stream().ptr
            self.xp.cuda.runtime.memcpyPeerAsync(
                out.data.ptr, self.device, array.data.ptr, source.device, out.nbytes, stream
            )

    def convert(self, source: Array, target: Array) -> None:
        storage, wide = self.policy.storage, self.policy.accumulate
        if {source.dtype, target.dtype} != {storage, wide}:
            return super().convert(source, target)
        name = "widen" if target.dtype == wide else "narrow"
        self._flat(f"{name}_{self._kind}", target.size, source, target)

    def _flat(self, name: str, count: int, *arguments: Any) -> None:
        """Launch a kernel on flat arrays. The number of values is its last argument."""
        if count:
            widest = max(array.dtype.itemsize for array in arguments if getattr(array, "size", 0) == count)
            self.kernels.flat(name, count, *arguments, count, at_once=SIXTEEN // widest)

    def _channels_at_once(self, channels: int, limit: int = SIXTEEN) -> int:
        """Return the number of adjacent channels per access, like `in_packs` in common.cuh."""
        return math.gcd(channels, min(limit, SIXTEEN // self.policy.storage.itemsize))

    def _geometry(self, shape: tuple[int, ...], window: Window) -> tuple[int, ...]:
        """Return the kernel parameters for images and windows. Raise ConfigError if 32-bit indices do not suffice."""
        n, height, width, channels = shape
        output, (top, _), (left, _) = window.output(height, width), *window.padding
        if channels * max(math.prod(output) * window.size, math.prod(window.padded(height, width))) >= MAX_VALUES:
            raise ConfigError(
                f"images of {height} x {width} x {channels} exceed the kernels' 32-bit indices. Use smaller images"
            )
        return n, height, width, channels, *output, *window.kernel, *window.stride, top, left
