"""Dropout: the dropped values follow from seed, epoch and sample alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.philox import dropped_below, key_of, of_examples
from cupynet.nn import INFERENCE, Context, Dense, Dropout, Flat, Image, Layer, Model, Params, Sequential
from tests.support.backends import every_backend, every_dtype
from tests.support.gradients import check_layer
from tests.support.refusals import refused

SAMPLES = np.array([5, 0, 1 << 33, 7, 8])


def built(input: Any, backend: Any, rate: float = 0.4, name: str = "drop") -> Dropout:
    layer, params = Dropout(rate), Params()
    layer.build(input, params.scope(name), backend)
    params.allocate(backend, 0)
    return layer


def dropped(layer: Layer, context: Context, count: int = len(SAMPLES)) -> Any:
    """Where the output of ones is 0, on the host."""
    backend = layer.backend
    x = backend.asarray(np.ones((count, *layer.input.shape), backend.policy.storage))
    y, backward = layer.forward(x, context)
    found = np.array(backend.to_host(y), np.float64)
    dy = backend.borrow(x.shape)
    dy[...] = 1
    dx = backward(dy)
    np.testing.assert_array_equal(backend.to_host(dx).astype(np.float64), found)  # it is linear: its own derivative
    del y, dy, dx, backward
    assert backend.workspace.on_loan == 0
    return found == 0


@every_backend
@every_dtype
def test_dropout_follows_from_seed_epoch_and_sample(name: str, dtype: str) -> None:
    layer = built(Image(3, 5, 3), create_backend(name, dtype))
    found = dropped(layer, Context(train=True, epoch=2, seed=17, samples=SAMPLES))
    drawn = of_examples(np, SAMPLES, 2, key_of(17, "drop"), 45).reshape(5, 3, 5, 3)
    np.testing.assert_array_equal(found, drawn < dropped_below(0.4))
    later = dropped(layer, Context(train=True, epoch=2, iteration=9, seed=17, samples=SAMPLES[2:4]), 2)
    np.testing.assert_array_equal(later, found[2:4])


@every_backend
def test_other_epochs_seeds_and_layers_drop_others(name: str) -> None:
    backend = create_backend(name)
    first = dropped(built(Flat(60), backend), Context(train=True, samples=SAMPLES))
    others = [
        dropped(built(Flat(60), backend), Context(train=True, epoch=1, samples=SAMPLES)),
        dropped(built(Flat(60), backend), Context(train=True, seed=1, samples=SAMPLES)),
        dropped(built(Flat(60), backend, name="other"), Context(train=True, samples=SAMPLES)),
    ]
    for other in others:
        assert 0.3 < (other != first).mean() < 0.65
    np.testing.assert_array_equal(
        dropped(built(Flat(60), backend), Context(train=True)),
        dropped(built(Flat(60), backend), Context(train=True, samples=np.arange(5))),
    )


@every_backend
@every_dtype
def test_dropout_keeps_the_mean(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    layer = built(Flat(5000), backend, 0.2)
    y, _ = layer.forward(backend.asarray(np.full((4, 5000), 3.0, backend.policy.storage)), Context(train=True))
    found = np.array(backend.to_host(y), np.float64)
    np.testing.assert_allclose(found[found != 0], 3.75, rtol=1e-3)
    assert abs(found.mean() - 3) < 0.1


@every_backend
def test_an_evaluation_drops_nothing(name: str) -> None:
    backend = create_backend(name)
    x = backend.asarray(np.ones((2, 5), np.float32))
    for layer, context in ((built(Flat(5), backend), INFERENCE), (built(Flat(5), backend, 0), Context(train=True))):
        y, _ = layer.forward(x, context)
        assert y is x
    model = Model(Sequential([Dropout(0.9), Dense(3), Dropout(0.9)]), Flat(5), backend)
    np.testing.assert_array_equal(model.scores(x)[1], model.scores(x)[1])
    assert backend.workspace.on_loan == 0


def test_gradients() -> None:
    network = Sequential([Dense(7), Dropout(0.3), Dense(4), Dropout(0.5)])
    check_layer(network, Flat(5), batch=3, training=True)


@every_backend
def test_dropout_drops_nan_too(name: str) -> None:
    backend = create_backend(name)
    layer = built(Flat(4000), backend, 0.5)
    x = backend.asarray(np.full((1, 4000), np.nan, np.float32))
    y, _ = layer.forward(x, Context(train=True))
    found = backend.to_host(y)
    assert ((found == 0) | np.isnan(found)).all() and 0.4 < (found == 0).mean() < 0.6


@pytest.mark.parametrize("rate", [1.0, -0.1, "half"])
def test_an_impossible_rate_is_refused(rate: Any) -> None:
    with refused("rate"):
        Dropout(rate)
