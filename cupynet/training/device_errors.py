"""Errors of a worker's device, translated to one that says what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from cupynet.backend import Backend
from cupynet.core.checks import listed
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
    device, ranks = placement.device(rank), range(placement.ranks)
    if placement.seats:
        alike = [each for each in ranks if each == rank]  # other processes are unknown here
    else:
        alike = [each for each in ranks if placement.device(each) == device]
    there = f"{len(alike)} worker{'s' * (len(alike) > 1)} there"
    asked = there if batch_size is None else f"batch_size={batch_size}, {there}"
    ways = ["lower batch_size", "fewer workers on a device"] if len(alike) > 1 else ["lower batch_size"]
    if backend.policy.name in ("float", "double"):
        ways.append(f"train with dtype={'half' if backend.policy.name == 'float' else 'float'}")
    if limited_by:
        ways.append(f"raise {limited_by}")
    return f"; {asked}: {listed(ways)}"


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
