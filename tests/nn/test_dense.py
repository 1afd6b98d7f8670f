"""Dense, Flatten and Activation: gradients, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.errors import ConfigError
from cupynet.nn import INFERENCE, Activation, Context, Dense, Flat, Flatten, Image, InputType, Params
from tests.backends import every_backend
from tests.gradients import check_layer

INPUTS: list[InputType] = [Flat(7), Flat(1), Image(3, 4, 2)]


@every_backend
@pytest.mark.parametrize("input", INPUTS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["identity", "relu", "softmax"])
def test_gradients_of_dense(name: str, activation: str, bias: bool, input: InputType) -> None:
    check_layer(Dense(5, activation, bias=bias), input, create_backend(name, "double"), batch=3)


@every_backend
def test_gradients_of_flatten(name: str) -> None:
    check_layer(Flatten(), Image(3, 2, 4), create_backend(name, "double"))


@every_backend
@pytest.mark.parametrize("input", INPUTS, ids=str)
@pytest.mark.parametrize("activation", ["identity", "relu", "softmax"])
def test_gradients_of_activations(name: str, activation: str, input: InputType) -> None:
    check_layer(Activation(activation), input, create_backend(name, "double"), batch=3)


@every_backend
@pytest.mark.parametrize("activation", ["identity", "relu", "softmax"])
def test_an_activation_leaves_its_input_alone(name: str, activation: str) -> None:
    backend, layer = create_backend(name, "double"), Activation(activation)
    layer.build(Flat(4), Params().scope("a"), backend)
    x = backend.asarray(np.linspace(-1, 1, 12).reshape(3, 4))
    before = x.copy()
    y, _ = layer.forward(x, INFERENCE)
    assert bool((x == before).all()) and backend.address(x) != backend.address(y)


@every_backend
def test_softmax_of_extreme_values_is_finite(name: str) -> None:
    backend, layer = create_backend(name, "double"), Activation("softmax")
    layer.build(Flat(3), Params().scope("a"), backend)
    x = backend.asarray(np.array([[1000.0, -1000.0, 0.0], [-1000.0, -1000.0, -1000.0], [1000.0, 1000.0, -1000.0]]))
    y, backward = layer.forward(x, Context(train=True))
    np.testing.assert_allclose(backend.to_host(y), [[1, 0, 0], [1 / 3] * 3, [0.5, 0.5, 0]])
    assert np.isfinite(backend.to_host(backward(y.copy()))).all()


def test_relu_has_no_gradient_at_zero() -> None:
    backend, layer = create_backend("numpy", "double"), Activation("relu")
    layer.build(Flat(3), Params().scope("a"), backend)
    _, backward = layer.forward(np.array([[-1.0, 0.0, 1.0]]), Context(train=True))
    np.testing.assert_array_equal(backward(np.ones((1, 3))), [[0, 0, 1]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, "Dense units=0: must be an integer of at least 1"),
        ({"units": 2.5}, "Dense units=2.5"),
        ({"units": 3, "activation": "sigmoid"}, "activation=sigmoid: must be one of identity, relu, softmax"),
        ({"units": 3, "init": "gauss"}, "init=gauss: must be one of xavier"),
        ({"units": 3, "bias": 1}, "Dense bias=1: must be true or false"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Dense(**arguments)
    assert message in str(caught.value)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation=gelu: must be one of"):
        Activation("gelu")


def test_a_backward_of_an_inference_is_refused() -> None:
    backend, layer, params = create_backend("numpy"), Dense(2), Params()
    layer.build(Flat(3), params.scope("d"), backend)
    params.allocate(backend, 0)
    y, backward = layer.forward(np.ones((1, 3), np.float32), INFERENCE)
    with pytest.raises(RuntimeError, match="not made for training"):
        backward(y)
