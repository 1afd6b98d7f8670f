"""Activations: gradients and extreme values."""

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, Flat, Image, InputType
from cupynet.nn.activation import ACTIVATIONS
from tests.support.backends import every_backend
from tests.support.gradients import check_layer
from tests.support.passes import built, passed
from tests.support.refusals import refused


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("input", [Flat(7), Flat(1), Image(3, 4, 2)], ids=str)
def test_gradients_of_activations_equal_finite_differences(kind: str, input: InputType) -> None:
    check_layer(Activation(kind), input, batch=3)


def activation(kind: str, features: int, name: str = "numpy", slope: float | None = None) -> Activation:
    layer = Activation(kind, slope)
    built(layer, (features,), create_backend(name, "double"))
    return layer


@every_backend
def test_softmax_of_extreme_values_is_finite(name: str) -> None:
    x = [[1000.0, -1000.0, 0.0], [-1000.0, -1000.0, -1000.0], [1000.0, 1000.0, -1000.0]]
    y, dx = passed(activation("softmax", 3, name), x)
    np.testing.assert_allclose(y, [[1.0, 0.0, 0.0], [1 / 3] * 3, [0.5, 0.5, 0.0]])
    assert np.isfinite(dx).all()


@every_backend
def test_relu_sets_blocked_gradients_to_zero_even_if_they_are_infinite_or_nan(name: str) -> None:
    _, dx = passed(activation("relu", 4, name), [[-1.0, 0.0, 0.0, 1.0]], [[np.inf, np.nan, 1.0, 1.0]])
    np.testing.assert_array_equal(dx, [[0, 0, 0, 1]])


def test_a_slope_is_refused_except_for_leaky_relu() -> None:
    with refused("slope", "0.3"):
        Activation("relu", slope=0.3)


@every_backend
@pytest.mark.parametrize(("slope", "used"), [(None, 0.01), (0.25, 0.25)])
def test_leaky_relu_has_the_given_slope_or_0_01(name: str, slope: float | None, used: float) -> None:
    y, dx = passed(activation("leaky_relu", 2, name, slope), [[-2.0, 3.0]], 2.0)
    np.testing.assert_allclose(y, [[-2 * used, 3.0]], rtol=1e-15)
    np.testing.assert_allclose(dx, [[2 * used, 2.0]], rtol=1e-15)
