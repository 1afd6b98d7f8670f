"""Which way batches come to a GPU."""

from __future__ import annotations

from typing import Any

from cupynet.backend.cuda.resident import ResidentFeed, resident
from cupynet.backend.cuda.ring import RingFeed
from cupynet.backend.cuda.staging import Gpu
from cupynet.backend.feed import Feed, Shared
from cupynet.backend.pixels import PixelScale
from cupynet.errors import ConfigError


def feed(
    backend: Gpu,
    images: Any,
    labels: Any,
    batch_size: int,
    ahead: int,
    on_device: bool | str,
    shared: Shared,
    pixels: PixelScale,
    edited: bool,
) -> Feed:
    """See `Backend.feed`. Images that are edited on the host come over the ring.

    ConfigError: the images are to stay on the device, and do not fit, or are edited.
    """
    if images is None:
        return ResidentFeed(backend, None, labels, batch_size, shared)
    if edited and on_device is True:
        raise ConfigError("data_on_device=true: images are augmented on the host: take auto, or no augmentation")
    there = resident(backend, images, on_device, shared) if on_device and not edited else None
    if there is not None:
        try:
            return ResidentFeed(backend, there, labels, batch_size, shared, pixels)
        except BaseException:
            there.leave(backend, shared)
            raise
    return RingFeed(backend, images, labels, batch_size, ahead, pixels)
