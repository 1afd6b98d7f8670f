"""Initial weights: mean, variance and shape of every distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupynet.errors import ConfigError
from cupynet.nn.init import INITIALIZERS, fans, initializer

DENSE, CONV = (300, 200), (5, 5, 20, 50)
# name -> variance by inputs and outputs, kurtosis (3: normal, 1.8: uniform)
MOMENTS: dict[str, tuple[Any, float]] = {
    "xavier": (lambda fan_in, fan_out: 2 / (fan_in + fan_out), 3.0),
    "xavier_uniform": (lambda fan_in, fan_out: 2 / (fan_in + fan_out), 1.8),
    "he": (lambda fan_in, fan_out: 2 / fan_in, 3.0),
    "lecun": (lambda fan_in, fan_out: 1 / fan_in, 3.0),
}


def test_fans_count_the_window() -> None:
    assert fans(DENSE) == (300, 200)
    assert fans(CONV) == (5 * 5 * 20, 5 * 5 * 50)


@pytest.mark.parametrize("shape", [DENSE, CONV])
@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str, shape: tuple[int, ...]) -> None:
    variance, kurtosis = MOMENTS[name]
    expected = variance(*fans(shape))
    values = initializer(name)(np.random.default_rng(0), shape)
    assert values.shape == shape
    n, deviation = values.size, math.sqrt(expected)
    assert abs(values.mean()) < 5 * deviation / math.sqrt(n)
    assert abs(values.var() / expected - 1) < 5 * math.sqrt((kurtosis - 1) / n)
    assert ((values / deviation) ** 4).mean() == pytest.approx(kurtosis, rel=0.05)


def test_biases_start_at_zero() -> None:
    values = initializer("zeros")(np.random.default_rng(0), (3, 4))
    assert values.shape == (3, 4) and not values.any()


def test_every_initializer_is_tested() -> None:
    assert INITIALIZERS.keys() == MOMENTS.keys() | {"zeros"}


def test_an_unknown_initializer_is_refused() -> None:
    with pytest.raises(ConfigError, match="init=glorot: must be one of xavier, xavier_uniform, he, lecun, zeros"):
        initializer("glorot")
