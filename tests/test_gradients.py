"""The gradient checker finds wrong derivatives, and accepts right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, Context, Dense, Flat, Sequential
from tests.support.gradients import OnAKink, check_derivative, check_layer

BACKEND = create_backend("numpy", "double")


def cube(point: Any) -> Callable[[], float]:
    return lambda: float((point**3).sum())


def test_a_right_derivative_passes_and_restores_the_point() -> None:
    point = np.linspace(-2, 2, 50).reshape(5, 10)
    before = point.copy()
    check_derivative(cube(point), BACKEND, point, 3 * point**2, "x")
    np.testing.assert_array_equal(point, before)


def test_one_wrong_entry_among_fifty_is_found() -> None:
    for entry in range(50):
        point = np.linspace(-2, 2, 50)
        gradient = 3 * point**2
        gradient[entry] += 1e-3
        with pytest.raises(AssertionError, match="weight"):
            check_derivative(cube(point), BACKEND, point, gradient, "weight")


def test_a_wrong_shape_and_a_number_that_is_none_are_seen() -> None:
    point = np.ones((2, 3))
    with pytest.raises(AssertionError):
        check_derivative(cube(point), BACKEND, point, np.ones((3, 2)), "x")
    with pytest.raises(AssertionError):
        check_derivative(cube(point), BACKEND, point, np.full((2, 3), np.nan), "x")


def test_a_kink_is_refused() -> None:
    point = np.array([1.0, 1e-7, -1.0])
    with pytest.raises(OnAKink):
        check_derivative(lambda: float(np.maximum(point, 0).sum()), BACKEND, point, (point > 0) * 1.0, "x")


class Wrong(Dense):
    """Dense with a derivative that goes wrong in one way."""

    def __init__(self, units: int, fault: Callable[[Any, Any], Any]) -> None:
        super().__init__(units)
        self.fault = fault

    def forward(self, x: Any, context: Context) -> Any:
        y, backward = super().forward(x, context)
        return y, lambda dy: self.fault(self, backward(dy))


def scaled_dx(layer: Any, dx: Any) -> Any:
    dx *= 1 + 1e-4
    return dx


def scaled_weight(layer: Any, dx: Any) -> Any:
    layer.weight.grad *= 1 - 1e-4
    return dx


def shifted_bias(layer: Any, dx: Any) -> Any:
    layer.bias.grad[-1] += 1e-4
    return dx


def kept_buffer(layer: Any, dx: Any) -> Any:
    layer.kept = layer.backend.borrow((3, 3))
    return dx


@pytest.mark.parametrize(
    ("fault", "message"),
    [(scaled_dx, "input:"), (scaled_weight, "weight:"), (shifted_bias, "bias:"), (kept_buffer, "kept")],
)
def test_a_wrong_layer_is_seen(fault: Callable[[Any, Any], Any], message: str) -> None:
    network = Sequential({"a": Dense(4), "wrong": Wrong(3, fault), "b": Activation("softmax")})
    with pytest.raises(AssertionError, match=message):
        check_layer(network, Flat(5), create_backend("numpy", "double"))


def test_the_same_layer_without_a_fault_passes() -> None:
    network = Sequential({"a": Dense(4), "right": Wrong(3, lambda layer, dx: dx), "b": Activation("softmax")})
    check_layer(network, Flat(5), create_backend("numpy", "double"))
