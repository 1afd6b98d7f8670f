"""A summary of a run, as `Run.save` writes it."""

from __future__ import annotations

from typing import Any

from cupynet.runs.run import Summary

FIGURES: dict[str, Any] = {
    "dataset": "mnist",
    "fallback": False,
    "backend": "numba",
    "devices": ["cpu"],
    "dtype": "float",
    "workers": 2,
    "seed": 1,
    "epochs": 3,
    "iterations": 30,
    "batch_size": 8,
    "averaging_frequency": "epoch",
    "synchronizer": "averaged after every epoch",
    "parameters": 10,
    "stopped_by": None,
    "images": 480,
    "images_per_s": 100.0,
    "wall_s": 6.0,
    "train_s": 4.8,
    "compile_s": 0.5,
    "evaluate_s": 0.5,
    "data_s": 0.1,
    "averaging_s": 0.2,
    "validation_accuracy": None,
    "test_accuracy": 0.99,
    "test_loss": 0.03,
    "test_f1": 0.99,
    "test": {"samples": 10},
    "commit": None,
    "environment": {"cores": 2},
}

SUMMARY = Summary.of(FIGURES)


def changed(**figures: Any) -> Summary:
    return Summary.of({**FIGURES, **figures})
