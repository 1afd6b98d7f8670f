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
from cupynet.core.checks import number
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown

Edit: TypeAlias = Callable[[Array], Array]  # augmentation: (N, H, W, C) uint8 -> the same number of images


@dataclass(frozen=True)
class PixelScale:
    """Pixel normalization: (pixel / 255 - mean[c]) / std[c] for pixels from 0 to 255 in channel c.

    By default, pixels are scaled to 0..1. A single number applies to all channels.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name, least in (("mean", -1e6), ("std", 1e-6)):
            values = getattr(self, name)
            numbers = tuple(number(f"PixelScale {name}", each, minimum=least, below=1e6) for each in values)
            object.__setattr__(self, name, numbers)
        if not self.mean or len(self.mean) != len(self.std):
            raise ConfigError("must have as many numbers as mean, at least one", "PixelScale std", shown(self.std))

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float]) -> PixelScale:
        """Create the scaling from each channel's mean and std, for pixels scaled to 0..1."""
        return cls(tuple(mean), tuple(std))

    @cached_property
    def scale(self) -> tuple[float, ...]:
        return tuple(1 / 255 / std for std in self.std)

    @cached_property
    def shift(self) -> tuple[float, ...]:
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))

    @property
    def range(self) -> tuple[float, float]:
        """Minimum and maximum of scaled pixels over all channels."""
        return min(self.shift), max(255 * scale + shift for scale, shift in zip(self.scale, self.shift, strict=True))

    def normalization(self) -> dict[str, list[float]] | None:
        """Return mean and std by name, or None for the default scaling."""
        return None if self == FRACTIONS else {"mean": list(self.mean), "std": list(self.std)}


FRACTIONS = PixelScale()


class HostData(NamedTuple):
    """A data set on the host.

    Attributes:
        images: (S, H, W, C) uint8, or float32 if already scaled; None for batches without images.
        labels: (S,) integers, or (S, ...) float32.
        pixels: normalization of uint8 images.
        edited: True if images are augmented (see `Transfer.make`).
    """

    images: Array | None
    labels: Array
    pixels: PixelScale = FRACTIONS
    edited: bool = False


class Shared:
    """Data shared by the workers of a process. The first worker to need an entry creates it while holding the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self.streams: dict[int, Any] = {}


class BatchOps(Device):
    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        """Load and scale a batch: images (S, H, W, C) uint8, and samples (N,) -> (N, H, W, C). Floats are not scaled.

        The result is not borrowed, because a prefetch thread calls this method.
        """
        batch, wide = self.asarray(images[samples]), self.policy.accumulate
        if batch.dtype != np.uint8:
            return batch.astype(self.policy.storage)
        x = batch * self.asarray(np.array(pixels.scale, wide))
        if any(pixels.shift):
            x += self.asarray(np.array(pixels.shift, wide))
        return x.astype(self.policy.storage)

    def transfer(self, data: HostData, batch_size: int, on_device: bool | str, shared: Shared) -> Transfer:
        """Create a `Transfer` to this device. Called in the worker's thread.

        on_device: True to keep the images on the device, or raise ConfigError; `auto` to keep them there if they fit.
        """
        return Transfer(self, data)


class Transfer:
    """Transfers one worker's batches to a device. This base class uses new memory for every batch.

    The worker's thread calls `begin`, `send` and `close`. The prefetch thread calls `make`.

    Attributes:
        ahead: True if it is useful to call `make` ahead of the worker.
        steady: True if `send` copies every batch to the same memory. The worker must then call `send`.
        queues: True if captured steps can take batches from the device (see `CudaTransfer.take`).
    """

    ahead, steady, queues = True, False, False

    def __init__(self, device: BatchOps, data: HostData) -> None:
        self._device, self._data = device, data

    def begin(self, rows: Sequence[Array], labels: Iterable[Array]) -> None:
        """Start an epoch of batches with these rows and labels. Remaining batches of the previous epoch are dropped."""
        self._of_batches = iter(labels)

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        """Return the next batch of the epoch: images (N, H, W, C) in storage precision or None, and labels (N, ...).

        A `steady` transfer leaves work on the device to `send`. edit: augmentation of uint8 images, before scaling.
        """
        images, pixels = self._data.images, self._data.pixels
        if images is not None and edit is not None:
            images = self._device.load_images(edit(images[rows]), np.arange(len(rows)), pixels)
        elif images is not None:
            images = self._device.load_images(images, rows, pixels)
        return images, self._device.asarray(next(self._of_batches))

    def send(self, images: Any, labels: Any) -> tuple[Array | None, Array]:
        """Move the result of `make` to the device. If `steady`, the previous batch is overwritten."""
        return images, labels

    def close(self) -> None:
        """Release memory."""
