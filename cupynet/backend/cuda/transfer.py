"""Transfers batches to a GPU, or gathers them from images that stay in its memory.

cudaMalloc and cudaHostAlloc wait for the device, which may be waiting for another thread in an NCCL collective, so
memory is allocated only in the worker's thread, at creation or in `begin`. The prefetch thread never uses the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.device import CudaDevice
from cupynet.backend.transfer import FRACTIONS, BatchOps, Edit, HostData, PixelScale, Shared, Transfer
from cupynet.core.errors import ConfigError
from cupynet.core.wording import amount

SHARE = 4  # with `auto`, images stay on a device if they take at most 1 / SHARE of its free memory
UPLOAD = 1 << 23  # bytes per copy
NUMBERS = 2 * 8  # bytes for the index and label of a sample


class Staging:
    """Two alternating pinned buffers for asynchronous copies to the current device and stream."""

    def __init__(self, xp: Any, nbytes: int) -> None:
        size, self._cuda = max(nbytes, 1), xp.cuda
        self._buffers = [np.frombuffer(xp.cuda.alloc_pinned_memory(size), np.uint8, size) for _ in range(2)]
        self._arrived = [xp.cuda.Event(block=True, disable_timing=True) for _ in range(2)]  # block: sleep, do not spin
        self._turn = 0

    def send(self, target: Array, content: Any) -> None:
        """Overwrite a device array with a host array of the same shape and dtype."""
        buffer, arrived = self._buffers[self._turn], self._arrived[self._turn]
        arrived.synchronize()
        np.copyto(buffer[: target.nbytes].view(target.dtype).reshape(target.shape), content)
        if target.nbytes:
            runtime, stream = self._cuda.runtime, self._cuda.get_current_stream().ptr
            direction = runtime.memcpyHostToDevice
            runtime.memcpyAsync(target.data.ptr, buffer.ctypes.data, target.nbytes, direction, stream)
        arrived.record()
        self._turn = 1 - self._turn

    def close(self) -> None:
        for arrived in self._arrived:
            arrived.synchronize()
        self._buffers.clear()


class Resident:
    """Images (S, H, W, C) of a data set on one device, shared by all workers of the process on this device.

    They are allocated and freed on a separate stream, which waits for the pending work of each worker that releases
    them. The host does not wait, because a worker's stream may be blocked in a collective.
    """

    def __init__(self, xp: Any, stream: Any, images: Any) -> None:
        self._host = images  # kept alive, because the array's id is this object's key
        self._stream = stream
        with stream:
            self.images = xp.empty(images.shape, images.dtype)
            count = max(1, UPLOAD // max(images[:1].nbytes, 1))
            staging = Staging(xp, min(count, len(images)) * images[:1].nbytes)
            for first in range(0, len(images), count):
                staging.send(self.images[first : first + count], images[first : first + count])
            staging.close()  # waits for the copies, so that other streams need not wait for this one

    def leave(self, backend: CudaDevice) -> None:
        """Release the images for this worker. Memory is freed after the pending work of the last worker."""
        with backend.activated():
            self._stream.wait_event(backend.record_event())


def resident(backend: CudaDevice, images: Any, on_device: bool | str, shared: Shared) -> Resident | None:
    """Return the images on the device, which the first worker uploads, or None if `auto` finds too little memory."""
    xp, key = backend.xp, (backend.device, id(images))
    with shared.lock, backend.activated():
        images_on_device: Resident | None = shared.kept.get(key)
        if images_on_device is not None:
            return images_on_device
        if on_device == "auto" and SHARE * (images.nbytes + NUMBERS * len(images)) > _free(xp):
            return None
        if backend.device not in shared.streams:
            shared.streams[backend.device] = xp.cuda.Stream(non_blocking=True)
        try:
            images_on_device = shared.kept[key] = Resident(xp, shared.streams[backend.device], images)
        except xp.cuda.memory.OutOfMemoryError as error:
            if on_device == "auto":  # other programs may also use memory of this device
                return None
            raise ConfigError(
                f"{amount(images.nbytes)} of images do not fit into the free memory of device {backend.device}. Use "
                "auto or false",
                setting="data_on_device",
                value="true",
            ) from error
        return images_on_device


def _free(xp: Any) -> int:
    pool = xp.get_default_memory_pool()
    free = int(xp.cuda.runtime.memGetInfo()[0] + pool.free_bytes())
    limit = int(pool.get_limit())
    return min(free, limit - int(pool.used_bytes())) if limit else free


class BatchBuffers:
    """Batch buffers of closed transfers. They are reused, because captured graphs still reference them."""

    def __init__(self) -> None:
        self._left: list[weakref.ref[Array]] = []

    def take(self, backend: CudaDevice, shape: tuple[int, ...]) -> Array:
        for reference in self._left:
            array = reference()
            if array is not None and array.shape == shape:
                self._left.remove(reference)
                return array
        return backend.allocate(shape, backend.policy.storage)

    def leave(self, array: Array) -> None:
        self._left = [reference for reference in self._left if reference() is not None]
        self._left.append(weakref.ref(array))


class CudaBatches(CudaDevice, BatchOps):
    @cached_property
    def batches(self) -> BatchBuffers:
        return BatchBuffers()

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        batch = self.allocate((len(samples), *images.shape[1:]), self.policy.storage)
        rows = self.asarray(np.ascontiguousarray(images[samples]))
        self._gather(rows, None, batch, self._tables(pixels))
        return batch

    def _tables(self, pixels: PixelScale) -> tuple[Array, Array]:
        wide = self.policy.accumulate
        return self.asarray(np.array(pixels.scale, wide)), self.asarray(np.array(pixels.shift, wide))

    def _gather(self, images: Array, samples: Array | None, out: Array, tables: tuple[Array, Array]) -> None:
        """Write scale · images[samples] + shift to `out` (N, H, W, C). Float images are only copied."""
        if samples is None and images.dtype != np.uint8:
            with self.activated():
                out[...] = images
            return
        count, size, channels = len(out), math.prod(out.shape[1:]), len(tables[0])
        if channels not in (1, out.shape[-1]):
            raise ConfigError(f"images have {out.shape[-1]} channels, but their scaling has {channels}")
        arguments = images, samples, *tables, out, count, size, channels
        self.kernels.images(f"load_images_{self._kind}", count, size, *arguments)

    def transfer(self, data: HostData, batch_size: int, on_device: bool | str, shared: Shared) -> Transfer:
        """See `BatchOps.transfer`. Augmented images and float images are sent batch by batch."""
        resident_images = None
        if data.images is not None and on_device:
            by_batch = data.edited or data.images.dtype != np.uint8
            if by_batch and on_device is True:
                kind = "augmented on the host" if data.edited else "floating-point numbers"
                reason = f"images are {kind}, so they cannot stay on the device. Use auto or false"
                raise ConfigError(reason, "data_on_device", "true")
            resident_images = None if by_batch else resident(self, data.images, on_device, shared)
        return CudaTransfer(self, data, batch_size, resident_images)


class CudaTransfer(Transfer):
    """A transfer in which `send` writes every batch to the same memory, on the worker's stream.

    `begin` copies the sample indices and labels of the epoch. Images that stay on the device are gathered there: by
    `gather`, or in captured steps by `take`. Otherwise, the host gathers each batch and sends it from pinned memory.

    Attributes:
        order: (1 + S,): the number of samples that captured steps have taken in this epoch, followed by the epoch's
            sample indices.
        memory: identifies the arrays that `take` reads. Steps captured before it changed must not be launched.
    """

    steady = True

    def __init__(self, backend: CudaBatches, data: HostData, batch_size: int, resident: Resident | None = None) -> None:
        super().__init__(backend, data)
        self.ahead = data.images is not None and resident is None
        self.queues = resident is not None
        self._backend, self._resident = backend, resident
        self._tables = backend._tables(data.pixels)
        self._batch: Array = None
        self._pixels: Array = None
        if data.images is not None:
            shape = batch_size, *data.images.shape[1:]
            self._batch = backend.batches.take(backend, shape)
            if resident is None:
                self._pixels = backend.allocate(shape, data.images.dtype)
                self._pixels_sent = self._staging(self._pixels.nbytes)
        self._reserve(len(data.labels), data.labels)
        if len(data.labels):
            first = np.zeros(1, np.int64)
            self.begin([first], [data.labels[first]])
            self.send(*self.make(first))  # load the kernel now, because loading waits for the device

    def _staging(self, nbytes: int) -> Staging:
        with self._backend.activated():
            return Staging(self._backend.xp, nbytes)

    def _reserve(self, samples: int, labels: Array) -> None:
        """Allocate memory for indices and labels of an epoch. labels: only their shape and dtype are used."""
        self.memory, self.label_shape = object(), labels.shape[1:]
        self.order = self._backend.allocate((1 + samples,), np.int64)
        self._labels = self._backend.allocate((samples, *self.label_shape), labels.dtype)
        with self._backend.activated():
            self.order[...] = self._labels[...] = 0  # this worker may have fewer samples, and the rest is never sent
        self._numbers_sent = self._staging(max(self.order.nbytes, self._labels.nbytes))

    def begin(self, rows: Sequence[Array], labels: Iterable[Array]) -> None:
        taken_and_order, samples = np.concatenate([np.zeros(1, np.int64), *rows]), len(self._data.labels)
        order = taken_and_order[1:]
        if order.size and not -1 < order.min() <= order.max() < samples:  # the kernel does not check bounds
            raise IndexError(f"samples {order.min()} to {order.max()} are out of bounds for {samples} images")
        epoch_labels = np.concatenate([*labels] or [self._data.labels[:0]])
        reshaped = epoch_labels.shape[1:] != self._labels.shape[1:]  # for example, with mixup
        if reshaped or len(order) > len(self._labels):  # samples may be repeated
            self._numbers_sent.close()
            self._reserve(max(len(order), samples), epoch_labels)
        with self._backend.activated():
            self._numbers_sent.send(self.order[: 1 + len(order)], taken_and_order)
            self._numbers_sent.send(self._labels[: len(order)], epoch_labels)
        self._at = self._taken = 0  # samples assigned by the host, and taken on the device (`order[0]`)

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        if self._data.images is None or self._resident is not None:
            return None, rows
        images = self._data.images[rows]
        return (images if edit is None else edit(images)), rows

    def send(self, images: Array | None, rows: Array) -> tuple[Array | None, Array]:
        part, count = self.assign(len(rows)), len(rows)
        if self._resident is not None:
            return self.gather(part)
        if self._batch is None:
            return None, self._labels[part]
        batch, pixels = self._first(count), self._pixels[:count]
        with self._backend.activated():
            self._pixels_sent.send(pixels, images)
        self._backend._gather(pixels, None, batch, self._tables)
        return batch, self._labels[part]

    def _first(self, count: int) -> Array:
        if count > len(self._batch):
            raise ConfigError(f"a batch of {count} images exceeds batch_size={len(self._batch)}")
        return self._batch if count == len(self._batch) else self._batch[:count]

    # images on the device -------------------------------------------------------------------------------------------

    def assign(self, count: int) -> slice:
        """Advance to the next batch, and return its slice of the epoch."""
        self._at += count
        return slice(self._at - count, self._at)

    def gather(self, part: slice) -> tuple[Array, Array]:
        """Gather a part of the epoch: images (N, H, W, C) and labels (N, ...)."""
        assert self._resident is not None
        batch = self._first(part.stop - part.start)
        self._backend._gather(self._resident.images, self.order[1:][part], batch, self._tables)
        return batch, self._labels[part]

    def seek(self, part: slice) -> None:
        """Make the next `take` read this part of the epoch, even if other batches were gathered in between."""
        if self._taken != part.start:
            with self._backend.activated():
                self._numbers_sent.send(self.order[:1], [part.start])
        self._taken = part.stop

    def take(self, images: Array, labels: Array, samples: Array | None) -> None:
        """Gather the epoch's next batch into these arrays. `Recorder.judge` then counts it. samples: may be None."""
        assert self._resident is not None
        count, size, channels = len(images), math.prod(images.shape[1:]), len(self._tables[0])
        if labels.ndim == 1:
            (sources, targets), columns = ((self._labels, None), (labels, None)), 0
        else:
            (sources, targets), columns = ((None, self._labels), (None, labels)), labels.shape[1]
        vectors = self._resident.images, self.order, *sources, *self._tables, images, *targets, samples
        name = f"next_batch_{self._backend._kind}"
        self._backend.kernels.images(name, count, size, *vectors, count, size, channels, columns)

    def close(self) -> None:
        self._numbers_sent.close()
        if self._pixels is not None:
            self._pixels_sent.close()
        del self._tables, self._data  # `GraphReplica` may keep this object until the next fit
        if self._batch is not None:
            self._backend.batches.leave(self._batch)
        self.order = self._labels = self._batch = self._pixels = None
        if self._resident is not None:
            self._resident.leave(self._backend)
            self._resident = None
