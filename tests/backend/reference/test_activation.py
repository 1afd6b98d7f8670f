"""Pointwise activations compared with the C library, near zero, far from it, for NaN and for infinity."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.reference import activation as pointwise
from cupynet.nn.activation import ACTIVATIONS, activation_function
from tests.support.backends import every_backend, every_dtype

EXACT: dict[str, Callable[[float], float]] = {
    "leaky_relu": lambda x: x if x > 0 else 0.25 * x,
    "elu": lambda x: x if x > 0 else math.expm1(x),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0,
    "softplus": lambda x: x if x > 700 else math.log1p(math.exp(x)),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
}
SOME = np.random.default_rng(1).normal(size=300)
POINTS = np.concatenate([SOME, 8 * SOME, 1e-5 * SOME, 40 * SOME, [0.0, 1e4, -1e4, 700.0, -700.0, 88.0, -88.0]])


@every_backend
@pytest.mark.parametrize(("dtype", "tolerance"), [("double", 1.6e-14), ("float", 1.2e-5)])
def test_values_of_activations_match_the_c_library(name: str, dtype: str, tolerance: float) -> None:
    """Results are accurate to a few units in the last place, however small they are (down to 1e-30)."""
    backend = create_backend(name, dtype)
    x = POINTS.astype(backend.policy.storage)
    for activation, function in EXACT.items():
        out = backend.pointwise(activation, backend.asarray(x), backend.borrow(x.shape), 0.25)
        expected = np.array([function(float(value)) for value in x])
        np.testing.assert_allclose(backend.to_host(out), expected, rtol=tolerance, atol=1e-30, err_msg=activation)


# Values and slopes of activations at very large positive and negative numbers; X is the number itself.
X = 0.99
ENDS: dict[str, tuple[float, float, float, float]] = {
    "leaky_relu": (X, -X / 4, 1, 0.25),
    "elu": (X, -1, 1, 0),
    "tanh": (1, -1, 0, 0),
    "sigmoid": (1, 0, 0, 0),
    "softplus": (X, 0, 1, 0),
    "gelu": (X, 0, 1, 0),
    "silu": (X, 0, 1, 0),
}


@every_backend
@every_dtype
@pytest.mark.parametrize("activation", EXACT)
def test_activations_far_from_zero_are_not_nan_and_nan_stays_nan(name: str, dtype: str, activation: str) -> None:
    backend = create_backend(name, dtype)
    storage = backend.policy.storage
    largest = float(np.finfo(storage).max)
    x = backend.asarray(np.array([X * largest, -X * largest, 0.0, math.nan]).astype(storage))
    y = backend.pointwise(activation, x, backend.borrow(x.shape), 0.25)
    values = np.array(backend.to_host(y), np.float64)
    kept = x if activation in pointwise.OF_INPUT else y
    dy = backend.asarray(np.ones(4, storage))
    slopes = np.array(backend.to_host(backend.pointwise_backward(activation, dy, kept, 0.25)), np.float64)
    expected = [end * largest if abs(end) in (X, X / 4) else end for end in ENDS[activation][:2]]
    np.testing.assert_allclose(values[:2], expected, rtol=2e-3)
    np.testing.assert_allclose(slopes[:2], ENDS[activation][2:], atol=1e-12)
    assert math.isnan(values[3]) and np.isfinite(slopes[2])


@pytest.mark.parametrize(("dtype", "largest"), [(np.float64, 26.5), (np.float32, 9.15)])
def test_the_error_function_is_accurate_down_to_the_smallest_numbers(dtype: Any, largest: float) -> None:
    """The function satisfies the bound in the docstring of `erfc`, up to the smallest normal number."""
    z = np.concatenate([np.linspace(0, largest, 20_000), [0.46875, 4.0]]).astype(dtype)
    expected = np.array([math.erfc(value) for value in z.tolist()])
    error = abs(pointwise.erfc(np, z) / expected - 1) / np.finfo(dtype).eps
    assert (error <= np.maximum(8, z * z)).all()
    assert pointwise.erfc(np, np.array([1e300, math.inf])).max() < 1e-300


@pytest.mark.parametrize("name", [each for each in ACTIVATIONS if each != "softmax"])
def test_monotone_activations_are_marked(name: str) -> None:
    activation, x = activation_function(name), np.linspace(-9, 9, 500)
    y: Any = activation.into(create_backend("numpy", "double"), x, np.empty_like(x))
    assert activation.monotone == bool((np.diff(y) >= 0).all())
