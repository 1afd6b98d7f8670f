"""The learning-rate range test: its suggestion, and its training on a copy of the model."""

from typing import Any

import numpy as np
import pytest

from cupynet import SGD, AdaDelta, Adam, Loader, Model, OneCycle, Optimizer, Pipeline
from cupynet.training import RateTest, find_rate
from tests.support.rate_tests import made, valley
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model

LOADER = Loader(small_dataset(160), batch_size=16, seed=3)


def rate_test(optimizer: Optimizer | str, model: Model | None = None, **options: Any) -> RateTest:
    options = {"optimizer": optimizer, "iterations": 10, "workers": 1, **options}
    return find_rate(model or small_model(), LOADER, **options)


def test_find_rate_suggests_a_tenth_of_the_rate_with_the_lowest_loss() -> None:
    found = made(valley(60))
    assert found.suggestion is not None
    assert found.rates[58] <= 10 * found.suggestion <= found.rates[72]  # the running mean lags behind


@pytest.mark.parametrize("losses", [[2.3] * 100, [2.3 + 0.01 * i for i in range(100)], [2.3, 2.2, 2.1], []])
def test_find_rate_suggests_nothing_if_the_loss_does_not_fall(losses: list[float]) -> None:
    assert made(losses).suggestion is None


@pytest.mark.parametrize(
    ("optimizer", "workers", "iterations"), [(AdaDelta(0.01), 1, 12), ("lamb", 1, 12), (SGD(0.01), 2, 22)]
)
def test_find_rate_tests_optimizers_at_given_rates(optimizer: Optimizer | str, workers: int, iterations: int) -> None:
    """Two workers agree to stop at the end of an epoch, after iteration 25, but test no more rates than one."""
    found = rate_test(optimizer, lowest=1e-4, highest=1e-2, iterations=iterations, workers=workers)
    assert found.rates == pytest.approx(list(np.geomspace(1e-4, 1e-2, iterations)))
    assert found.ended == "" and np.isfinite(found.losses).all()


def test_find_rate_changes_neither_the_model_nor_the_optimizer() -> None:
    tested, schedule = small_model(), OneCycle(0.5)
    optimizer, before = SGD(schedule), tested.params.master.copy()
    found = rate_test(optimizer, tested, lowest=1e-3, highest=10.0, iterations=60)
    np.testing.assert_array_equal(tested.params.master, before)
    assert optimizer.learning_rate is schedule and not optimizer.state
    assert min(found.losses) < 0.9 * found.losses[0] and found.suggestion is not None


def test_find_rate_ends_at_a_loss_that_is_not_finite() -> None:
    found = rate_test(SGD(1.0), lowest=1.0, highest=1e300)
    assert 0 < len(found.rates) < 10 and found.ended


def test_find_rate_has_the_same_losses_with_a_pipeline() -> None:
    whole, cut = (rate_test(SGD(1.0), pipeline=pipeline) for pipeline in (None, Pipeline(2, 2)))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-9)


@pytest.mark.standin
def test_find_rate_has_the_same_losses_on_a_gpu_that_runs_ahead() -> None:
    host, device = (rate_test(Adam(0.1), small_model("float", name), highest=1e-1) for name in ("numpy", "cupy"))
    assert device.losses == pytest.approx(host.losses, rel=1e-3) and device.rates == host.rates


@pytest.mark.parametrize(
    "arguments",
    [{"iterations": 9}, {"highest": 0.1, "lowest": 1.0}, {"optimizer": Adam}, {"callbacks": []}, {"log_every": 2}],
)
def test_bad_arguments_of_find_rate_are_refused(arguments: dict[str, Any]) -> None:
    with refused(next(iter(arguments))):
        find_rate(small_model(), LOADER, **arguments)
