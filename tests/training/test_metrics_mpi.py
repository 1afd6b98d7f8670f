"""Metrics, targets and weights of samples: ranks under mpiexec give the figures of threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import Dense, EarlyStopping, Model, ParallelWrapper
from tests.support.mpi import needs_mpi, under_mpiexec

pytestmark = needs_mpi


def largest_error(scores: Any, targets: Any) -> Any:
    return abs(scores - targets).max(axis=1)


def figures(launcher: str) -> dict[str, Any]:
    """Train on binary and on real targets, and on classes; return the evaluations by epoch."""
    rng = np.random.default_rng(0)
    x, real = rng.normal(size=(45, 4, 3)), rng.normal(size=(45, 2))
    found: dict[str, Any] = {}
    for loss, y, metrics in (
        ("binary_cross_entropy", real > 0, ["auc", largest_error]),
        ("huber", real, [largest_error]),
        ("softmax", np.arange(45) % 2, ["auc", "macro_f1", "top_1_accuracy"]),
    ):
        model, stopping = Model([Dense(2)], (4, 3), "numpy", 1, loss, dtype="double"), EarlyStopping(patience=9)
        options: dict[str, Any] = {
            "metrics": metrics,
            "callbacks": [stopping],
            "progress": "none",
            "launcher": launcher,
        }
        with ParallelWrapper(model, 2, **options) as wrapper:
            y = y.astype(float if y.ndim == 2 else int)
            wrapper.fit(x, y, epochs=3, batch_size=8, sample_weight=np.arange(45) / 9, validation_split=0.3)
            whole = wrapper.evaluate(x, y, batch_size=7).figures()
            epochs = {name: values for name, values in wrapper.history.epochs.items() if "validation_" in name}
        found |= {f"{loss} {name}": value for name, value in (epochs | whole).items()}
    return found


@pytest.mark.slow
def test_ranks_give_the_figures_of_threads(tmp_path: Path) -> None:
    program = "import json; from tests.training.test_metrics_mpi import figures; found = figures('mpi')\n"
    (tmp_path / "program.py").write_text(f"{program}open('ranks.json', 'a').write(json.dumps(found) + '\\n')\n")
    done = under_mpiexec(2, "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = figures("thread")
    ranks = [json.loads(line) for line in (tmp_path / "ranks.json").read_text().splitlines()]
    assert max(map(len, ranks)) == len(expected) and len(ranks) == 2
    for found in ranks:  # only rank 0 has the history
        for name, value in found.items():
            assert value == pytest.approx(expected[name], rel=1e-12), name
