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


def check_cube(gradient: np.ndarray[Any, Any]) -> None:
    """Check a gradient of the sum of the cubes of 50 numbers."""
    point = np.linspace(-2, 2, 50)
    check_derivative(lambda: float((point**3).sum()), BACKEND, point, gradient, "x")
    np.testing.assert_array_equal(point, np.linspace(-2, 2, 50))


def test_one_wrong_entry_among_fifty_is_found() -> None:
    right = 3 * np.linspace(-2, 2, 50) ** 2
    check_cube(right)
    for entry in range(50):
        wrong = right.copy()
        wrong[entry] += 1e-3
        with pytest.raises(AssertionError):
            check_cube(wrong)


def test_a_kink_is_refused() -> None:
    point = np.array([1.0, 1e-7, -1.0])
    with pytest.raises(OnAKink):
        check_derivative(lambda: float(np.maximum(point, 0).sum()), BACKEND, point, (point > 0) * 1.0, "x")


class Wrong(Dense):
    """Dense with a mistake in its derivative."""

    def __init__(self, units: int, mistake: Callable[[Any, Any], object]) -> None:
        super().__init__(units)
        self.mistake = mistake

    def forward(self, x: Any, context: Context) -> Any:
        y, backward = super().forward(x, context)

        def wrong(dy: Any) -> Any:
            dx = backward(dy)
            self.mistake(self, dx)
            return dx

        return y, wrong


def scale_dx(layer: Any, dx: Any) -> None:
    dx *= 1 + 1e-4


def scale_weight(layer: Any, dx: Any) -> None:
    layer.weight.grad *= 1 - 1e-4


def shift_bias(layer: Any, dx: Any) -> None:
    layer.bias.grad[-1] += 1e-4


def keep_a_buffer(layer: Any, dx: Any) -> None:
    layer.kept = layer.backend.borrow((3, 3))


def check_network(mistake: Callable[[Any, Any], object]) -> None:
    network = Sequential({"a": Dense(4), "wrong": Wrong(3, mistake), "b": Activation("softmax")})
    check_layer(network, Flat(5), create_backend("numpy", "double"))


@pytest.mark.parametrize("mistake", [scale_dx, scale_weight, shift_bias, keep_a_buffer])
def test_a_mistake_in_a_layer_is_found(mistake: Callable[[Any, Any], object]) -> None:
    check_network(lambda layer, dx: None)
    with pytest.raises(AssertionError):
        check_network(mistake)
