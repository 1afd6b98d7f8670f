"""Images that stay on a GPU: uploaded once for all workers there, and gathered by each into its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.staging import Staging, batch_of, check_rows
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.transfer import Edit, Shared, Transfer
from cupynet.core.checks import amount
from cupynet.core.errors import ConfigError

if TYPE_CHECKING:
    from cupynet.backend.cuda.device import CudaDevice

SHARE = 4  # images stay on a device if they take at most 1 / SHARE of its free memory
UPLOAD = 1 << 23  # bytes that are copied at once
NUMBERS = 2 * 8  # bytes of a sample's index and label


class Resident:
    """The images of a data set on one device, for all workers of a process that train there.

    They are allocated and freed on a stream that the workers share, which waits for each worker that leaves.

    Args:
        xp: CuPy.
        stream: the shared stream, of the current device.
        images: (S, H, W, C) uint8 on the host.

    Attributes:
        images: the same on the device.
    """

    def __init__(self, xp: Any, stream: Any, images: Any) -> None:
        self._host = images  # kept alive, as its id is the key of this object
        self._stream = stream
        with stream:
            self.images = xp.empty(images.shape, np.uint8)
            some = max(1, UPLOAD // max(images[:1].nbytes, 1))
            staging = Staging(xp, min(some, len(images)) * images[:1].nbytes)
            for first in range(0, len(images), some):
                part = self.images[first : first + some]
                np.copyto(staging.room(part), images[first : first + some])
                staging.send(part)
            staging.close()  # everything has arrived: no stream needs to wait for this one

    def leave(self, backend: CudaDevice) -> None:
        """Release them for this worker. The memory is freed after its work, when the last reference is dropped."""
        with backend.here():
            self._stream.wait_event(backend.record_event())


def resident(backend: CudaDevice, images: Any, on_device: bool | str, shared: Shared) -> Resident | None:
    """The images on the device, uploaded by the first worker that asks; None if they do not stay there."""
    xp, key = backend.xp, (backend.device, id(images))
    with shared.lock, backend.here():
        found: Resident | None = shared.kept.get(key)
        if found is not None:
            return found
        if on_device == "auto" and SHARE * (images.nbytes + NUMBERS * len(images)) > _free(xp):
            return None
        if backend.device not in shared.streams:
            shared.streams[backend.device] = xp.cuda.Stream(non_blocking=True)
        try:
            found = shared.kept[key] = Resident(xp, shared.streams[backend.device], images)
        except xp.cuda.memory.OutOfMemoryError as error:
            if on_device == "auto":  # other programs may use memory of this device too
                return None
            raise ConfigError(
                f"data_on_device=true: {amount(images.nbytes)} of images do not fit on device {backend.device} "
                "besides the data already there: use auto or false"
            ) from error
        return found


def _free(xp: Any) -> int:
    """Return the bytes of the current device that its pool may still hand out."""
    pool = xp.get_default_memory_pool()
    free = int(xp.cuda.runtime.memGetInfo()[0] + pool.free_bytes())
    limit = int(pool.get_limit())
    return min(free, limit - int(pool.used_bytes())) if limit else free


class ResidentTransfer(Transfer):
    """Batches gathered on the device by the worker itself, on its own stream, into the same memory each time.

    An epoch begins with one copy: the indices of its samples in order, and their labels.

    Args:
        resident: the images; None for batches without images.
        labels, batch_size, pixels: see `Device.transfer`.
    """

    ahead, steady = False, True

    def __init__(
        self,
        backend: CudaDevice,
        resident: Resident | None,
        labels: Any,
        batch_size: int,
        pixels: PixelScale = FRACTIONS,
    ) -> None:
        self._backend, self._resident = backend, resident
        self._host_labels, self._at = labels, 0
        self._batch: Array | None = None
        self._tables = backend._tables(pixels)
        if resident is not None:
            self._batch = backend.allocate((batch_size, *resident.images.shape[1:]), backend.policy.storage)
        self._reserve(len(labels))
        if len(labels):
            self.begin([np.zeros(1, np.int64)])
            self.make(np.zeros(1, np.int64))  # loads the kernel, which waits for the device

    def _reserve(self, samples: int) -> None:
        """Allocate memory for an epoch of so many samples."""
        with self._backend.here():
            self._staging = Staging(self._backend.xp, NUMBERS * samples)
            self._numbers = self._backend.allocate((2 * samples,), np.int64)

    def begin(self, rows: Sequence[Array]) -> None:
        count = sum(map(len, rows))
        if 2 * count > len(self._numbers):  # some samples occur more than once
            self._staging.close()
            self._reserve(count)
        with self._backend.here():
            numbers = self._numbers[: 2 * count].reshape(2, count)
            room = self._staging.room(numbers)
            if rows:
                np.concatenate(rows, out=room[0])
            check_rows(room[0], len(self._host_labels))
            np.take(self._host_labels, room[0], out=room[1], mode="clip")
            self._staging.send(numbers)
        self._order, self._labels, self._at = numbers[0], numbers[1], 0

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        first, count = self._at, len(rows)
        self._at += count
        labels = self._labels[first : self._at]
        if self._resident is None:
            return None, labels
        if edit is not None:
            raise ConfigError("images that stay on a device cannot be edited on the host: ask for an edited feed")
        images, order = batch_of(self._batch, count), self._order[first : self._at]
        self._backend._gather(self._resident.images, order, images, self._backend.kernels, self._tables)
        return images, labels

    def close(self) -> None:
        self._staging.close()
        del self._tables
        self._numbers = self._order = self._labels = self._batch = None
        if self._resident is not None:
            self._resident.leave(self._backend)
            self._resident = None
