"""Convolutions, pools and networks reject arrays of the wrong shape on every backend.

Without checks, compiled code would read and write beyond the arrays, giving garbage, NaN, or a crash.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import RULES, Backend, UpdateScalars, Window, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import Activation, Backward, Context, Conv2D, Dense, Image, Model, Sequential
from tests.support.backends import every_backend

ONE, TWO = Window((3, 3)), Window((2, 2), (2, 2))
Call = Callable[[Backend, Callable[..., Any]], Any]  # called with a backend and a function from shape to zeros


def conv2d(x: tuple[int, ...], weight: tuple[int, ...], groups: int = 1) -> Call:
    return lambda backend, zeros: backend.conv2d(zeros(*x), zeros(*weight), None, ONE, groups=groups)


REFUSED: dict[str, Call] = {
    "more channels": conv2d((2, 6, 6, 3), (3, 3, 1, 4)),
    "fewer channels": conv2d((2, 6, 6, 1), (3, 3, 3, 4)),
    "another kernel": conv2d((2, 6, 6, 3), (3, 2, 3, 4)),
    "too small": conv2d((2, 6, 2, 3), (3, 3, 3, 4)),
    "not images": conv2d((6, 6, 3), (3, 3, 3, 4)),
    "a weight of two axes": conv2d((2, 6, 6, 3), (27, 4)),
    "groups of channels": conv2d((2, 6, 6, 3), (3, 3, 1, 4), groups=2),
    "groups of filters": conv2d((2, 6, 6, 4), (3, 3, 2, 3), groups=2),
    "max_pool2d": lambda backend, zeros: backend.max_pool2d(zeros(2, 2, 6, 3), ONE),
    "max_pool2d of rows": lambda backend, zeros: backend.max_pool2d(zeros(2, 6, 3), ONE),
    "avg_pool2d of rows": lambda backend, zeros: backend.avg_pool2d(zeros(2, 6, 3), TWO),
}
REFUSED_ON_HOSTS: dict[str, Call] = {
    "relu_backward": lambda backend, zeros: backend.relu_backward(zeros(4, 4), zeros(2, 4)),
    "pointwise": lambda backend, zeros: backend.pointwise("tanh", zeros(4, 4), zeros(2, 4)),
    "pointwise_backward": lambda backend, zeros: backend.pointwise_backward("tanh", zeros(4, 4), zeros(2, 4)),
    "dropout": lambda backend, zeros: backend.dropout(zeros(4, 4), np.arange(2), 0, 1, 0.5),
    "mean_in_place": lambda backend, zeros: backend.mean_in_place([zeros(4), zeros(3)], [0.5, 0.5]),
    "move_weights": lambda backend, zeros: backend.move_weights(
        RULES["sgd"], zeros(8), zeros(3), (), UpdateScalars(0.1)
    ),
}


@every_backend
def test_arrays_of_the_wrong_shape_are_refused(name: str) -> None:
    backend = create_backend(name, "float")
    cases = REFUSED | REFUSED_ON_HOSTS if name in ("numpy", "numba") else REFUSED
    for case, call in cases.items():
        with pytest.raises(ValueError):  # a ConfigError is one
            call(backend, lambda *shape: backend.asarray(np.zeros(shape, np.float32)))
            pytest.fail(f"taken: {case}")


class Cut(Activation):
    """Its backward pass returns a non-contiguous array of the wrong shape."""

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y, backward = super().forward(x, context)

        def cut(dy: Any) -> Any:
            dx: Any = backward(dy)
            return dx[..., ::2]

        return y, cut


@every_backend
def test_a_derivative_of_another_shape_is_refused(name: str) -> None:
    model = Model(Sequential([Conv2D(4, 3), Cut("relu"), Dense(3)]), Image(6, 6, 1), create_backend(name))
    y, backward = model.forward(model.backend.asarray(np.ones((2, 6, 6, 1), np.float32)), Context(train=True))
    with pytest.raises(ConfigError):
        backward(y.copy())


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_activations_may_be_applied_to_part_of_an_array(name: str) -> None:
    """A user's layer may apply different activations to parts of an array."""
    backend = create_backend(name, "float")
    x = np.arange(16, dtype=np.float32).reshape(2, 8) / 16
    y, dy = x.copy(), np.ones((2, 8), np.float32)
    backend.pointwise("tanh", x[:, 4:], y[:, 4:])
    np.testing.assert_allclose(y, np.hstack([x[:, :4], np.tanh(x[:, 4:])]), rtol=1e-6)
    backend.pointwise_backward("tanh", dy[:, 4:], y[:, 4:])
    np.testing.assert_allclose(dy[:, 4:], 1 - y[:, 4:] ** 2, rtol=1e-6)
