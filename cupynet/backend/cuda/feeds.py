"""Which way batches come to a GPU."""

from __future__ import annotations

from typing import Any

from cupynet.backend.cuda.resident import ResidentFeed, resident
from cupynet.backend.cuda.ring import RingFeed
from cupynet.backend.cuda.staging import Gpu
from cupynet.backend.feed import Feed, Shared


def feed(
    backend: Gpu,
    images: Any,
    labels: Any,
    batch_size: int,
    ahead: int,
    on_device: bool | str,
    shared: Shared,
) -> Feed:
    """See `Backend.feed`. ConfigError: the images are to stay on the device, and do not fit."""
    if images is None:
        return ResidentFeed(backend, None, labels, batch_size, shared)
    there = resident(backend, images, on_device, shared) if on_device else None
    if there is not None:
        try:
            return ResidentFeed(backend, there, labels, batch_size, shared)
        except BaseException:
            there.leave(backend, shared)
            raise
    return RingFeed(backend, images, labels, batch_size, ahead)
