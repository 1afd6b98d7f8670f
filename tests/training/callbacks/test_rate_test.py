"""The learning-rate range test: its suggestion, and its training of a copy."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynet import optim
from cupynet.backend import PixelScale, create_backend
from cupynet.data import Loader, Synthetic
from cupynet.nn import Dense, Image, Model, Sequential
from cupynet.optim import SGD, Adam, OneCycle
from cupynet.parallel import Pipeline
from cupynet.training import find_rate
from cupynet.training.callbacks.rate_test import EXPLODED
from tests.standin import installed
from tests.support.rate_tests import made, valley
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model

NETWORK = Sequential({"hidden": Dense(16, activation="relu"), "output": Dense(10)})


def model(dtype: str = "float", backend: str = "numpy") -> Model:
    return Model(NETWORK, Image(28, 28, 1), create_backend(backend, dtype), seed=1)


@pytest.fixture(scope="module")
def loader() -> Loader:
    return Loader(Synthetic(train=160, test=10).load().train, batch_size=16, seed=3)


def test_the_suggestion_is_a_tenth_of_the_rate_of_the_least_loss() -> None:
    found = made(valley(60))
    assert found.suggestion is not None
    assert found.rates[58] <= 10 * found.suggestion <= found.rates[72]  # a mean comes behind
    assert found.smoothed[0] == found.losses[0] and len(found.smoothed) == 100


def test_no_suggestion_if_the_loss_does_not_fall() -> None:
    for losses in ([2.3] * 100, [2.3 + 0.01 * i for i in range(100)], [2.3, 2.2, 2.1]):
        assert made(losses).suggestion is None
    assert made([]).suggestion is None


def test_a_loss_has_exploded_above_four_times_the_least() -> None:
    class World:
        def gather_numbers(self, *numbers: float) -> object:
            return np.array([numbers])

    clock = SimpleNamespace(samples=0)
    statistics = SimpleNamespace(clock=clock)
    trainer: Any = SimpleNamespace(world=World(), stop=lambda *_: None, statistics=statistics)
    for then, ended in (([EXPLODED], ""), ([10 * EXPLODED] * 20, "the loss has exploded")):
        found = made([1.0] * 50)
        for loss in then:
            clock.samples += 8
            report: Any = SimpleNamespace(loss=loss, iteration=51)
            found.on_report(trainer, report)
        assert found.ended == ended


@pytest.mark.parametrize("optimizer", [SGD(0.01), optim.AdaDelta(0.01), optim.LAMB(0.01)])
def test_every_optimizer_is_tested_at_the_given_rates(optimizer: optim.Optimizer, loader: Loader) -> None:
    found = find_rate(model(), loader, optimizer=optimizer, lowest=1e-4, highest=1e-2, iterations=12, workers=1)
    assert len(found.rates) == len(found.losses) == 12 and found.ended == ""
    assert found.rates == pytest.approx(list(np.geomspace(1e-4, 1e-2, 12)))
    assert all(map(math.isfinite, found.losses))


def test_the_test_trains_a_copy_of_the_model(loader: Loader) -> None:
    whole, schedule = model(), OneCycle(0.5)
    optimizer, before = SGD(schedule), {name: array.copy() for name, array in whole.weights().items()}
    found = find_rate(whole, loader, optimizer=optimizer, lowest=1e-3, highest=10.0, iterations=60, workers=1)
    assert all(np.array_equal(before[name], array) for name, array in whole.weights().items())
    assert optimizer.learning_rate is schedule and not optimizer.state
    assert min(found.losses) < 0.9 * found.losses[0] and found.suggestion is not None
    again = find_rate(whole, loader, optimizer=optimizer, lowest=1e-3, highest=10.0, iterations=60, workers=1)
    assert again.losses == found.losses


def test_a_rate_at_which_the_loss_explodes_ends_the_test(loader: Loader) -> None:
    found = find_rate(model(), loader, optimizer=SGD(1.0), lowest=1e-2, highest=1e6, iterations=80, workers=2)
    assert 10 < len(found.rates) < 80 and "exploded" in found.ended


def test_a_number_that_is_not_finite_ends_the_test_and_not_the_program(loader: Loader) -> None:
    found = find_rate(model(), loader, optimizer=SGD(1.0), lowest=1.0, highest=1e300, iterations=10, workers=1)
    assert 0 < len(found.rates) < 10 and "not finite" in found.ended


def test_a_short_batch_counts_by_its_samples() -> None:
    data = small_dataset(9)  # batches of 8 and of 1
    arguments = {"optimizer": SGD(1.0), "iterations": 10, "lowest": 1e-9, "highest": 1e-8}
    both = find_rate(small_model("double"), Loader(data, 8, seed=3), workers=2, **arguments)
    whole = find_rate(small_model("double"), Loader(data, 9, seed=3), workers=1, **arguments)
    assert both.losses == pytest.approx(whole.losses, rel=1e-6)


def test_stages_of_a_pipeline_are_tested_too(loader: Loader) -> None:
    whole = find_rate(model("double"), loader, optimizer=SGD(1.0), iterations=10, workers=1)
    cut = find_rate(model("double"), loader, optimizer=SGD(1.0), iterations=10, workers=1, pipeline=Pipeline(2, 2))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-9)


@pytest.mark.standin
def test_a_gpu_that_runs_ahead_is_given_every_rate(loader: Loader) -> None:
    host = find_rate(model(), loader, optimizer=Adam(0.1), iterations=10, workers=1, lowest=1e-3, highest=1e-1)
    with installed():
        device = model(backend="cupy")
        found = find_rate(device, loader, optimizer=Adam(0.1), iterations=10, workers=1, lowest=1e-3, highest=1e-1)
    assert found.losses == pytest.approx(host.losses, rel=1e-3) and found.rates == host.rates


@pytest.mark.parametrize("arguments", [{"iterations": 9}, {"highest": 0.1, "lowest": 1.0}, {"optimizer": Adam}])
def test_bad_arguments_are_refused(loader: Loader, arguments: dict[str, Any]) -> None:
    with refused(next(iter(arguments))):
        find_rate(model(), loader, **arguments)


def test_a_pair_is_scaled_like_the_models_pixels(loader: Loader) -> None:
    """A model that was trained on normalized images is tested on normalized images."""
    pixels = PixelScale.of([0.2], [0.3])
    own, normalised = model(), dataclasses.replace(loader.dataset, pixels=pixels)
    own.pixels = pixels
    found = [
        find_rate(own, data, iterations=20, batch_size=16)
        for data in ((normalised.images, normalised.labels), normalised)
    ]
    assert found[0].losses == found[1].losses
