"""How rows of a data set become batches on a backend.

A `Transfer` serves one worker and one data set. `Transfer` itself makes each batch anew; cuda/resident.py and
cuda/ring.py hold those of GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.core import checks
from cupynet.core.errors import ConfigError

Edit: TypeAlias = Callable[[Array], Array]  # (N, H, W, C) uint8 -> the same number of images, augmented


class TransferTarget(Protocol):
    """The methods of a backend that a transfer calls."""

    def load_images(self, images: Array, samples: Array, pixels: PixelScale, /) -> Array:
        """`images` (S, H, W, C) uint8 at `samples` (N,) as (N, H, W, C) in the storage dtype, scaled."""

    def asarray(self, a: Array, dtype: Any = None) -> Array:
        """`a` as an array of the backend."""


class Shared:
    """Data that the workers of one process share: the first worker that needs something creates it.

    Attributes:
        lock: held while entries are looked up, created or removed.
        kept: the entries, by keys that the backend chooses.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: dict[Any, Any] = {}


class Transfer:
    """Copies rows of a data set to a device as batches, epoch after epoch; each batch in memory of its own.

    The worker's own thread calls `begin`, `take` and `close`; the thread that prefetches calls `make`.

    Args:
        device: where the batches go.
        images: (S, H, W, C) uint8 on the host; None for batches without images.
        labels: (S,) integers on the host.
        pixels: how pixels are scaled.

    Attributes:
        ahead: whether another thread makes batches ahead; if not, the worker makes each when it takes it.
        steady: whether the images of all batches share one address.
    """

    ahead, steady = True, False

    def __init__(
        self, device: TransferTarget, images: Array | None, labels: Array, pixels: PixelScale = FRACTIONS
    ) -> None:
        self._device, self._images, self._labels, self._pixel_scale = device, images, labels, pixels

    def begin(self, rows: Sequence[Array]) -> None:
        """Begin an epoch whose batches have these rows; drop batches of the one before that were not taken."""

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        """Images (N, H, W, C) in the storage dtype, or None, and labels (N,) int64 of the epoch's next batch.

        edit: applied to the images, (N, H, W, C) uint8 on the host, before they are scaled.
        """
        images = self._images
        if images is not None and edit is not None:
            images = self._device.load_images(edit(images[rows]), np.arange(len(rows)), self._pixel_scale)
        elif images is not None:
            images = self._device.load_images(images, rows, self._pixel_scale)
        return images, self._device.asarray(self._labels[rows], dtype=np.int64)

    def take(self) -> None:
        """The worker takes the next batch that was made, and no longer uses the one before."""

    def close(self) -> None:
        """Release the memory."""


def check_on_device(on_device: bool | str, backend: str) -> bool | str:
    """Return `on_device` (`auto`, true or false) if this backend can keep data so; else raise ConfigError."""
    on_device = checks.on_device("data_on_device", on_device)
    if on_device is True and backend != "cupy":
        raise ConfigError(f"data_on_device=true: is for GPUs, and {backend} computes on the CPU: leave it out")
    return on_device
