"""How the rows of a data set become batches on a backend.

A `Feed` is of one worker and one data set. Here is the one that makes each batch anew, as on a CPU; those of
GPUs are in cuda/feeds.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from cupynet import checks
from cupynet.backend.array import Array
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.errors import ConfigError

Edit: TypeAlias = Callable[[Array], Array]  # (N, H, W, C) uint8 -> as many, changed


class Device(Protocol):
    """What a feed needs of a backend."""

    def load_images(self, images: Array, samples: Array, pixels: PixelScale, /) -> Array:
        """`images` (S, H, W, C) uint8 at `samples` (N,) as (N, H, W, C) in the storage dtype, scaled."""

    def asarray(self, a: Array, dtype: Any = None) -> Array:
        """`a` as an array of the backend."""


class Shared:
    """What the workers of one process have in common of their data: the first that needs something makes it.

    Attributes:
        lock: is held by whoever looks, makes or gives up.
        kept: what there is, by names of the backend's own.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: dict[Any, Any] = {}


class Feed:
    """Turns rows of a data set into batches, one epoch after the other; each is made anew, and stays.

    `begin`, `take` and `close` are called in the worker's own thread, `make` in that of whoever makes batches ahead.

    Args:
        device: where batches are to be.
        images: (S, H, W, C) uint8 on the host; None where batches come without.
        labels: (S,) integers on the host.
        pixels: what becomes of them.

    Attributes:
        ahead: whether batches are made ahead by another thread; else the worker makes each when it takes it.
        steady: whether the images of each batch lie where those of the one before did.
    """

    ahead, steady = True, False

    def __init__(self, device: Device, images: Array | None, labels: Array, pixels: PixelScale = FRACTIONS) -> None:
        self._device, self._images, self._labels, self._pixel_scale = device, images, labels, pixels

    def begin(self, rows: Sequence[Array]) -> None:
        """An epoch begins, whose batches have these rows; what is left of the one before is not wanted any more."""

    def make(self, rows: Array, edit: Edit | None = None) -> tuple[Array | None, Array]:
        """Images (N, H, W, C) in the storage dtype, or None, and labels (N,) int64 of the epoch's next batch.

        edit: what the images, (N, H, W, C) uint8 on the host, go through before they are scaled.
        """
        images = self._images
        if images is not None and edit is not None:
            images = self._device.load_images(edit(images[rows]), np.arange(len(rows)), self._pixel_scale)
        elif images is not None:
            images = self._device.load_images(images, rows, self._pixel_scale)
        return images, self._device.asarray(self._labels[rows], dtype=np.int64)

    def take(self) -> None:
        """The worker has the next of the batches that were made, and is done with the one before."""

    def close(self) -> None:
        """Let go of what it holds."""


def check_on_device(on_device: bool | str, backend: str) -> bool | str:
    """`on_device`, if that backend can keep data so: `auto`, true or false. ConfigError."""
    on_device = checks.on_device("data_on_device", on_device)
    if on_device is True and backend != "cupy":
        raise ConfigError(f"data_on_device=true: is for GPUs, and {backend} computes on the CPU: leave it out")
    return on_device
