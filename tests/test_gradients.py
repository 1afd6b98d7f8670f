"""The gradient checker rejects wrong derivatives and accepts correct ones."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, Context, Dense, Flat, Sequential
from tests.support.gradients import OnAKink, check_derivative, check_layer

BACKEND = create_backend("numpy", "double")


def test_one_wrong_entry_among_fifty_is_found() -> None:
    def check(gradient: Any) -> None:
        check_derivative(lambda: float((point**3).sum()), BACKEND, point, gradient, "x")
        np.testing.assert_array_equal(point, np.linspace(-2, 2, 50))

    point = np.linspace(-2, 2, 50)
    right = 3 * point**2
    check(right)
    for entry in range(50):
        with pytest.raises(AssertionError):
            check(right + 1e-3 * (np.arange(50) == entry))


def test_a_kink_is_refused() -> None:
    point = np.array([1.0, 1e-7, -1.0])
    with pytest.raises(OnAKink):
        check_derivative(lambda: float(np.maximum(point, 0).sum()), BACKEND, point, (point > 0) * 1.0, "x")


MISTAKES: dict[str, Callable[[Any, Any], object]] = {
    "none": lambda layer, dx: None,
    "input": lambda layer, dx: np.multiply(dx, 1 + 1e-4, out=dx),
    "weight": lambda layer, dx: np.multiply(layer.weight.grad, 1 - 1e-4, out=layer.weight.grad),
    "bias": lambda layer, dx: np.add.at(layer.bias.grad, -1, 1e-4),
    "a buffer is kept": lambda layer, dx: setattr(layer, "kept", layer.backend.borrow((3, 3))),
}


class Wrong(Dense):
    """Dense with a mistake in its derivative."""

    def __init__(self, units: int, mistake: str) -> None:
        super().__init__(units)
        self.mistake = MISTAKES[mistake]

    def forward(self, x: Any, context: Context) -> Any:
        y, backward = super().forward(x, context)

        def wrong(dy: Any) -> Any:
            dx = backward(dy)
            self.mistake(self, dx)
            return dx

        return y, wrong


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_layer_is_found(mistake: str) -> None:
    network = Sequential({"a": Dense(4), "wrong": Wrong(3, mistake), "b": Activation("softmax")})
    with nullcontext() if mistake == "none" else pytest.raises(AssertionError):
        check_layer(network, Flat(5), create_backend("numpy", "double"))
