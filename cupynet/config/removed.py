"""Translates settings that an earlier version stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Removed settings, with the defaults that stored runs have. Other values are refused when the part is built.
DEFAULTS: dict[str, Any] = {
    "callbacks.nonfinite.every_iterations": 100,
    "callbacks.report.niceness": 19,
    "callbacks.report.wait_s": 10.0,
    "data.storage": "shared",
    "data.shards": None,
}
# former name of a class -> its present name
MOVED = {
    "cupynet.training.ReportPage": "cupynet.reporting.ReportPage",
    **{f"cupynet.loggers.{name}": f"cupynet.training.{name}" for name in ("MLflow", "TensorBoard", "WandB")},
}
# class -> former names of its arguments -> present names
RENAMED = {
    name: {"frequency": "averaging_frequency"} for name in ("ElasticAveraging", "ParameterAveraging", "PostLocal")
}


def translated(settings: Mapping[Any, Any], above: str = "") -> dict[Any, Any]:
    """Return stored settings without the removed ones and with the present names of classes and arguments."""
    target = str(settings.get("_target_"))
    renamed = RENAMED.get(target.rpartition(".")[2], {}) if target.startswith("cupynet.") else {}
    found: dict[Any, Any] = {}
    for name, value in settings.items():
        key = f"{above}{name}"
        if key not in DEFAULTS or value != DEFAULTS[key]:
            found[renamed.get(name, name)] = translated(value, f"{key}.") if isinstance(value, Mapping) else value
    if target in MOVED:
        found["_target_"] = MOVED[target]
    return found
