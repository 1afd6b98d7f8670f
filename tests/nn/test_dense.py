"""Dense, Flatten and Activation: gradients, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import INFERENCE, Activation, Context, Conv2D, Dense, Flat, Image, InputType, Layer, Params
from cupynet.nn.activation import ACTIVATIONS
from tests.support.backends import every_backend
from tests.support.gradients import check_layer
from tests.support.refusals import refused

INPUTS: list[InputType] = [Flat(7), Flat(1), Image(3, 4, 2)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_dense(activation: str) -> None:
    for input, bias in itertools.product(INPUTS, (True, False)):
        check_layer(Dense(5, activation, bias=bias), input, batch=3)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations(activation: str) -> None:
    for input in INPUTS:
        check_layer(Activation(activation), input, batch=3)


@every_backend
def test_an_activation_leaves_its_input_alone(name: str) -> None:
    for activation in ACTIVATIONS:
        backend, layer = create_backend(name, "double"), Activation(activation)
        layer.build(Flat(4), Params().scope("a"), backend)
        x = backend.asarray(np.linspace(-1, 1, 12).reshape(3, 4))
        before = x.copy()
        y, _ = layer.forward(x, INFERENCE)
        assert bool((x == before).all()) and backend.address(x) != backend.address(y), activation


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
    ("setting", "make"),
    [
        ("units", lambda: Dense(0)),
        ("units", lambda: Dense(2.5)),
        ("activation", lambda: Dense(3, "swish")),
        ("init", lambda: Dense(3, init="gauss")),
        ("bias", lambda: Dense(3, bias=1)),
        ("activation", lambda: Activation("selu")),
        ("slope", lambda: Activation("leaky_relu", slope=1)),
        ("slope", lambda: Activation("leaky_relu", slope=0)),
    ],
)
def test_invalid_arguments_are_refused(setting: str, make: Callable[[], Layer]) -> None:
    with refused(setting):
        make()


@every_backend
def test_the_slope_of_leaky_relu(name: str) -> None:
    backend = create_backend(name, "double")
    for slope, expected in ((None, -0.02), (0.25, -0.5)):
        layer = Activation("leaky_relu", slope)
        layer.build(Flat(2), Params().scope("a"), backend)
        y, backward = layer.forward(backend.asarray(np.array([[-2.0, 3.0]])), Context(train=True))
        np.testing.assert_allclose(backend.to_host(y), [[expected, 3.0]], rtol=1e-15)
        dy = backend.asarray(np.array([[2.0, 2.0]]))
        np.testing.assert_allclose(backend.to_host(backward(dy)), [[-expected, 2.0]], rtol=1e-15)


@every_backend
@pytest.mark.parametrize("make", [Dense, lambda units, activation: Conv2D(units, 1, activation=activation)])
def test_an_activation_that_needs_its_input_keeps_it_until_the_backward_pass(name: str, make: Any) -> None:
    """One array more than ReLU takes in training, none in an inference."""
    lent = {}
    for each in ("relu", "gelu", "silu"):
        backend, layer, params = create_backend(name, "double"), make(3, activation=each), Params()
        layer.build(Image(4, 4, 2), params.scope("l"), backend)
        params.allocate(backend, 0)
        x = backend.asarray(np.ones((2, 4, 4, 2)))
        y, _ = layer.forward(x, INFERENCE)
        assert backend.workspace.on_loan == 1
        del y
        y, backward = layer.forward(x, Context(train=True))
        lent[each] = backend.workspace.on_loan
        dy = backend.borrow(y.shape)
        dy[...] = 1
        backward(dy)
        del y, dy, backward
        assert backend.workspace.on_loan == 0
    assert lent["gelu"] == lent["silu"] == lent["relu"] + 1


def test_a_backward_of_an_inference_is_refused() -> None:
    backend, layer, params = create_backend("numpy"), Dense(2), Params()
    layer.build(Flat(3), params.scope("d"), backend)
    params.allocate(backend, 0)
    y, backward = layer.forward(np.ones((1, 3), np.float32), INFERENCE)
    with pytest.raises(RuntimeError):
        backward(y)
