"""Dropout: the dropped values depend only on seed, epoch and sample."""

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.philox import dropped_below, key_of, of_examples
from cupynet.nn import INFERENCE, Context, Dropout, Sequential
from tests.support.backends import every_backend, every_dtype
from tests.support.passes import built, passed

SAMPLES = np.array([5, 0, 1 << 33, 7, 8])


def dropout(shape: tuple[int, ...], name: str, dtype: str = "float", rate: float = 0.4) -> Dropout:
    layer = Dropout(rate)
    built(layer, shape, create_backend(name, dtype))
    return layer


@every_backend
@every_dtype
@pytest.mark.parametrize("shape", [(3, 5, 3), (5000,)], ids=["small", "large"])
def test_dropout_depends_only_on_seed_epoch_sample_and_layer(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    layer, ones = dropout(shape, name, dtype), np.ones((5, *shape))
    y, dx = passed(layer, ones, epoch=2, seed=17, samples=SAMPLES)
    drawn = of_examples(np, SAMPLES, 2, key_of(17, "it"), ones[0].size).reshape(ones.shape)
    np.testing.assert_array_equal(y == 0, drawn < dropped_below(0.4))
    np.testing.assert_allclose(y[y != 0], 1 / 0.6, rtol=1e-3)  # keeps the mean
    np.testing.assert_array_equal(dx, y)  # dropout is linear
    later, _ = passed(layer, ones[:2], epoch=2, iteration=9, seed=17, samples=SAMPLES[2:4])
    np.testing.assert_array_equal(later, y[2:4])


@every_backend
def test_other_epochs_seeds_and_layers_drop_other_values(name: str) -> None:
    layer, ones = dropout((60,), name), np.ones((5, 60))
    first, _ = passed(layer, ones, samples=SAMPLES)
    other_layer = Sequential({"other": Dropout(0.4)})
    built(other_layer, (60,), create_backend(name))
    others = [
        passed(layer, ones, samples=SAMPLES, epoch=1),
        passed(layer, ones, samples=SAMPLES, seed=1),
        passed(other_layer, ones, samples=SAMPLES),
    ]
    for y, _ in others:
        assert 0.3 < ((y == 0) != (first == 0)).mean() < 0.65


@every_backend
@pytest.mark.parametrize(("rate", "context"), [(0.4, INFERENCE), (0, Context(train=True))], ids=["inference", "rate 0"])
def test_inference_and_a_rate_of_0_drop_nothing(name: str, rate: float, context: Context) -> None:
    layer = dropout((5,), name, rate=rate)
    x = layer.backend.asarray(np.ones((2, 5), np.float32))
    assert layer.forward(x, context)[0] is x
