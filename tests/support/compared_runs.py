"""Run folders like those that training writes, made without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupynet.runs.run import Summary

FIGURES = {
    "dataset": "mnist", "fallback": False, "backend": "numba", "devices": ["cpu"], "dtype": "float", "workers": 1,
    "seed": 123, "epochs": 2, "iterations": 100, "batch_size": 128, "averaging_frequency": 1,
    "synchronizer": "averaged in every iteration", "parameters": 431080, "stopped_by": None, "images": 1000,
    "images_per_s": 1000.0, "wall_s": 12.0, "train_s": 10.0, "compile_s": 1.0, "evaluate_s": 1.0, "data_s": 0.0,
    "averaging_s": 0.0, "validation_accuracy": None, "test_accuracy": 0.9, "test_loss": 0.3, "test_f1": 0.9,
    "test": {"samples": 10000}, "commit": "abc", "environment": {"cpu": "a cpu", "cores": 8, "system": "Linux"},
}  # fmt: skip
CONFIG = """\
workers: {workers}
seed: {seed}
epochs: 2
batch_size: 128
log_every: 50
optimizer:
  _target_: cupynet.optim.{optimizer}
  learning_rate: {rate}
parallel:
  averaging_frequency: {averaging_frequency}
  synchronizer:
    _target_: {synchronizer}
    frequency: {averaging_frequency}
"""
HYDRA = (
    "hydra:\n  runtime:\n    choices:\n      optimizer: {optimizer}\n      model: lenet\n      hydra/help: cupynet\n"
)


def made(
    folder: Path, *, optimizer: str = "sgd", rate: float = 0.1, extra: str = "", typed: Sequence[str] = (),
    synchronizer: str = "mine.Averaging", **figures: Any,
) -> Path:  # fmt: skip
    """Make the folder of a finished run with these figures in its summary; `accuracies`: one per epoch of five seconds.

    The synchronizer is by default a user-defined one, which may have an effect even with a single replica.
    """
    accuracies = figures.pop("accuracies", None)
    found = {**FIGURES, **figures}
    accuracies = accuracies or [found["test_accuracy"] - 0.1, found["test_accuracy"]]
    found["iterations"] = 50 * len(accuracies)
    (folder / ".hydra").mkdir(parents=True)
    words = {name: found[name] for name in ("workers", "seed", "averaging_frequency")}
    (folder / ".hydra" / "config.yaml").write_text(
        CONFIG.format(optimizer=optimizer, rate=rate, synchronizer=synchronizer, **words) + extra
    )
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([*typed]))
    (folder / ".hydra" / "hydra.yaml").write_text(HYDRA.format(optimizer=optimizer))
    (folder / "summary.json").write_text(json.dumps(found))
    rows = [{"kind": "report", "iteration": 50, "loss": 0.5}]
    rows += [
        {"kind": "epoch", "epoch": epoch, "iteration": 50 * epoch, "train_s": 5.0, "test_accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies, 1)
    ]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def summary(**figures: Any) -> Summary:
    """Return the summary of a run of two workers, as `Run.save` writes it."""
    return Summary.of({**FIGURES, "workers": 2, "iterations": 30, "averaging_frequency": "epoch", **figures})
