"""Translate settings stored by earlier versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Removed settings and their defaults, and a removed value. Other values are rejected when the object is built.
DEFAULTS: dict[str, Any] = {
    "callbacks.report.niceness": 19,
    "callbacks.report.wait_s": 10.0,
    "fast_dev_run": False,  # other values mark a smoke test
    "data.storage": "shared",
    "data.shards": None,
    "data.timeout_s": math.inf,
}
REMOVED_CALLBACKS = ("cupynet.training.NonFinite",)
# removed; ignored at any value
IGNORED = {
    "callbacks.early_stopping.restore_on_interrupt",
    "callbacks.early_stopping.restore_when_stopped",
    "callbacks.weight_average.on_interrupt",
    "callbacks.weight_average.when_stopped",
    "data.sha256",
}
# moved classes
MOVED = {
    "cupynet.training.ReportPage": "cupynet.reporting.ReportPage",
    **{f"cupynet.loggers.{name}": f"cupynet.training.{name}" for name in ("MLflow", "TensorBoard", "WandB")},
    **{f"cupynet.parallel.synchronizers.outer.{name}": f"cupynet.parallel.{name}" for name in ("DiLoCo", "SlowMo")},
}
# renamed classes, by name without the module
CLASSES = {
    **{"CutOut": "Cutout", "Filled": "Constant", "Folder": "ImageFolder", "Idx": "IdxFiles", "Npz": "NpzFile"},
    **{"Sharded": "ShardedFiles", "Map": "PiecewiseConstant", "Step": "StepDecay", "Exponential": "ExponentialDecay"},
    **{"Inverse": "InverseTimeDecay", "Sigmoid": "SigmoidDecay", "History": "HistoryWriter"},
}
# renamed settings that are not arguments of classes
KEYS = {
    "accumulate": "accumulation_steps",
    "report_every_iterations": "log_every",
    "data.normalize.deviation": "data.normalize.std",
}
WINDOW = {"kernel": "kernel_size"}
AVERAGING = {"frequency": "averaging_frequency", "wire": "transfer_dtype", "outer": "outer_optimizer"}
# renamed arguments by class
ARGUMENTS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("Conv2D", "MaxPool2D", "AvgPool2D"), WINDOW),
    **{name: {"deviation": "std"} for name in ("Normal", "TruncatedNormal")},
    **dict.fromkeys(("ElasticAveraging", "GradientSharing", "ParameterAveraging", "PostLocal"), AVERAGING),
    "Adaptive": {"first": "initial_period", "most": "max_period"},
    "AdaptiveThreshold": {"fewest": "min_fraction", "most": "max_fraction"},
    "EarlyStopping": {
        "direction": "mode",
        "min_improvement": "min_delta",
        "restore_best": "restore_best_weights",
    },
    "Profile": {"rounds": "iterations"},
    "ReduceOnPlateau": {"min_improvement": "min_delta"},
    "WeightAverage": {"by": "unit", "every": "interval", "after": "start_after"},
}
# renamed values by former argument
VALUES: dict[str, dict[Any, Any]] = {"wire": {"exact": "full"}, "outer": {"mean": None}}


def translated(settings: Mapping[Any, Any], above: str = "") -> dict[Any, Any]:
    """Return stored settings with current names and values. Drop removed ones if ignored or at their default."""
    target = str(settings.get("_target_"))
    package, _, name = target.rpartition(".")
    ours = target.startswith("cupynet.")
    name = CLASSES.get(name, name) if ours else name
    arguments = ARGUMENTS.get(name, {}) if ours else {}
    found: dict[Any, Any] = {}
    for former, value in settings.items():
        key = f"{above}{former}"
        if key in IGNORED or (key in DEFAULTS and value == DEFAULTS[key]):
            continue
        if isinstance(value, Mapping) and value.get("_target_") in REMOVED_CALLBACKS:
            continue
        if former == "slope" and value is not None and ours and settings.get("name") != "leaky_relu":
            continue  # earlier versions ignored it
        present = arguments.get(former, KEYS[key].rpartition(".")[2] if key in KEYS else former)
        if isinstance(value, Mapping | list | tuple):
            found[present] = _inside(value, f"{key}.")
        else:
            found[present] = VALUES[former].get(value, value) if present != former and former in VALUES else value
    if ours:
        found["_target_"] = MOVED.get(target, f"{package}.{name}")
    return found


def _inside(value: Any, above: str) -> Any:
    if isinstance(value, Mapping):
        return translated(value, above)
    if isinstance(value, list | tuple):
        return [_inside(each, above) for each in value]
    return value
