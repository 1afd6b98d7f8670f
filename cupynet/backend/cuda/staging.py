"""From memory of the host to a GPU without waiting, and what the feeds of a GPU have in common.

cudaMalloc and cudaHostAlloc wait for the device, and a device may wait in an NCCL collective for a thread that is not
there yet. So all memory is allocated when a feed is made, in the worker's own thread; what is asked for later copies,
launches, and records events that were there before.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.launch import Kernels
from cupynet.backend.pixels import PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.core.errors import ConfigError


class Gpu(Protocol):
    """What feeds need of the worker's backend."""

    xp: ModuleType
    device: int
    policy: DtypePolicy
    options: Mapping[str, Any]
    kernels: Kernels

    @property
    def _arrivals(self) -> Any:
        """The stream on which batches come to the device."""

    def here(self) -> AbstractContextManager[Any]:
        """The device and the worker's stream, as those of the calling thread."""

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array."""

    def _tables(self, pixels: PixelScale) -> tuple[Array, Array]:
        """What becomes of pixels, on the device."""

    def _gather(
        self, images: Array, samples: Array | None, out: Array, kernels: Kernels, tables: tuple[Array, Array]
    ) -> None:
        """The images of a batch, scaled, into `out`; on the stream of `kernels`."""

    def record_event(self) -> Any:
        """The end of what the worker's stream was asked for."""

    def wait_event(self, *events: Any) -> None:
        """Let the worker's stream wait for these."""


class Staging:
    """Two buffers in pinned memory of the host, by turns: each is written again when what it held has arrived.

    What is sent goes to the device that is current, on the stream that is current.

    Args:
        xp: CuPy.
        nbytes: the most that is sent at once.
    """

    def __init__(self, xp: Any, nbytes: int) -> None:
        size, self._cuda = max(nbytes, 1), xp.cuda
        self._buffers = [np.frombuffer(xp.cuda.alloc_pinned_memory(size), np.uint8, size) for _ in range(2)]
        self._arrived = [xp.cuda.Event(block=True, disable_timing=True) for _ in range(2)]  # block: nobody spins
        self._turn = 0

    def room(self, array: Array) -> Any:
        """Where to write on the host what is sent to `array` next."""
        self._arrived[self._turn].synchronize()
        return self._buffers[self._turn][: array.nbytes].view(array.dtype).reshape(array.shape)

    def send(self, array: Array) -> None:
        """Overwrite an array on the device with what was written to its room."""
        if array.nbytes:
            runtime, source = self._cuda.runtime, self._buffers[self._turn].ctypes.data
            stream = self._cuda.get_current_stream().ptr
            runtime.memcpyAsync(array.data.ptr, source, array.nbytes, runtime.memcpyHostToDevice, stream)
        self._arrived[self._turn].record()
        self._turn = 1 - self._turn

    def close(self) -> None:
        """Wait until all has arrived, and give the memory back."""
        for arrived in self._arrived:
            arrived.synchronize()
        self._buffers.clear()


def batch_of(buffer: Array, count: int) -> Array:
    """The first `count` images of a buffer. ConfigError where it has not so many: a kernel would write behind it."""
    if count > len(buffer):
        raise ConfigError(f"a batch of {count} images where batch_size is {len(buffer)}: deal out no more at once")
    return buffer[:count]


def check_rows(rows: Array, count: int) -> None:
    """Refuse rows that a data set of `count` has not: a kernel reads anywhere. IndexError."""
    if rows.size and not -1 < rows.min() <= rows.max() < count:
        raise IndexError(f"samples {rows.min()} to {rows.max()}: there are {count} images")
