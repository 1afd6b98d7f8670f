"""Dense and Activation: gradients, extreme values, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.nn import INFERENCE, Activation, Backward, Context, Dense, Flat, Image, InputType, Layer, Params
from cupynet.nn.activation import ACTIVATIONS
from tests.support.backends import every_backend
from tests.support.gradients import check_layer
from tests.support.refusals import refused

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@every_activation
@pytest.mark.parametrize(("input", "bias"), [(Flat(7), False), (Flat(1), True), (Image(3, 4, 2), True)], ids=str)
def test_gradients_of_dense(activation: str, input: InputType, bias: bool) -> None:
    check_layer(Dense(5, activation, bias=bias), input, batch=3)


@every_activation
@pytest.mark.parametrize("input", [Flat(7), Flat(1), Image(3, 4, 2)], ids=str)
def test_gradients_of_activations(activation: str, input: InputType) -> None:
    check_layer(Activation(activation), input, batch=3)


def trained(layer: Layer, backend: Backend, x: Any) -> tuple[Any, Backward]:
    """The output and the derivative of a layer without weights."""
    layer.build(Flat(x.shape[1]), Params().scope("a"), backend)
    return layer.forward(backend.asarray(x), Context(train=True))


@every_backend
@every_activation
def test_an_activation_leaves_its_input_alone(name: str, activation: str) -> None:
    backend = create_backend(name, "double")
    x = backend.asarray(np.linspace(-1, 1, 12).reshape(3, 4))
    before = x.copy()
    trained(Activation(activation), backend, x)
    assert bool((x == before).all())


@every_backend
def test_softmax_of_extreme_values_is_finite(name: str) -> None:
    backend = create_backend(name, "double")
    x = np.array([[1000.0, -1000.0, 0.0], [-1000.0, -1000.0, -1000.0], [1000.0, 1000.0, -1000.0]])
    y, backward = trained(Activation("softmax"), backend, x)
    np.testing.assert_allclose(backend.to_host(y), [[1.0, 0.0, 0.0], [1 / 3] * 3, [0.5, 0.5, 0.0]])
    assert np.isfinite(backend.to_host(backward(y.copy()))).all()


def test_relu_has_no_gradient_at_zero() -> None:
    _, backward = trained(Activation("relu"), create_backend("numpy", "double"), np.array([[-1.0, 0.0, 1.0]]))
    np.testing.assert_array_equal(backward(np.ones((1, 3))), [[0, 0, 1]])


@every_backend
@pytest.mark.parametrize(("slope", "used"), [(None, 0.01), (0.25, 0.25)])
def test_the_slope_of_leaky_relu(name: str, slope: float | None, used: float) -> None:
    backend = create_backend(name, "double")
    y, backward = trained(Activation("leaky_relu", slope), backend, np.array([[-2.0, 3.0]]))
    np.testing.assert_allclose(backend.to_host(y), [[-2 * used, 3.0]], rtol=1e-15)
    dx = backward(backend.asarray(np.array([[2.0, 2.0]])))
    np.testing.assert_allclose(backend.to_host(dx), [[2 * used, 2.0]], rtol=1e-15)


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("units", lambda: Dense(0)),
        ("activation", lambda: Dense(3, "swish")),
        ("init", lambda: Dense(3, init="gauss")),
        ("activation", lambda: Activation("selu")),
        ("slope", lambda: Activation("leaky_relu", slope=1)),
    ],
)
def test_invalid_arguments_are_refused(setting: str, make: Callable[[], Layer]) -> None:
    with refused(setting):
        make()


def test_a_backward_of_an_inference_is_refused() -> None:
    backend, layer, params = create_backend("numpy"), Dense(2), Params()
    layer.build(Flat(3), params.scope("d"), backend)
    params.allocate(backend, 0)
    y, backward = layer.forward(np.ones((1, 3), np.float32), INFERENCE)
    with pytest.raises(RuntimeError):
        backward(y)
