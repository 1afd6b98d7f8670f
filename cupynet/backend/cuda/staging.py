"""Copies from the host's memory to a GPU that do not wait, for the transfers of a GPU.

cudaMalloc and cudaHostAlloc wait for the device, which may itself wait in an NCCL collective for a thread that has not
arrived. So a transfer allocates all its memory when it is created, in the worker's own thread; later calls only copy,
launch, and record existing events.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError


class Staging:
    """Two alternating buffers of pinned memory. Each is overwritten once its last contents have arrived.

    Data is sent to the current device, on the current stream.

    Args:
        xp: CuPy.
        nbytes: the most that is sent at once.
    """

    def __init__(self, xp: Any, nbytes: int) -> None:
        size, self._cuda = max(nbytes, 1), xp.cuda
        self._buffers = [np.frombuffer(xp.cuda.alloc_pinned_memory(size), np.uint8, size) for _ in range(2)]
        self._arrived = [xp.cuda.Event(block=True, disable_timing=True) for _ in range(2)]  # block: sleep, do not spin
        self._turn = 0

    def room(self, array: Array) -> Any:
        """Return the host buffer for the next data sent to `array`."""
        self._arrived[self._turn].synchronize()
        return self._buffers[self._turn][: array.nbytes].view(array.dtype).reshape(array.shape)

    def send(self, array: Array) -> None:
        """Overwrite an array on the device with the contents of its buffer."""
        if array.nbytes:
            runtime, source = self._cuda.runtime, self._buffers[self._turn].ctypes.data
            stream = self._cuda.get_current_stream().ptr
            runtime.memcpyAsync(array.data.ptr, source, array.nbytes, runtime.memcpyHostToDevice, stream)
        self._arrived[self._turn].record()
        self._turn = 1 - self._turn

    def close(self) -> None:
        """Wait until everything has arrived, and free the memory."""
        for arrived in self._arrived:
            arrived.synchronize()
        self._buffers.clear()


def batch_of(buffer: Array, count: int) -> Array:
    """Return the first `count` images of a buffer. ConfigError if it is too small: a kernel would overrun it."""
    if count > len(buffer):
        raise ConfigError(f"a batch of {count} images where batch_size is {len(buffer)}: deal out no more at once")
    return buffer[:count]


def check_rows(rows: Array, count: int) -> None:
    """Raise IndexError for rows outside a data set of `count`: a kernel would read anywhere."""
    if rows.size and not -1 < rows.min() <= rows.max() < count:
        raise IndexError(f"samples {rows.min()} to {rows.max()}: there are {count} images")
