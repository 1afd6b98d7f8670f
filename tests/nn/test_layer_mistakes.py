"""Mistakes in a user's layer: each raises an error instead of passing unnoticed."""

from typing import Any

import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import Backward, Context, Dense, Image, Layer, Model, Sequential


class Scaled(Layer):
    """A factor for each feature. `slip` names the mistake."""

    def __init__(self, slip: str) -> None:
        self.slip = slip

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        self.factor = params.add("factor", input.shape, "ones")
        return {"no type": None, "a shape": input.shape}.get(self.slip, input)

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        def backward(dy: Any) -> Any:
            if self.slip == "gradient replaced":
                self.factor.grad = (dy * x).sum(axis=0)
            self.factor.grad += (dy * x).sum(axis=0)
            return None if self.slip == "no derivative" else dy * self.factor.data

        y = x * self.factor.data
        return {"another shape": y[:, :1], "a list": y.tolist()}.get(self.slip, y), backward


def step(slip: str, *before: Layer) -> None:
    backend = create_backend("numpy", "double")
    model = Model(Sequential([*before, Scaled(slip)]), Image(2, 2, 1), backend, 1)
    y, backward = model.forward(backend.asarray([[[[1.0], [2.0]], [[3.0], [4.0]]]]), Context(train=True))
    backward(y)


def test_a_gradient_is_added_to_and_not_replaced() -> None:
    step("none")
    with pytest.raises(AttributeError):
        step("gradient replaced")


def test_a_derivative_that_is_needed_is_not_left_out() -> None:
    step("no derivative")  # no layer before it has weights
    with pytest.raises(ConfigError):
        step("no derivative", Dense(3))


@pytest.mark.parametrize("slip", ["no type", "a shape", "another shape", "a list"])
def test_an_output_that_does_not_fit_is_refused_with_the_name_of_the_layer(slip: str) -> None:
    with pytest.raises(ConfigError, match="'scaled1'"):
        step(slip)
