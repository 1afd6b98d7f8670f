"""Releases the resources of a `ParallelWrapper`."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress

from cupynet.backend import Backend
from cupynet.core.lock import Hold
from cupynet.parallel.launchers.base import Launcher
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)


def close(launcher: Launcher, trainers: list[Trainer | None], backend: Backend, holds: list[Hold]) -> None:
    """Close the launcher, then the callbacks in reverse order, and release locks, even if one of these fails."""
    with ExitStack() as closing:
        closing.callback(release, holds)
        for trainer in trainers:
            if trainer is not None:
                closing.callback(trainer.callbacks.close)
        closing.callback(backend.deactivate)  # a single worker runs in the calling thread
        closing.callback(_wait, trainers)
        closing.callback(launcher.close)  # runs first


def release(holds: list[Hold]) -> None:
    while holds:
        holds.pop().release()


def _wait(trainers: list[Trainer | None]) -> None:
    """Wait for steps that a failed task left on the devices, because they use memory that may be freed now."""
    for trainer in filter(None, trainers):
        # suppressed: the device has failed, which was reported
        with suppress(Exception), trainer.backend.activated():  # the caller's own stream may be in a capture
            trainer.backend.synchronize()


def close_or_warn(launcher: Launcher, trainers: list[Trainer | None], backend: Backend, holds: list[Hold]) -> None:
    """Close a wrapper that was garbage collected or is still open when Python exits. Log errors."""
    try:
        launcher.check_idle()
        close(launcher, trainers, backend, holds)
    except Exception as error:
        log.warning("closing failed: %s: %s", type(error).__name__, error)
