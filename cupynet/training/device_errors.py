from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from cupynet.backend import Backend
from cupynet.core.errors import CupynetError, DeviceError, annotate, causes
from cupynet.parallel import Placement


@contextmanager
def translate_device_errors(
    backend: Backend, placement: Placement, rank: int, batch_size: int | None
) -> Iterator[None]:
    """Convert errors from a device that failed or is out of memory to DeviceError. Clear frames to free memory."""
    try:
        yield
    except CupynetError:
        raise
    except Exception as error:
        failure = backend.failure(error, placement.device(rank))
        if failure is None:
            raise
        notes = getattr(error, "__notes__", None) or [f"worker {rank}"]
        for each in causes(error):
            traceback.clear_frames(each.__traceback__)
        remedy = _remedy(placement, rank, batch_size) if failure.of_memory else ""
        translated = DeviceError(failure.text + remedy)
        for note in notes:
            annotate(translated, note)
        raise translated from None


def _remedy(placement: Placement, rank: int, batch_size: int | None) -> str:
    device = placement.device(rank)
    # the devices of other processes are unknown here
    workers = 1 if placement.seats else sum(placement.device(each) == device for each in range(placement.ranks))
    size = "" if batch_size is None else f"batch_size={batch_size}, "
    return f" ({size}workers on this device: {workers}). Lower batch_size or workers, or use a smaller dtype"
