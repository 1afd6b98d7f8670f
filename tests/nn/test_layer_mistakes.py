"""Slips in a layer of one's own: each ends in an error that names the weight or the layer, never in silence."""

from __future__ import annotations

from typing import Any

import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import Context, Dense, Image, Layer, Model, Sequential


class Scaled(Layer):
    """A factor for each feature; `slip` says what is wrong with it."""

    def __init__(self, slip: str) -> None:
        self.slip = slip

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        self.factor = params.add("factor", input.shape, "gaussian" if self.slip == "initializer" else "ones")
        return input

    def forward(self, x: Any, context: Context) -> Any:
        def backward(dy: Any) -> Any:
            if self.slip == "replaced":
                self.factor.grad = (dy * x).sum(axis=0)
            self.factor.grad += (dy * x).sum(axis=0)
            return None if self.slip == "none" else dy * self.factor.data

        return x * self.factor.data, backward


def step(slip: str, *before: Layer) -> None:
    backend = create_backend("numpy", "double")
    model = Model(Sequential([*before, Scaled(slip)]), Image(2, 2, 1), backend, 1)
    y, backward = model.forward(backend.asarray([[[[1.0], [2.0]], [[3.0], [4.0]]]]), Context(train=True))
    backward(y)


def test_a_gradient_is_added_to_and_not_replaced() -> None:
    step("")
    with pytest.raises(AttributeError, match="factor"):
        step("replaced")


def test_a_derivative_that_is_needed_is_not_left_out() -> None:
    step("none")  # no layer before it has weights
    with pytest.raises(ConfigError, match="scaled1"):
        step("none", Dense(3))


def test_an_initializer_has_a_known_name() -> None:
    with pytest.raises(ConfigError, match="gaussian"):
        step("initializer")
