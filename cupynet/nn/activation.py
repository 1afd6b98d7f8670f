"""Activations, each with a derivative that needs only its output, so that it can work in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.checks import one_of


@dataclass(frozen=True)
class ActivationFunction:
    """forward(backend, x) -> y, in place; backward(backend, dy, y) -> dx, in place in dy."""

    forward: Callable[[Backend, Array], Array]
    backward: Callable[[Backend, Array, Array], Array]


ACTIVATIONS: dict[str, ActivationFunction] = {
    "identity": ActivationFunction(lambda backend, x: x, lambda backend, dy, y: dy),
    "relu": ActivationFunction(lambda backend, x: backend.relu(x), lambda backend, dy, y: backend.relu_backward(dy, y)),
    "softmax": ActivationFunction(
        lambda backend, x: backend.softmax(x), lambda backend, dy, y: backend.softmax_backward(dy, y)
    ),
}


def activation_function(name: str) -> ActivationFunction:
    """The activation called `name`; ConfigError for an unknown name."""
    return ACTIVATIONS[one_of("activation", name, ACTIVATIONS)]
