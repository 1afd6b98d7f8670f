"""Gradient accumulation: gradients of parts of a batch add up to that of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.data import Dataset, Loader
from cupynet.nn import BatchNorm, Dense, Image, Loss, MeanSquaredError, Model, Sequential, SoftmaxNLL
from cupynet.optim import Adam, Nesterov
from cupynet.parallel import GradientSharing, ParameterAveraging
from cupynet.training import Callback, ParallelWrapper
from tests.support.training import small_dataset, small_model
from tests.support.workspaces import on_loan


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_report(self, trainer: Any, report: Any) -> None:
        self.losses.append(report.loss)


def trained(accumulate: int, workers: int = 1, backend: str = "numpy", dtype: str = "double", **options: Any) -> Any:
    model, seen = small_model(dtype, backend), Losses()
    model.loss = options.pop("loss", model.loss)
    with ParallelWrapper(
        model, workers, accumulate=accumulate, callbacks=[seen], report_every=2, timeout_s=60, **options
    ) as wrapper:
        wrapper.fit(Loader(small_dataset(45), 7, seed=3), 2)  # the last batch is of three
        updates = wrapper.trainer.replica.updates
        assert on_loan(wrapper) == [0] * workers
    return model.backend.to_host(model.params.master), np.array(seen.losses), updates


@pytest.mark.parametrize(
    ("accumulate", "loss"),
    [(3, MeanSquaredError()), (7, SoftmaxNLL(0.1, [1.0, 2.0, 0.5]))],
    ids=["squared", "single examples"],
)
def test_parts_add_up_to_the_whole_batch(accumulate: int, loss: Loss) -> None:
    options: dict[str, Any] = {"optimizer": Nesterov(0.05, max_grad_norm=0.5), "loss": loss}
    found, expected = trained(accumulate, **options), trained(1, **options)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-10)
    assert found[2] == expected[2] == 14


@pytest.mark.parametrize(
    ("synchronizer", "backend"),
    [(ParameterAveraging(2), "numpy"), (GradientSharing(), "numba")],
    ids=["averaging", "sharing"],
)
def test_accumulation_with_several_workers(synchronizer: Any, backend: str) -> None:
    options: dict[str, Any] = {"workers": 2, "synchronizer": synchronizer, "backend": backend}
    found, expected = (trained(n, optimizer=Adam(0.01, epsilon=1e-3), **options) for n in (3, 1))
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-11)


def test_batch_norm_normalises_each_part() -> None:
    """The running mean is updated by each part in turn, so it differs from that of the whole batch."""
    images = np.random.default_rng(0).integers(0, 256, (8, 2, 2, 1), np.uint8)
    for accumulate in (1, 4):
        network = Sequential({"norm": BatchNorm(momentum=0.75), "output": Dense(2)})
        model = Model(network, Image(2, 2, 1), create_backend("numpy", "double"))
        with ParallelWrapper(model, 1, accumulate=accumulate) as wrapper:
            wrapper.fit(Loader(Dataset("noise", images, np.zeros(8, np.int64), 2), 8, shuffle=False), 1)
        expected = 0.0
        for part in np.split(images / 255, accumulate):
            expected = 0.75 * expected + 0.25 * part.mean()
        assert model.weights()["norm.mean"] == pytest.approx(expected)


def test_accumulation_needs_less_memory() -> None:
    """What is on loan at most, in the course of a gradient."""
    most = []
    for accumulate in (1, 4):
        model = small_model()
        borrowed = 0
        workspace = model.backend.workspace
        borrow = workspace.borrow

        def counted(shape: Any, dtype: Any, borrow: Any = borrow) -> Any:
            nonlocal borrowed
            borrowed = max(borrowed, int(np.prod(shape)))
            return borrow(shape, dtype)

        workspace.borrow = counted  # type: ignore[method-assign]
        with ParallelWrapper(model, 1, accumulate=accumulate) as wrapper:
            wrapper.fit(Loader(small_dataset(48), 16, seed=3), 1)
        most.append(borrowed)
    assert most[1] * 4 == most[0]
