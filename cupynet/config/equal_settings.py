"""Settings that have no effect in a run, such as the averaging frequency of a single replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupynet.core.shared_options import SCALES

# settings without effect on results or speed: always, on a CPU, and with one replica
ALWAYS = (
    "backend.priority.gpu",
    "backend.priority.cpu",
    "data.timeout_s",
    "parallel.timeout_s",
    "resume",
    "trusted_modules",
)
ON_CPU = ("backend.max_block_size", "backend.max_grid_size", "backend.tf32", "devices", "memory.", "parallel.reduce")
ALONE = (
    "parallel.averaging_frequency",
    "parallel.average_updaters",
    "parallel.report_score_after_averaging",
    "parallel.synchronizer.",
)
SYNCHRONIZER = "parallel.synchronizer._target_"


def effective(settings: Mapping[str, Any], workers: int, backend: str) -> dict[str, Any]:
    """Return the settings that affect a run with this number of workers and backend."""
    idle = ALWAYS + (() if backend == "cupy" else ON_CPU)
    found = dict(settings) | {"workers": workers, "backend.name": backend}
    if is_alone(settings, workers):
        idle += ALONE
        if found.get("parallel.learning_rate_scale") in SCALES:  # the factor is 1 for one replica
            idle += ("parallel.learning_rate_scale",)
    return {key: value for key, value in found.items() if not key.startswith(idle)}


def is_alone(settings: Mapping[str, Any], workers: int) -> bool:
    """Return True if a run has a single replica and a synchronizer of this package, which then does nothing."""
    return workers == 1 and str(settings.get(SYNCHRONIZER, "")).startswith("cupynet.")
