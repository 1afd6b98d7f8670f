"""Training runs on CuPy or its stand-in that can be compared bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cupynet.data import Dataset, Loader, Shards
from cupynet.nn import Model
from cupynet.optim import Nesterov
from cupynet.parallel import ParameterAveraging, Synchronizer
from cupynet.training import IterationRecord, ParallelWrapper, Replica, Trainer, parallel_wrapper
from cupynet.training.graph_replica import GraphReplica
from tests.support.training import On, small_dataset, small_model

DATA = small_dataset(53)
Run = dict[str, Any]


def train_on_device(
    dtype: str = "float",
    workers: int = 2,
    *,
    optimizer: Any = None,
    synchronizer: Synchronizer | None = None,
    network: Model | None = None,
    data: Dataset | Shards = DATA,
    scale: float | None = None,
    callbacks: Any = (),
    accumulation_steps: int = 1,
) -> Run:
    """Train on CuPy for three epochs, and return everything needed to compare two runs."""
    model = small_model(dtype, "cupy") if network is None else network
    if scale is not None:
        model.backend.loss_scale = scale
    scales: list[float] = []

    def note_scale(trainer: Trainer, report: IterationRecord) -> None:
        scales.append(trainer.replica.scaler.scale if trainer.replica.scaler else 1.0)

    options: dict[str, Any] = {"log_every": 4, "timeout_s": 60, "prefetch_buffer": 0}
    options |= {"optimizer": optimizer or Nesterov(0.05), "synchronizer": synchronizer or ParameterAveraging(3)}
    options |= {"callbacks": [On("on_log", note_scale), *callbacks], "accumulation_steps": accumulation_steps}
    with ParallelWrapper(model, workers, **options) as training:
        training.fit(Loader(data, 8, seed=3), epochs=3)
        trainer, rows, reports = training.trainer, training.history.epochs, training.history.reports
        return {
            "weights": model.weights(),
            "updates": trainer.replica.updates,
            "samples": getattr(trainer.statistics.spent, "samples", None),
            "skipped": trainer.statistics.skipped_steps,
            "ahead": getattr(trainer.replica, "_ahead", False),
            "refused": trainer.replica.graphs.refused if isinstance(trainer.replica, GraphReplica) else None,
            "losses": np.array(reports["loss"], float),
            "scores": np.array(reports["score_after_averaging"], float),
            "epochs": np.column_stack([rows["loss"], rows["accuracy"], np.array(rows["losses"], float)]),
            "scales": scales,
            "state": trainer.replica.state()["optimizer"],
        }


def assert_same(found: Run, expected: Run, *, scores: bool = True) -> None:
    """Compare two runs bit for bit, except for sums of losses.

    scores: compare the scores of averages. A single replica has none until they are computed on demand.
    """
    for name in ("weights", "state", "updates", "samples", "skipped", "scales"):
        np.testing.assert_equal(found[name], expected[name], err_msg=name)
    for name in ("losses", "epochs", "scores")[: 2 + scores]:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)


@contextmanager
def single_launches() -> Iterator[None]:
    """Train with replicas that launch each operation separately instead of capturing steps as graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_wrapper, "replica_of", Replica)
        yield


def compared(train: Callable[[], Run], *, scores: bool = True) -> Run:
    """Train with captured steps and with single launches, compare the results, and return the first."""
    found = train()
    with single_launches():
        expected = train()
    assert not expected["ahead"]
    assert_same(found, expected, scores=scores)
    return found
