"""Pointwise activations compared with the C library, near zero and far from it, for NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
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
@pytest.mark.parametrize(("dtype", "tolerance"), [("double", 4e-15), ("float", 3e-6)])
def test_values(name: str, dtype: str, tolerance: float) -> None:
    """To a few units of the last digit of the result, however small it is (down to where numbers end)."""
    backend = create_backend(name, dtype)
    x = POINTS.astype(backend.policy.storage)
    for activation, function in EXACT.items():
        out = backend.pointwise(activation, backend.asarray(x), backend.borrow(x.shape), 0.25)
        expected = np.array([function(float(value)) for value in x])
        np.testing.assert_allclose(backend.to_host(out), expected, rtol=tolerance * 4, atol=1e-30, err_msg=activation)


@every_backend
@every_dtype
def test_far_from_zero(name: str, dtype: str) -> None:
    """Neither the value nor the derivative is anything but a number, and NaN stays one."""
    backend = create_backend(name, dtype)
    for activation in EXACT:
        check_far_from_zero(backend, activation)


def check_far_from_zero(backend: Backend, activation: str) -> None:
    storage = backend.policy.storage
    large = float(np.finfo(storage).max) * 0.99
    x = backend.asarray(np.array([large, -large, 0.0, math.nan]).astype(storage))
    y = backend.pointwise(activation, x, backend.borrow(x.shape), 0.25)
    ends = {"tanh": (1, -1), "sigmoid": (1, 0), "elu": (large, -1), "leaky_relu": (large, -large / 4)}
    found = np.array(backend.to_host(y), np.float64)
    np.testing.assert_allclose(found[:2], ends.get(activation, (large, 0)), rtol=2e-3)
    assert math.isnan(found[3])
    kept = x if activation in pointwise.OF_INPUT else y
    dy = backend.asarray(np.ones(4, storage))
    slopes = np.array(backend.to_host(backend.pointwise_backward(activation, dy, kept, 0.25)), np.float64)
    expected = {"tanh": (0, 0), "sigmoid": (0, 0), "leaky_relu": (1, 0.25)}.get(activation, (1, 0))
    np.testing.assert_allclose(slopes[:2], expected, atol=1e-12)
    assert np.isfinite(slopes[2])


@pytest.mark.parametrize(("dtype", "largest"), [(np.float64, 26.5), (np.float32, 9.15)])
def test_the_error_function(dtype: Any, largest: float) -> None:
    """The bound in the docstring of `erfc`, up to the smallest normal number."""
    z = np.concatenate([np.linspace(0, largest, 20_000), [0.46875, 4.0]]).astype(dtype)
    expected = np.array([math.erfc(value) for value in z.tolist()])
    error = abs(pointwise.erfc(np, z) / expected - 1) / np.finfo(dtype).eps
    assert (error <= np.maximum(8, z * z)).all() and error.max() > 30  # more than a few units
    assert pointwise.erfc(np, np.array([1e300, math.inf])).max() < 1e-300


def test_monotone_activations_are_marked() -> None:
    backend, x = create_backend("numpy", "double"), np.linspace(-9, 9, 500)
    monotone = {name: activation_function(name).monotone for name in ACTIVATIONS}
    for name, expected in monotone.items():
        y: Any = activation_function(name).into(backend, x, np.empty_like(x))
        assert expected == bool((np.diff(y) >= 0).all()) or name == "softmax", name
    assert not monotone["softmax"] and not monotone["gelu"] and not monotone["silu"]
