"""Settings and values that no longer exist, and what to write instead.

A command line that names one is refused. A stored run that holds one is refused too, unless it is the value that
every run of its time stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cupynet.core.checks import one_line, written
from cupynet.core.errors import ConfigError

_NONE = object()


@dataclass(frozen=True)
class Removed:
    """A setting, or one of its values, that was removed.

    Attributes:
        use: what to do instead, as the end of a sentence.
        default: the setting's former default, which stored runs hold; they are read as if it were not there.
    """

    use: str
    default: Any = _NONE


# "key" or "key=value" -> its replacement
_ROLLBACK = "callbacks.nonfinite.action=skip leaves such batches out, or lower learning_rate and resume"
_STAGES = "cupynet plan forecasts averaging alone: see how fast a pipeline is by training with parallel=pipeline"
REMOVED: dict[str, Removed] = {
    "modes": Removed("cupynet plan forecasts averaging alone: choose frequencies"),
    "stages": Removed(_STAGES),
    "micro_batches": Removed(_STAGES),
    "all_reduce": Removed("cupynet plan forecasts what parallel.launcher=mpi does: leave it out"),
    "link=measured": Removed("give its figures, link={bandwidth_gbit_s:10,latency_us:25}"),
    "callbacks.nonfinite.action=rollback": Removed(_ROLLBACK),
    "callbacks.nonfinite.every_iterations": Removed(_ROLLBACK, default=100),
    "callbacks.report.niceness": Removed("the page is written when the run ends", default=19),
    "callbacks.report.wait_s": Removed("the page is written when the run ends", default=10.0),
    "jobs": Removed("trials train one after the other, each on all workers", default=1),
    "workers_memory": Removed("make records ARGS=memory measures the memory of 1 to 32 workers", default=False),
    "data.storage": Removed("data=shards data.folder=FOLDER trains on shards", default="shared"),
    "data.shards": Removed("data=shards data.folder=FOLDER trains on shards", default=None),
    "hydra.output_subdir": Removed("settings are stored in .hydra of the run's folder, which hydra.run.dir names"),
}


def refuse_removed(overrides: Iterable[str]) -> None:
    """Refuse overrides that name a removed setting or value. ConfigError."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        found = REMOVED.get(key) or REMOVED.get(f"{key}={value}")
        if found is not None:
            raise ConfigError(f"{one_line(override)}: was removed; {found.use}")


def without_removed(settings: Mapping[Any, Any], above: str = "") -> dict[Any, Any]:
    """Drop removed settings from stored ones if they hold the former default; refuse others. ConfigError."""
    kept = {}
    for name, value in settings.items():
        key = f"{above}{name}"
        removed = REMOVED.get(key)
        if removed is None and not isinstance(value, Mapping):
            removed = REMOVED.get(f"{key}={written(value)}")
        if removed is None:
            kept[name] = without_removed(value, f"{key}.") if isinstance(value, Mapping) else value
        elif value != removed.default:
            raise ConfigError(f"{key}={written(value)}: was removed; {removed.use}")
    return kept
