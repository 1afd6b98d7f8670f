"""Copies of rows of a data set to a device, as batches.

`Transfer` makes each batch in new memory; cuda/transfer.py has the subclass for GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.pixels import FRACTIONS, PixelScale

if TYPE_CHECKING:
    from cupynet.backend.device import Device

Edit: TypeAlias = Callable[[Array], Array]  # (N, H, W, C) uint8 -> the same number of images, augmented


class HostData(NamedTuple):
    """A data set on the host, whose rows become batches.

    Attributes:
        images: (S, H, W, C) uint8; None for batches without images.
        labels: (S,) integers.
        pixels: how pixels are scaled.
        edited: True if images are augmented before they are scaled, see `Transfer.make`.
    """

    images: Array | None
    labels: Array
    pixels: PixelScale = FRACTIONS
    edited: bool = False


class Shared:
    """Data shared by the workers of one process. The first worker to need an entry creates it.

    Attributes:
        lock: held while entries are looked up, created or removed.
        kept: the entries, as long as a worker uses them; backends choose the keys.
        streams: by device, the stream of its entries.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self.streams: dict[int, Any] = {}


class Transfer:
    """Copies rows of a data set to a device as batches, for one worker; each batch in memory of its own.

    The worker's thread calls `begin`, `send` and `close`. The prefetch thread calls `make`.

    Args:
        device: where the batches go.

    Attributes:
        ahead: True if `make` does work that the prefetch thread can do ahead of the worker.
        steady: True if `send` copies every batch to the same memory; the worker must then call it.
    """

    ahead, steady = True, False

    def __init__(self, device: Device, data: HostData) -> None:
        self._device, self._data = device, data

    def begin(self, rows: Sequence[Array]) -> None:
        """Begin an epoch whose batches have these rows; drop the remaining batches of the epoch before."""

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        """Make the epoch's next batch: images (N, H, W, C) in the storage dtype, or None, and labels (N,) int64.

        If the transfer is `steady`, do only the work on the host; `send` does the rest.

        edit: applied to the images, (N, H, W, C) uint8 on the host, before they are scaled.
        """
        images, pixels = self._data.images, self._data.pixels
        if images is not None and edit is not None:
            images = self._device.load_images(edit(images[rows]), np.arange(len(rows)), pixels)
        elif images is not None:
            images = self._device.load_images(images, rows, pixels)
        return images, self._device.asarray(self._data.labels[rows], dtype=np.int64)

    def send(self, images: Any, labels: Any) -> tuple[Array | None, Array]:
        """Return the result of `make` on the device. If `steady`, this overwrites the previous batch."""
        return images, labels

    def close(self) -> None:
        """Release the memory."""
