"""Images that are sent to a GPU batch by batch, ahead of the worker, while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.staging import Staging, batch_of, check_rows
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.transfer import Edit, Transfer

if TYPE_CHECKING:
    from cupynet.backend.cuda.device import CudaDevice


class Slot:
    """The memory of one batch on the device.

    Attributes:
        images: (N, H, W, C) in the storage dtype.
        labels: (N,) int64.
        made: an event on the copy stream, after the batch was made.
        free: an event on the worker's stream, after the last use of the batch before.
    """

    def __init__(self, backend: CudaDevice, batch_size: int, shape: tuple[int, ...]) -> None:
        self.images = backend.allocate((batch_size, *shape), backend.policy.storage)
        self.labels = backend.allocate((batch_size,), np.int64)
        self.made, self.free = (backend.xp.cuda.Event(disable_timing=True) for _ in range(2))


class RingTransfer(Transfer):
    """Batches sent from pinned memory by the prefetch thread, on a stream of their own.

    There are two more slots than batches made ahead. One holds the batch in use, the other the previous batch: its slot
    becomes free when the worker takes the next batch, and `make` may be called before that.

    Args:
        images, labels, batch_size, ahead, pixels: see `Device.transfer`.
    """

    def __init__(
        self, backend: CudaDevice, images: Any, labels: Any, batch_size: int, ahead: int, pixels: PixelScale = FRACTIONS
    ) -> None:
        self._backend, self._host, self._labels = backend, images, labels
        shape, xp = images.shape[1:], backend.xp
        self._stream = backend._arrivals
        self._kernels = backend.kernels.launched(self._there)
        self._tables = backend._tables(pixels)
        with backend.here():
            self._slots = [Slot(backend, batch_size, shape) for _ in range(ahead + 2)]
            self._pixels = backend.allocate(
                (batch_size, *shape), np.uint8
            )  # one is enough: copies and kernels take turns
            self._pixels_ahead = Staging(xp, self._pixels.nbytes)
            self._labels_ahead = Staging(xp, self._slots[0].labels.nbytes)
        self._waiting: deque[Slot] = deque()
        self._used: Slot | None = None
        self.begin([])
        if len(labels):
            self.make(np.zeros(1, np.int64))  # loads the kernel, which waits for the device
            self.begin([])

    def _there(self) -> AbstractContextManager[Any]:
        """Context with the device and the copy stream."""
        there = ExitStack()
        there.enter_context(self._backend.xp.cuda.Device(self._backend.device))
        there.enter_context(self._stream)
        return there

    def begin(self, rows: Sequence[Array]) -> None:
        with self._backend.here():
            for slot in self._slots:
                slot.free.record()
        self._waiting.clear()
        self._made, self._used = 0, None

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        slot, count = self._slots[self._made % len(self._slots)], len(rows)
        self._made += 1
        check_rows(rows, len(self._labels))
        images, labels, pixels = batch_of(slot.images, count), slot.labels[:count], self._pixels[:count]
        np.take(self._labels, rows, out=self._labels_ahead.room(labels), mode="clip")
        room = self._pixels_ahead.room(pixels)
        if edit is None:
            np.take(self._host, rows, axis=0, out=room, mode="clip")
        else:
            np.copyto(room, edit(self._host[rows]))
        with self._there():
            self._stream.wait_event(slot.free)
            self._labels_ahead.send(labels)
            self._pixels_ahead.send(pixels)
            self._backend._gather(pixels, None, images, self._kernels, self._tables)
            slot.made.record()
        self._waiting.append(slot)
        return images, labels

    def take(self) -> None:
        slot = self._waiting.popleft()
        with self._backend.here():
            if self._used is not None:
                self._used.free.record()
            self._backend.wait_event(slot.made)
        self._used = slot

    def close(self) -> None:
        for staging in (self._pixels_ahead, self._labels_ahead):
            staging.close()
        with self._there():
            self._slots[0].made.record()
        self._backend.wait_event(self._slots[0].made)  # batches that were never taken are freed on the worker's stream
        self._slots.clear()
        self._waiting.clear()
        del self._tables
        self._used = self._pixels = self._host = None
