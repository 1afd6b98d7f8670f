"""Settings and values that no longer exist, and what to write instead.

A command line that names one is refused. A stored run that holds one is refused too, unless it is the value that
every run of its time stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cupynet.core.checks import one_line, written
from cupynet.core.errors import ConfigError

_ROLLBACK = "callbacks.nonfinite.action=skip leaves such batches out, or lower learning_rate and resume"
_STAGES = "cupynet plan forecasts averaging alone: see how fast a pipeline is by training with parallel=pipeline"
_SHARDS = "data=shards data.folder=FOLDER trains on shards"
# "key" or "key=value" -> what to do instead, as the end of a sentence
REMOVED = {
    "modes": "cupynet plan forecasts averaging alone: choose frequencies",
    "stages": _STAGES,
    "micro_batches": _STAGES,
    "all_reduce": "cupynet plan forecasts what parallel.launcher=mpi does: leave it out",
    "link=measured": "give its figures, link={bandwidth_gbit_s:10,latency_us:25}",
    "callbacks.nonfinite.action=rollback": _ROLLBACK,
    "callbacks.nonfinite.every_iterations": _ROLLBACK,
    "callbacks.report.niceness": "the page is written when the run ends",
    "callbacks.report.wait_s": "the page is written when the run ends",
    "jobs": "trials train one after the other, each on all workers",
    "workers_memory": "make records ARGS=memory measures the memory of 1 to 32 workers",
    "data.storage": _SHARDS,
    "data.shards": _SHARDS,
    "hydra.output_subdir": "settings are stored in .hydra of the run's folder, which hydra.run.dir names",
}
# former defaults, which stored runs hold: they are read as if they were not there
DEFAULTS: dict[str, Any] = {
    "callbacks.nonfinite.every_iterations": 100,
    "callbacks.report.niceness": 19,
    "callbacks.report.wait_s": 10.0,
    "data.storage": "shared",
    "data.shards": None,
}


def refuse_removed(overrides: Iterable[str]) -> None:
    """Refuse overrides that name a removed setting or value. ConfigError."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        use = REMOVED.get(key) or REMOVED.get(f"{key}={value}")
        if use is not None:
            raise ConfigError(f"{one_line(override)}: was removed; {use}")


def without_removed(settings: Mapping[Any, Any], above: str = "") -> dict[Any, Any]:
    """Drop removed settings from stored ones if they hold the former default; refuse others. ConfigError."""
    kept = {}
    for name, value in settings.items():
        key = f"{above}{name}"
        if key in DEFAULTS and value == DEFAULTS[key]:
            continue
        refuse_removed([f"{key}={written(value)}"])
        kept[name] = without_removed(value, f"{key}.") if isinstance(value, Mapping) else value
    return kept
