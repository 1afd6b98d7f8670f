"""Gradient sharing: gradients or encoded updates are exchanged in every iteration."""

import copy
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupynet.data import Loader
from cupynet.optim import SGD, Momentum, Optimizer
from cupynet.parallel import FixedThreshold, GradientSharing, ThresholdEncoding
from cupynet.training import ParallelWrapper, Replica
from tests.support.refusals import refused
from tests.support.trainers import fit_on_threads, train
from tests.support.training import small_dataset, small_model


def test_scores_come_every_so_often_and_weight_samples() -> None:
    """Two rounds have batches of 4, 4 and 2. The score is the mean loss of the ten samples."""
    run = train(2, lambda: SGD(0.05), samples=10, synchronizer=GradientSharing(score_every=2))
    replica: Any = Replica(small_model(), SGD(0.05))
    total = 0.0
    for batch in Loader(small_dataset(10), 8, seed=3).epoch(0, replica.backend):
        replica.gradient(batch)
        replica.update(0)
        total += float(replica.losses)
    assert run.recorders[0].reports[-1].score_after_averaging == pytest.approx(total / 10, rel=1e-12)


class Noting(Replica):
    """Adds up its optimizer's updates."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total = np.zeros_like(self.params.master)

    def update(self, iteration: int, squared_norm: Any = None) -> None:
        before = self.params.master.copy()
        super().update(iteration, squared_norm)
        self.total += self.params.master - before


def encoded(workers: int, optimizer: Optimizer, threshold: float, samples: int, reduce: str) -> list[NDArray[Any]]:
    """Share encoded updates. Return each worker's sum of updates, residual, and change of the weights."""

    encoding, loader = ThresholdEncoding(FixedThreshold(threshold), 0), Loader(small_dataset(samples), 4, seed=3)
    way, start = GradientSharing(encoding, reduce=reduce), small_model().params.master
    trainers: list[Any] = fit_on_threads(
        workers, lambda c: Noting(small_model(), copy.deepcopy(optimizer)), way, loader
    )
    return [
        np.array([each.replica.total, each.synchronizer.encoding.residual, each.params.master - start])
        for each in trainers
    ]


@pytest.mark.parametrize("threshold", [0.004, 10.0], ids=["some", "none"])
def test_encoded_updates_plus_residuals_are_the_sum_of_the_updates(threshold: float) -> None:
    found = encoded(3, Momentum(0.05, 0.9), threshold, 61, "sum")
    expected = sum(total - residual for total, residual, _ in found)
    for _, _, moved in found:
        np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-12)
        assert moved.any() == (threshold < 1)


def test_encoded_updates_are_averaged_by_samples() -> None:
    """One round has batches of 4 and 2. With so small a threshold, every weight moves by one step."""
    found = encoded(2, SGD(0.05), 1e-12, 6, "mean")
    first, second = (np.sign(total) * (np.abs(total) >= 1e-12) for total, _, _ in found)
    expected = np.float32(1e-12) * (4 * first + 2 * second) / 6
    np.testing.assert_allclose(found[0][2], expected, rtol=0, atol=1e-16)  # rounding of weights of order one


def test_encoding_saves_traffic() -> None:
    """With one batch for each of two workers, 1 % of exact gradients' bytes are sent, without headers and scores."""

    def sent(way: GradientSharing) -> int:
        with ParallelWrapper(small_model("float"), 2, synchronizer=way) as wrapper:
            wrapper.fit(small_dataset(400), epochs=1, batch_size=4)
            return wrapper.trainer.groups.world.traffic.bytes_sent

    none, exact = sent(GradientSharing(ThresholdEncoding(FixedThreshold(1e3)))), sent(GradientSharing())
    parameters = small_model("float").params.master.nbytes
    assert exact - none > 0.9 * 50 * parameters  # an all-reduce of two workers sends as many bytes as the vector has
    assert sent(GradientSharing(transfer_dtype="half")) < 0.75 * exact


@pytest.mark.parametrize(
    "arguments", [{"encoding": "treshold"}, {"reduce": "max"}, {"transfer_dtype": "half", "encoding": "threshold"}]
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with refused(next(iter(arguments))):
        GradientSharing(**arguments)
