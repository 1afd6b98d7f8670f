"""A GPU: CuPy's arrays, the worker's stream, and how batches get there."""

from __future__ import annotations

import platform
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.cuda.cublas import Cublas
from cupynet.backend.cuda.failures import failure
from cupynet.backend.cuda.graph_capture import Recorder
from cupynet.backend.cuda.launch import Kernels
from cupynet.backend.cuda.resident import ResidentTransfer, resident
from cupynet.backend.cuda.ring import RingTransfer
from cupynet.backend.cuda.staging import check_rows
from cupynet.backend.device import Device
from cupynet.backend.failure import Failure
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.transfer import Shared, Transfer
from cupynet.core.checks import tf32_products
from cupynet.core.errors import ConfigError

MOST_VALUES = 1 << 31  # of an image, its windows or a row: kernels number these in 32 bits
SIXTEEN = 16  # bytes in one access

_thread = threading.local()  # `mark`: of the backend that the thread has activated last


class CudaDevice(Device):
    """Arrays of CuPy on one device, and 2-D products of cuBLAS; the other operations are kernels (`kernels/`).

    Each worker calls `activate` once, in its own thread: the current device and stream are the thread's, and every
    array and kernel of the worker belongs to its non-blocking stream. What other threads ask of this backend (a
    prefetcher making batches, a caller reading weights) is put on the same stream: it happens in the order it was asked
    for, and memory that was freed is written again only after its last use. While the worker records a step they wait.

    Kernels trust the shapes they are given and take contiguous arrays in the policy's precisions alone: each operation
    checks the shapes, and leaves arrays of another kind to the reference.

    Args:
        dtype: half, bfloat16, float or double.
        device: number of the GPU.
        max_block_size, max_grid_size: of a launch, see `Kernels`.
        tf32: whether products of float are made in TF32, see `Cublas`.
    """

    name = "cupy"
    on_gpu = True

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
        self._second_stream: Any = None
        self._before = 0
        self._mark = object()  # on the thread whose own device and stream are this backend's
        self.apart = threading.RLock()  # held by the worker while it records, and by others who ask for anything
        super().__init__(DtypePolicy.of(dtype, half_arithmetic=True), device)
        self.controls: Array | None = None  # what a step reads its numbers from, see `Recorder`
        self._totals: dict[str, Array] = {}
        self._losses: dict[int, Array] = {}
        tf32 = tf32_products("tf32", tf32, self.name, self.policy.name)
        self.options = {"max_block_size": max_block_size, "max_grid_size": max_grid_size, "tf32": tf32}
        self._cublas: Cublas | None = None  # of the stream that products were last made on
        self.kernels = Kernels(cupy, device, self.here, max_block_size, max_grid_size)
        self._kind = self.policy.name
        self._wide = "double" if self.policy.accumulate == np.float64 else "float"

    def activate(self) -> None:
        if getattr(_thread, "mark", None) is self._mark:
            return
        self._before = int(self.xp.cuda.runtime.getDevice())
        self.xp.cuda.Device(self.device).use()
        if self._stream is None:  # another thread may go on where one has failed: in the order of the same stream
            self._stream = self.xp.cuda.Stream(non_blocking=True)
        self._stream.__enter__()  # after `use`, the end of a `with` block would bring the null stream back
        _thread.mark = self._mark = object()  # the thread that had it before asks like any other from now on

    def deactivate(self) -> None:
        if getattr(_thread, "mark", None) is self._mark:
            self._stream.__exit__(None, None, None)
            self.xp.cuda.Device(self._before).use()
            _thread.mark = None

    def here(self) -> AbstractContextManager[Any]:
        """See `Backend.here`: its device and stream; the worker has them anyway."""
        if getattr(_thread, "mark", None) is self._mark:
            current = self.xp.cuda.get_current_stream()
            if current.ptr == self._stream.ptr:  # else somebody computes beside the worker, in its thread
                return nullcontext()
        there = ExitStack()
        there.enter_context(self.apart)
        there.enter_context(self.xp.cuda.Device(self.device))
        if self._stream is not None:
            there.enter_context(self._stream)
        return there

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        with self.here():
            return super().allocate(shape, dtype)

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        with self.here():
            return super().asarray(array, dtype)

    def address(self, array: Array) -> int:
        return int(getattr(array.data, "ptr", 0))  # an array on the host was never borrowed

    def to_host(self, array: Array) -> Any:
        with self.here():
            return self.xp.asnumpy(array)

    def synchronize(self) -> None:
        with self.xp.cuda.Device(self.device):
            self.xp.cuda.get_current_stream().synchronize()  # of the calling thread, which may be another
            if self._stream is not None:
                self._stream.synchronize()

    def stream(self) -> int:
        return int(self._stream.ptr)

    def place(self) -> str:
        return f"{platform.node()} {self.xp.cuda.runtime.deviceGetPCIBusId(self.device)}"

    def recorder(self) -> Recorder:
        return Recorder(self)

    def failure(self, error: BaseException, device: int) -> Failure | None:
        return failure(error, device)

    def record_event(self) -> Any:
        with self.here():
            event = self.xp.cuda.Event(disable_timing=True)
            event.record()
            return event

    def wait_event(self, *events: Any) -> None:
        with self.here():
            for event in events:
                self.xp.cuda.get_current_stream().wait_event(event)

    def fetch(self, out: Array, array: Array, source: Device) -> None:
        with self.here():
            if source.device == self.device:
                out[...] = array
                return
            stream = self.xp.cuda.get_current_stream().ptr
            self.xp.cuda.runtime.memcpyPeerAsync(
                out.data.ptr, self.device, array.data.ptr, source.device, out.nbytes, stream
            )

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        """See `Backend.load_images`. Images on the device are gathered there, by samples that are on the host."""
        fits = images.ndim == 4 and len(pixels.scale) in (1, images.shape[3])
        if images.dtype != np.uint8 or not fits or not images.flags.c_contiguous:
            with self.here():
                return super().load_images(images, samples, pixels)
        if not isinstance(images, self.xp.ndarray):
            chosen, order = self.asarray(images[samples]), None
            count = len(chosen)
        else:
            samples = np.asarray(samples, np.int64)
            check_rows(samples, len(images))
            chosen, order, count = images, self.asarray(samples), len(samples)
        batch = self.allocate((count, *images.shape[1:]), self.policy.storage)
        self._gather(chosen, order, batch, self.kernels, self._tables(pixels))
        return batch

    def _tables(self, pixels: PixelScale) -> tuple[Array, Array]:
        """Scale and shift on the device, on the worker's stream."""
        wide = self.policy.accumulate
        return self.asarray(np.array(pixels.scale, wide)), self.asarray(np.array(pixels.shift, wide))

    def _gather(
        self, images: Array, samples: Array | None, out: Array, kernels: Kernels, tables: tuple[Array, Array]
    ) -> None:
        """out (N, H, W, C) = images (S, H, W, C) uint8 at samples (N,) int64, scaled by what `_tables` has made, all on
        the device; on the stream of `kernels`. Without samples the first N."""
        count, size, channels = len(out), int(np.prod(out.shape[1:])), len(tables[0])
        kernels.images(f"load_images_{self._kind}", count, size, images, samples, *tables, out, count, size, channels)

    @property
    def _arrivals(self) -> Any:
        """The stream on which batches come to the device while the worker computes on its own; made once."""
        if self._second_stream is None:
            with self.xp.cuda.Device(self.device):
                self._second_stream = self.xp.cuda.Stream(non_blocking=True)
        return self._second_stream

    def transfer(
        self,
        images: Any,
        labels: Any,
        *,
        batch_size: int,
        ahead: int,
        on_device: bool | str,
        shared: Shared,
        pixels: PixelScale = FRACTIONS,
        edited: bool = False,
    ) -> Transfer:
        """See `Backend.transfer`. Images that are edited on the host come over the ring.

        ConfigError: the images are to stay on the device, and do not fit, or are edited.
        """
        if images is None:
            return ResidentTransfer(self, None, labels, batch_size, shared)
        if edited and on_device is True:
            raise ConfigError("data_on_device=true: images are augmented on the host: take auto, or no augmentation")
        there = resident(self, images, on_device, shared) if on_device and not edited else None
        if there is None:
            return RingTransfer(self, images, labels, batch_size, ahead, pixels)
        try:
            return ResidentTransfer(self, there, labels, batch_size, shared, pixels)
        except BaseException:
            there.leave(self, shared)
            raise

    def convert(self, source: Array, target: Array) -> None:
        shapes.alike("convert", source, target)
        storage, wide = self.policy.storage, self.policy.accumulate
        if not self._contiguous(source, target) or {source.dtype, target.dtype} != {storage, wide}:
            return super().convert(source, target)
        name = "widen" if target.dtype == wide else "narrow"
        self._flat(f"{name}_{self._kind}", target.size, source, target)

    def _contiguous(self, *arrays: Array) -> bool:
        return all(array.flags.c_contiguous for array in arrays)

    def _stores(self, *arrays: Array) -> bool:
        """Whether kernels take these activations: contiguous, in the storage precision."""
        storage = self.policy.storage
        return all(array.dtype == storage and array.flags.c_contiguous for array in arrays)

    def _updates(self, *vectors: Array) -> bool:
        """Whether kernels take these flat vectors: contiguous, in the accumulation precision."""
        wide = self.policy.accumulate
        return all(vector.dtype == wide and vector.flags.c_contiguous for vector in vectors)

    def _flat(self, name: str, count: int, *arguments: Any) -> None:
        """Launch a kernel over flat arrays; the number of values is its last argument. Of nothing there is none."""
        if not count:
            return
        widest = max(array.dtype.itemsize for array in arguments if getattr(array, "size", 0) == count)
        self.kernels.flat(name, count, *arguments, count, at_once=SIXTEEN // widest)

    def _not_steered(self, name: str) -> None:
        """Refuse, in a step that runs ahead, what the reference computes with numbers of the host. RuntimeError."""
        if self.controls is not None:
            raise RuntimeError(f"{name}: arrays of this kind have no kernel that takes its numbers from the device")
