"""Data that stay on a GPU: uploaded once for all workers there, and gathered by each into its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.staging import Gpu, Staging, batch_of, check_rows
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.transfer import Edit, Shared, Transfer
from cupynet.core.checks import amount
from cupynet.core.errors import ConfigError

SHARE = 4  # data stay on a device where they take one part in so many of what is free
UPLOAD = 1 << 23  # bytes that are copied at once when a data set comes to a device
NUMBERS = 2 * 8  # bytes of a sample's number and its label


class Resident:
    """The images of a data set on one device, for all workers of a process that train there.

    They are allocated, and given back, on a stream that the workers share: it waits for each who leaves.

    Args:
        xp: CuPy. stream: the shared one, of the device that is current.
        images: (S, H, W, C) uint8 on the host.

    Attributes:
        images: the same on the device.
    """

    def __init__(self, xp: Any, stream: Any, images: Any) -> None:
        self.host = images  # its address names the data set: no other may have it meanwhile
        self._stream, self._users = stream, 0
        with stream:
            self.images = xp.empty(images.shape, np.uint8)
            some = max(1, UPLOAD // max(images[:1].nbytes, 1))
            staging = Staging(xp, min(some, len(images)) * images[:1].nbytes)
            for first in range(0, len(images), some):
                part = self.images[first : first + some]
                np.copyto(staging.room(part), images[first : first + some])
                staging.send(part)
            staging.close()  # and so all that anybody asks for later comes after it

    def enter(self) -> None:
        """One more worker uses them; with `Shared.lock`."""
        self._users += 1

    def leave(self, backend: Gpu, shared: Shared) -> None:
        """A worker is done with them; after the last the memory is free."""
        with shared.lock, backend.here():
            self._stream.wait_event(backend.record_event())
            self._users -= 1
            if not self._users:
                del shared.kept[backend.device, id(self.host)]
                self.images = self.host = None


def resident(backend: Gpu, images: Any, on_device: bool | str, shared: Shared) -> Resident | None:
    """The images on the device, brought there by the first worker that asks; None where they are not to be there."""
    xp, kept, key = backend.xp, shared.kept, (backend.device, id(images))
    with shared.lock, backend.here():
        found = kept.get(key)
        if found is None:
            if on_device == "auto" and not fits(images.nbytes + NUMBERS * len(images), _free(xp)):
                return None
            if ("stream", backend.device) not in kept:
                kept["stream", backend.device] = xp.cuda.Stream(non_blocking=True)
            try:
                found = kept[key] = Resident(xp, kept["stream", backend.device], images)
            except xp.cuda.memory.OutOfMemoryError as error:
                if on_device == "auto":  # other programs take memory of the same device
                    return None
                raise ConfigError(
                    f"data_on_device=true: {amount(images.nbytes)} of images do not fit on device {backend.device} "
                    "beside what is there: take auto, or false"
                ) from error
        found.enter()
        return found


def _free(xp: Any) -> int:
    """Bytes of the device that is current which its pool may still hand out."""
    pool = xp.get_default_memory_pool()
    free = int(xp.cuda.runtime.memGetInfo()[0] + pool.free_bytes())
    limit = int(pool.get_limit())
    return min(free, limit - int(pool.used_bytes())) if limit else free


def fits(nbytes: int, free: int) -> bool:
    """Whether data of so many bytes are to stay on a device of which so many are free."""
    return SHARE * nbytes <= free


class ResidentTransfer(Transfer):
    """Batches gathered on the device by the worker itself, on its own stream, into the same memory each time.

    An epoch begins with one copy: the numbers of its samples in their order, and their labels.

    Args:
        resident: the images; None where batches come without. `leave` it where this fails.
        labels, batch_size, pixels: see `Backend.transfer`. shared: where the images are from.
    """

    ahead, steady = False, True

    def __init__(
        self,
        backend: Gpu,
        resident: Resident | None,
        labels: Any,
        batch_size: int,
        shared: Shared,
        pixels: PixelScale = FRACTIONS,
    ) -> None:
        self._backend, self._resident, self._shared = backend, resident, shared
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
        """Memory for an epoch of so many."""
        with self._backend.here():
            self._staging = Staging(self._backend.xp, NUMBERS * samples)
            self._numbers = self._backend.allocate((2 * samples,), np.int64)

    def begin(self, rows: Sequence[Array]) -> None:
        count = sum(map(len, rows))
        if 2 * count > len(self._numbers):  # some come more than once
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
            resident, self._resident = self._resident, None
            resident.leave(self._backend, self._shared)
