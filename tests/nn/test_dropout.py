"""Dropout: the dropped values follow from seed, epoch and sample alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.backend.philox import dropped_below, key_of, of_examples
from cupynet.nn import INFERENCE, Context, Dense, Dropout, Flat, Image, InputType, Params, Sequential
from tests.support.backends import every_backend, every_dtype
from tests.support.gradients import check_layer
from tests.support.refusals import refused

SAMPLES = np.array([5, 0, 1 << 33, 7, 8])


def built(input: InputType, backend: Backend, rate: float = 0.4, name: str = "drop") -> Dropout:
    layer = Dropout(rate)
    layer.build(input, Params().scope(name), backend)
    return layer


def passed(layer: Dropout, x: float, count: int, **context: Any) -> tuple[Any, Any]:
    """The output and the derivative of a training pass over equal values, on the host."""
    backend, shape = layer.backend, (count, *layer.input.shape)
    y, backward = layer.forward(
        backend.asarray(np.full(shape, x, backend.policy.storage)), Context(train=True, **context)
    )
    found = np.array(backend.to_host(y), np.float64)
    dx = backward(backend.asarray(np.ones(shape, backend.policy.storage)))
    return found, np.array(backend.to_host(dx), np.float64)


@every_backend
@every_dtype
def test_dropout_follows_from_seed_epoch_and_sample(name: str, dtype: str) -> None:
    layer = built(Image(3, 5, 3), create_backend(name, dtype))
    y, dx = passed(layer, 1, 5, epoch=2, seed=17, samples=SAMPLES)
    drawn = of_examples(np, SAMPLES, 2, key_of(17, "drop"), 45).reshape(5, 3, 5, 3)
    np.testing.assert_array_equal(y == 0, drawn < dropped_below(0.4))
    np.testing.assert_array_equal(dx, y)  # it is linear
    later, _ = passed(layer, 1, 2, epoch=2, iteration=9, seed=17, samples=SAMPLES[2:4])
    np.testing.assert_array_equal(later, y[2:4])


@every_backend
@pytest.mark.parametrize(("epoch", "seed", "layer"), [(1, 0, "drop"), (0, 1, "drop"), (0, 0, "other")])
def test_other_epochs_seeds_and_layers_drop_others(name: str, epoch: int, seed: int, layer: str) -> None:
    backend = create_backend(name)
    first, _ = passed(built(Flat(60), backend), 1, 5, samples=SAMPLES)
    second, _ = passed(built(Flat(60), backend, name=layer), 1, 5, samples=SAMPLES, epoch=epoch, seed=seed)
    assert 0.3 < ((first == 0) != (second == 0)).mean() < 0.65


@every_backend
def test_samples_are_numbered_from_0_by_default(name: str) -> None:
    layer = built(Flat(60), create_backend(name))
    np.testing.assert_array_equal(passed(layer, 1, 5)[0], passed(layer, 1, 5, samples=np.arange(5))[0])


@every_backend
@every_dtype
def test_dropout_keeps_the_mean(name: str, dtype: str) -> None:
    y, _ = passed(built(Flat(5000), create_backend(name, dtype), 0.2), 3, 4)
    np.testing.assert_allclose(y[y != 0], 3.75, rtol=1e-3)
    assert abs(y.mean() - 3) < 0.1


@every_backend
def test_dropout_drops_nan_too(name: str) -> None:
    y, _ = passed(built(Flat(4000), create_backend(name), 0.5), np.nan, 1)
    assert 0.4 < (y == 0).mean() < 0.6 and np.isnan(y[y != 0]).all()


@every_backend
@pytest.mark.parametrize(("rate", "context"), [(0.4, INFERENCE), (0, Context(train=True))], ids=["inference", "rate 0"])
def test_an_evaluation_drops_nothing(name: str, rate: float, context: Context) -> None:
    backend = create_backend(name)
    x = backend.asarray(np.ones((2, 5), np.float32))
    y, _ = built(Flat(5), backend, rate).forward(x, context)
    assert y is x


def test_gradients() -> None:
    check_layer(Sequential([Dense(7), Dropout(0.3), Dense(4), Dropout(0.5)]), Flat(5), batch=3, training=True)


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with refused("rate"):
        Dropout(rate)
