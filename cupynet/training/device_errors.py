"""Errors of a worker's device, translated to one that says what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from cupynet.backend import Backend
from cupynet.core.errors import CupynetError, DeviceError, annotate
from cupynet.parallel import Placement


@contextmanager
def translate_device_errors(
    backend: Backend, placement: Placement, rank: int, batch_size: int | None
) -> Iterator[None]:
    """Raise DeviceError in place of an error of worker `rank`'s device: out of memory, or failed.

    Notes are kept. Arrays of the frames in between are released here, in the worker's own thread.

    Args:
        backend: of that kind.
        batch_size: None if there are no batches.
    """
    try:
        yield
    except CupynetError:
        raise
    except Exception as error:
        device = placement.device(rank)
        found = backend.failure(error, device)
        if found is None:
            raise
        notes = getattr(error, "__notes__", None) or [f"worker {rank}"]
        _let_go(error)
        text = found.text
        if found.of_memory:
            text += _way_out(backend, placement, rank, batch_size, found.limited_by)
        made = DeviceError(text)
        for note in notes:
            annotate(made, note)
        raise made from None


def _way_out(backend: Backend, placement: Placement, rank: int, batch_size: int | None, limited_by: str) -> str:
    """Return what needs the device's memory, and what to lower."""
    device = placement.device(rank)  # of other processes nothing is known here
    workers = 1 if placement.seats else sum(placement.device(each) == device for each in range(placement.ranks))
    size = "" if batch_size is None else f"batch_size={batch_size}, "
    more = f", or raise {limited_by}" if limited_by else ""
    return f"; {size}workers there: {workers}; lower batch_size, workers or dtype{more}"


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
