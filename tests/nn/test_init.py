"""Initializers: mean, variance and shape of every distribution; biases."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import Conv2D, Dense, Image, Layer, Loss, Model, Sequential
from cupynet.nn.init import (
    INITIALIZERS,
    REMAINS,
    Normal,
    Orthogonal,
    TruncatedNormal,
    Uniform,
    VarianceScaling,
    initializer,
)

FANS = {(300, 200): (300, 200), (5, 5, 20, 50): (5 * 5 * 20, 5 * 5 * 50)}  # inputs and outputs of a unit
NORMAL, UNIFORM, TRUNCATED = 3.0, 1.8, 2.3657  # kurtosis; truncated: cut at two standard deviations
Variance = Callable[[int, int], float]  # a function of the numbers of inputs and outputs


def both(inputs: int, outputs: int) -> float:
    return 2 / (inputs + outputs)


DISTRIBUTIONS: dict[str, tuple[Any, Variance, float]] = {
    "xavier": ("xavier", both, NORMAL),
    "xavier_uniform": ("xavier_uniform", both, UNIFORM),
    "glorot": ("glorot", both, NORMAL),
    "glorot_uniform": ("glorot_uniform", both, UNIFORM),
    "he": ("he", lambda i, o: 2 / i, NORMAL),
    "he_uniform": ("he_uniform", lambda i, o: 2 / i, UNIFORM),
    "kaiming": ("kaiming", lambda i, o: 2 / i, NORMAL),
    "kaiming_uniform": ("kaiming_uniform", lambda i, o: 2 / i, UNIFORM),
    "lecun": ("lecun", lambda i, o: 1 / i, NORMAL),
    "lecun_uniform": ("lecun_uniform", lambda i, o: 1 / i, UNIFORM),
    "normal": ("normal", lambda i, o: 0.05**2, NORMAL),
    "uniform": ("uniform", lambda i, o: 0.05**2 / 3, UNIFORM),
    "truncated_normal": ("truncated_normal", lambda i, o: (0.05 * REMAINS) ** 2, TRUNCATED),
    "inputs, truncated": (VarianceScaling(3.0, "fan_in", "truncated_normal"), lambda i, o: 3 / i, TRUNCATED),
    "outputs": (VarianceScaling(0.5, "fan_out", "uniform"), lambda i, o: 0.5 / o, UNIFORM),
    "a normal of one's own": (Normal(0.3), lambda i, o: 0.09, NORMAL),
    "a uniform of one's own": (Uniform(0.3), lambda i, o: 0.03, UNIFORM),
}


def test_every_initializer_is_tested() -> None:
    assert INITIALIZERS.keys() - DISTRIBUTIONS.keys() == {"zeros", "ones", "orthogonal"}


@pytest.mark.parametrize("shape", FANS, ids=["dense", "convolution"])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_initial_weights_have_the_mean_and_variance_of_their_distribution(kind: str, shape: tuple[int, ...]) -> None:
    init, variance_of, kurtosis = DISTRIBUTIONS[kind]
    values, variance = initializer(init)(np.random.default_rng(0), shape), variance_of(*FANS[shape])
    assert values.shape == shape
    assert abs(values.mean()) < 5 * math.sqrt(variance / values.size)
    assert abs(values.var() / variance - 1) < 5 * math.sqrt((kurtosis - 1) / values.size)
    assert (values**4).mean() / variance**2 == pytest.approx(kurtosis, rel=0.05)


def test_a_truncated_normal_distribution_ends_at_two_deviations() -> None:
    values = TruncatedNormal(0.1, mean=3.0)(np.random.default_rng(0), (200, 300))
    assert 2.8 <= values.min() < 2.801 and 3.199 < values.max() <= 3.2 and abs(values.mean() - 3) < 0.002


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (3, 3, 4, 8), (1, 1, 5, 9)])
def test_orthogonal_weights_keep_lengths(shape: tuple[int, ...]) -> None:
    values = Orthogonal(2.0)(np.random.default_rng(0), shape)
    assert values.shape == shape
    matrix = values.reshape(-1, shape[-1])
    few = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    np.testing.assert_allclose(few.T @ few, 4 * np.eye(few.shape[1]), atol=1e-12)


def test_orthogonal_weights_are_drawn_evenly() -> None:
    """No sign is preferred: QR alone gives a diagonal of one sign."""
    rng = np.random.default_rng(0)
    corners = np.array([np.diag(Orthogonal()(rng, (3, 3))) for _ in range(2000)])
    assert (abs(corners.mean(axis=0)) < 5 / math.sqrt(3 * 2000)).all()


def weights(layer: Layer, backend: str = "numpy", dtype: str = "double") -> dict[str, Any]:
    return Model(layer, Image(1, 1, 6), create_backend(backend, dtype), seed=7, loss=Loss()).weights()


@pytest.mark.parametrize("init", INITIALIZERS)
def test_one_seed_gives_the_same_weights_on_all_backends_and_in_all_precisions(init: str) -> None:
    expected = weights(Dense(4, init=init))["weight"]
    np.testing.assert_array_equal(weights(Dense(4, init=init), "numba")["weight"], expected)
    rounded = weights(Dense(4, init=init), dtype="half")["weight"]
    np.testing.assert_array_equal(rounded, expected.astype(np.float32))


@pytest.mark.parametrize("layer", [Dense, lambda units, **of: Conv2D(units, 1, groups=2, **of)], ids=["dense", "conv"])
def test_biases_start_at_zero_or_as_bias_init_says(layer: Any) -> None:
    assert weights(layer(4))["bias"].tolist() == [0.0] * 4
    assert weights(layer(4, bias_init=0.25))["bias"].tolist() == [0.25] * 4
    assert weights(layer(4, bias_init="ones"))["bias"].tolist() == [1.0] * 4
    drawn = weights(layer(4, bias_init=Normal(2.0)))["bias"]
    assert len(set(drawn)) == 4
    np.testing.assert_array_equal(drawn, weights(layer(4, bias_init=Normal(2.0), init="orthogonal"))["bias"])


@pytest.mark.parametrize(
    "init", [lambda r, s: np.ones(3), lambda r, s: None, lambda r, s: np.full(s, np.nan)], ids=["shape", "none", "nan"]
)
def test_the_result_of_a_users_initializer_is_checked(init: Any) -> None:
    with pytest.raises(ConfigError):
        weights(Sequential({"conv": Conv2D(4, 1, init=init)}))
