"""Releases the resources of a `ParallelWrapper`."""

from __future__ import annotations

import logging
from contextlib import ExitStack, suppress

from cupynet.backend import Backend
from cupynet.parallel.launchers.base import Launcher
from cupynet.training.trainer import Trainer

log = logging.getLogger(__name__)


def close(launcher: Launcher, trainers: list[Trainer | None], backend: Backend) -> None:
    """Close the launcher, and then the callbacks in reverse order, even if one of them fails."""
    with ExitStack() as closing:
        for trainer in trainers:
            if trainer is not None:
                closing.callback(trainer.callbacks.close)
        closing.callback(backend.deactivate)  # a single worker runs in the calling thread
        closing.callback(_wait, trainers)
        closing.callback(launcher.close)  # runs first


def _wait(trainers: list[Trainer | None]) -> None:
    """Wait for steps that a failed task left on the devices, because they use memory that may be freed now."""
    for trainer in filter(None, trainers):
        # suppressed: the device has failed, which was reported
        with suppress(Exception), trainer.backend.activated():  # the caller's own stream may be in a capture
            trainer.backend.synchronize()


def close_or_warn(launcher: Launcher, trainers: list[Trainer | None], backend: Backend) -> None:
    """Close a wrapper that was garbage collected or is still open when Python exits. Log errors."""
    try:
        launcher.check_idle()
        close(launcher, trainers, backend)
    except Exception as error:
        log.warning("closing failed: %s: %s", type(error).__name__, error)
