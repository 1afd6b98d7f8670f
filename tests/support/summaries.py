"""A summary of a run, as `Run.save` writes it."""

from typing import Any

from cupynet.runs.run import Summary
from tests.support import compared_runs

FIGURES: dict[str, Any] = {**compared_runs.FIGURES, "workers": 2, "iterations": 30, "averaging_frequency": "epoch"}
SUMMARY = Summary.of(FIGURES)


def changed(**figures: Any) -> Summary:
    return Summary.of({**FIGURES, **figures})
