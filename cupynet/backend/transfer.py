"""Copies of rows of a data set to a device, as batches, and the scaling of their pixels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.device import Device

Edit: TypeAlias = Callable[[Array], Array]  # (N, H, W, C) uint8 -> the same number of images, augmented


@dataclass(frozen=True)
class PixelScale:
    """(pixel / 255 - mean[c]) / std[c] of a pixel from 0 to 255 in channel c; one number applies to all channels.

    Computed as pixel · scale[c] + shift[c]. By default pixels become fractions from 0 to 1.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> PixelScale:
        """Return the scaling that gives pixels with this mean and std (fractions, by channel) mean 0 and std 1."""
        return cls(tuple(map(float, mean)), tuple(map(float, std)))

    @cached_property
    def scale(self) -> tuple[float, ...]:
        return tuple(1 / 255 / std for std in self.std)

    @cached_property
    def shift(self) -> tuple[float, ...]:
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value of a scaled pixel, over all channels."""
        return min(self.shift), max(255 * scale + shift for scale, shift in zip(self.scale, self.shift, strict=True))

    def normalization(self) -> dict[str, list[float]] | None:
        """Mean and std by name; None for fractions."""
        return None if self == FRACTIONS else {"mean": list(self.mean), "std": list(self.std)}


FRACTIONS = PixelScale()


class HostData(NamedTuple):
    """A data set on the host, whose rows become batches.

    Attributes:
        images: (S, H, W, C) uint8, or float32 that is already scaled; None for batches without images.
        labels: (S,) integers, or (S, ...) float32.
        edited: True if images are augmented before they are scaled, see `Transfer.make`.
    """

    images: Array | None
    labels: Array
    pixels: PixelScale = FRACTIONS
    edited: bool = False


class Shared:
    """Data shared by the workers of one process. The first worker to need an entry creates it, holding the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self.streams: dict[int, Any] = {}


class BatchOps(Device):
    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        """Return scaled images of a batch: (S, H, W, C) uint8 (floats are not scaled), (N,) indices -> (N, H, W, C).

        Not borrowed from the workspace, because a prefetch thread calls this.
        """
        batch, wide = self.asarray(images[samples]), self.policy.accumulate
        if batch.dtype != np.uint8:
            return batch.astype(self.policy.storage)
        x = batch * self.asarray(np.array(pixels.scale, wide))
        if any(pixels.shift):
            x += self.asarray(np.array(pixels.shift, wide))
        return x.astype(self.policy.storage)

    def transfer(self, data: HostData, batch_size: int, on_device: bool | str, shared: Shared) -> Transfer:
        """Return an object that makes batches of a data set on this device. Called in the worker's thread.

        Args:
            on_device: True to keep the images on the device (ConfigError if impossible); `auto` to keep them if they
                fit.
        """
        return Transfer(self, data)


class Transfer:
    """Copies rows of a data set to a device as batches, for one worker; each batch in new memory.

    The worker's thread calls `begin`, `send` and `close`. The prefetch thread calls `make`.

    Attributes:
        ahead: True if `make` does work that the prefetch thread can do ahead of the worker.
        steady: True if `send` copies every batch to the same memory; the worker must then call it.
    """

    ahead, steady = True, False

    def __init__(self, device: BatchOps, data: HostData) -> None:
        self._device, self._data = device, data

    def begin(self, rows: Sequence[Array], labels: Iterable[Array]) -> None:
        """Start an epoch whose batches have these rows and labels; drop remaining batches of the previous one."""
        self._of_batches = iter(labels)

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        """Make the epoch's next batch: images (N, H, W, C) in the storage dtype, or None, and labels (N, ...).

        `edit` is applied to the images, uint8 on the host, before they are scaled. A `steady` transfer only does the
        work on the host; `send` does the rest.
        """
        images, pixels = self._data.images, self._data.pixels
        if images is not None and edit is not None:
            images = self._device.load_images(edit(images[rows]), np.arange(len(rows)), pixels)
        elif images is not None:
            images = self._device.load_images(images, rows, pixels)
        return images, self._device.asarray(next(self._of_batches))

    def send(self, images: Any, labels: Any) -> tuple[Array | None, Array]:
        """Return the result of `make` on the device. If `steady`, this overwrites the previous batch."""
        return images, labels

    def close(self) -> None:
        """Release the memory."""
