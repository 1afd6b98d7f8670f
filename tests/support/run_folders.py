"""Run folders for tests of their pages, made by hand in milliseconds."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.core.files import save_weights

HOSTILE = "<script>alert('x')</script>\"&'`</style><img src=x onerror=alert(1)>"


def history(epochs: int = 3, reports: int = 4) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        for report in range(reports):
            at = (epoch - 1) * 100 + (report + 1) * (100 // reports)
            loss = 2.0 * math.exp(-at / 100)
            rows.append(
                {"kind": "report", "iteration": at, "epoch": epoch - 1, "learning_rate": 0.1, "loss": loss}
                | {"score_after_averaging": loss * 0.9, "images_per_s": 3000.0 + at, "drift": 0.01}
                | {"drift_by_layer": {"conv1": 0.01, "output": 0.02}}
            )
        row: dict[str, Any] = {"kind": "epoch", "epoch": epoch, "iteration": 100 * epoch, "samples": 6400}
        row |= {"images_per_s": 3200.0, "train_s": 2.0, "averaging_s": [0.2, 0.2]}
        row |= {"compute_s": [1.4, 1.6], "data_s": [0.01, 0.01], "waiting_s": [0.0, 0.0], "loss": 0.5 / epoch}
        row |= {
            "losses": [0.4 / epoch, 0.6 / epoch],
            "accuracy": 1 - 0.4 / epoch,
            "test_accuracy": 1 - 0.2 / epoch,
            "test_loss": 0.6 / epoch,
        }
        rows.append(row | {"confusion": [[20 + epoch, 10, 1], [2, 29, 0], [0, 0, 38 - epoch]]})
    return rows


def summary(**changed: Any) -> dict[str, Any]:
    confusion = [[30, 1, 0], [2, 29, 0], [0, 0, 38]]
    per_class = [{"class": i, "precision": 0.9, "recall": 0.8, "f1": None, "support": 31} for i in range(3)]
    mistakes = [{"sample": 7, "label": 1, "guess": 0, "confidence": 0.98}]
    mistakes += [{"sample": 3, "label": 0, "guess": 1, "confidence": 0.71}, mistakes[0] | {"sample": 9}]
    test = {"samples": 100, "f1": 0.93, "confusion": confusion, "per_class": per_class, "mistakes": mistakes}
    found = {"dataset": "mnist", "fallback": False, "backend": "numpy", "devices": ["cpu", "cpu"], "dtype": "float"}
    found |= {"workers": 2, "seed": 123, "epochs": 3, "iterations": 300, "batch_size": 32, "parameters": 431080}
    found |= {"synchronizer": "averaged every 3 iterations", "stopped_by": None, "images_per_s": 3210.0}
    found |= {"wall_s": 75.0, "train_s": 60.0, "compile_s": 2.0, "evaluate_s": 3.0, "test_accuracy": 0.9333}
    found |= {"test_loss": 0.2, "test_f1": 0.93, "test": test, "commit": "0123456789abcdef-dirty", "stop_reason": None}
    found |= {"environment": {"cpu": "a processor", "cores": 2, "versions": {"numpy": "2.0"}}, "bytes_sent": 1_500_000}
    found |= {"spent": {"rounds_s": [6.0, 6.0], "compute_s": [4.5, 4.8], "averaging_s": [0.6, 0.3], "data_s": [0, 0]}}
    return found | {"advice": "nothing stands out", "class_names": ["cat", "dog", "owl"]} | changed


def start(**changed: Any) -> dict[str, Any]:
    layers = [{"layer": "input", "kind": "", "settings": "", "output": "Image(8, 8, 1)", "parameters": ""}]
    layers += [{"layer": "conv1", "kind": "Conv2D", "settings": "3x3", "output": "Image(6, 6, 4)", "parameters": "40"}]
    taken = ("dataset", "fallback", "backend", "devices", "dtype", "workers", "seed", "batch_size", "parameters")
    found = {name: summary()[name] for name in (*taken, "synchronizer", "commit", "environment", "class_names")}
    found |= {
        "started": "2026-05-01 12:30:00",
        "stages": 1,
        "epochs": 3,
        "config_dir": None,
        "layers": layers,
        "processes": None,
    }
    return found | {"overrides": ["workers=2", "data.name='two words'"]} | changed


def finished(folder: Path, *, name: str = "run", **changed: Any) -> Path:
    path = unfinished(folder, name=name, rows=history())
    (path / "summary.json").write_text(json.dumps(summary(**changed)))
    random = np.random.default_rng(5)
    weights = {"conv1.weight": random.normal(size=(3, 3, 1, 4)), "output.weight": random.normal(size=(4, 3))}
    save_weights(path / "weights.safetensors", weights)
    images = random.integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)
    save_weights(path / "examples.safetensors", {"images": images})
    return path


def unfinished(folder: Path, *, name: str = "run", rows: list[dict[str, Any]] | None = None, log: str = "") -> Path:
    path = folder / name
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra" / "config.yaml").write_text("workers: 2\nepochs: 3\n")
    (path / "started.json").write_text(json.dumps(start()))
    (path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or []))
    (path / "train.log").write_text(log)
    return path


def sweep_rows(sweep: Path) -> dict[str, dict[str, str]]:
    return {row["job"]: row for row in csv.DictReader((sweep / "sweep.csv").read_text().splitlines())}
