"""Initializers: mean, variance and shape of every distribution; biases; refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import Conv2D, Dense, Flat, Image, Layer, Loss, Model, Sequential
from cupynet.nn.init import (
    INITIALIZERS,
    REMAINS,
    Filled,
    Normal,
    Orthogonal,
    TruncatedNormal,
    Uniform,
    VarianceScaling,
    fans,
    initializer,
)
from tests.support.refusals import refused

DENSE, CONV = (300, 200), (5, 5, 20, 50)
TRUNCATED = 2.3657  # the kurtosis of a normal distribution that is cut at two deviations
BACKENDS = ["numpy", "numba"]
# name -> variance by inputs and outputs, kurtosis (3: normal, 1.8: uniform)
MOMENTS: dict[str, tuple[Any, float]] = {
    "xavier": (lambda fan_in, fan_out: 2 / (fan_in + fan_out), 3.0),
    "xavier_uniform": (lambda fan_in, fan_out: 2 / (fan_in + fan_out), 1.8),
    "glorot": (lambda fan_in, fan_out: 2 / (fan_in + fan_out), 3.0),
    "glorot_uniform": (lambda fan_in, fan_out: 2 / (fan_in + fan_out), 1.8),
    "he": (lambda fan_in, fan_out: 2 / fan_in, 3.0),
    "he_uniform": (lambda fan_in, fan_out: 2 / fan_in, 1.8),
    "kaiming": (lambda fan_in, fan_out: 2 / fan_in, 3.0),
    "kaiming_uniform": (lambda fan_in, fan_out: 2 / fan_in, 1.8),
    "lecun": (lambda fan_in, fan_out: 1 / fan_in, 3.0),
    "lecun_uniform": (lambda fan_in, fan_out: 1 / fan_in, 1.8),
    "normal": (lambda fan_in, fan_out: 0.05**2, 3.0),
    "uniform": (lambda fan_in, fan_out: 0.05**2 / 3, 1.8),
    "truncated_normal": (lambda fan_in, fan_out: (0.05 * REMAINS) ** 2, TRUNCATED),
}
OTHERS: dict[str, tuple[Any, Any, float]] = {
    "inputs, truncated": (VarianceScaling(3.0, "fan_in", "truncated_normal"), lambda i, o: 3 / i, TRUNCATED),
    "outputs": (VarianceScaling(0.5, "fan_out", "uniform"), lambda i, o: 0.5 / o, 1.8),
    "normal": (Normal(0.3), lambda i, o: 0.09, 3.0),
    "uniform": (Uniform(0.3), lambda i, o: 0.03, 1.8),
}


def test_fans_count_the_window() -> None:
    assert fans(DENSE) == (300, 200)
    assert fans(CONV) == (5 * 5 * 20, 5 * 5 * 50)


def check_moments(init: Any, shape: tuple[int, ...], variance: float, kurtosis: float) -> None:
    values = init(np.random.default_rng(0), shape)
    assert values.shape == shape
    n, deviation = values.size, math.sqrt(variance)
    assert abs(values.mean()) < 5 * deviation / math.sqrt(n)
    assert abs(values.var() / variance - 1) < 5 * math.sqrt((kurtosis - 1) / n)
    assert ((values / deviation) ** 4).mean() == pytest.approx(kurtosis, rel=0.05)


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str) -> None:
    variance, kurtosis = MOMENTS[name]
    for shape in (DENSE, CONV):
        check_moments(initializer(name), shape, variance(*fans(shape)), kurtosis)


@pytest.mark.parametrize("name", OTHERS)
def test_moments_of_objects(name: str) -> None:
    init, variance, kurtosis = OTHERS[name]
    assert initializer(init) is init
    for shape in (DENSE, CONV):
        check_moments(init, shape, variance(*fans(shape)), kurtosis)


def test_a_truncated_distribution_ends_at_two_deviations() -> None:
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
    """No side is preferred: QR alone gives a diagonal of one sign."""
    rng = np.random.default_rng(0)
    corners = np.array([np.diag(Orthogonal()(rng, (3, 3))) for _ in range(2000)])
    assert (abs(corners.mean(axis=0)) < 5 / math.sqrt(3 * 2000)).all()


def test_every_initializer_is_tested() -> None:
    assert INITIALIZERS.keys() == MOMENTS.keys() | {"zeros", "ones", "orthogonal"}


def test_one_seed_gives_the_same_numbers_everywhere() -> None:
    """On all backends, and rounded alone in other precisions."""
    for name in INITIALIZERS:
        expected = initial(name, "numpy", "double")
        for backend in BACKENDS:
            np.testing.assert_array_equal(initial(name, backend, "double"), expected, err_msg=name)
            rounded = expected.astype(np.float32)
            np.testing.assert_array_equal(initial(name, backend, "half"), rounded, err_msg=name)


def initial(name: str, backend: str, dtype: str) -> Any:
    return Model(Dense(4, init=name), Flat(6), create_backend(backend, dtype), seed=7).weights()["weight"]


@pytest.mark.parametrize("wrong", ["glorott", Orthogonal, 0.1])
def test_an_unknown_initializer_is_refused(wrong: Any) -> None:
    with refused("init"):
        Dense(3, init=wrong)


@pytest.mark.parametrize("make", [lambda **of: Dense(4, **of), lambda **of: Conv2D(4, 1, groups=2, **of)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_initial_biases(backend: str, make: Any) -> None:
    def bias(**of: Any) -> Any:
        return Model(make(**of), Image(1, 1, 6), create_backend(backend, "double"), seed=7, loss=Loss()).weights()[
            "bias"
        ]

    np.testing.assert_array_equal(bias(), np.zeros(4))
    np.testing.assert_array_equal(bias(bias_init=0.25), np.full(4, 0.25))
    np.testing.assert_array_equal(bias(bias_init="ones"), np.ones(4))
    np.testing.assert_array_equal(bias(bias_init=Filled(3)), np.full(4, 3.0))
    drawn = bias(bias_init=Normal(2.0))
    assert len(set(drawn)) == 4 and 0.1 < abs(drawn).max() < 10
    np.testing.assert_array_equal(drawn, bias(bias_init=Normal(2.0), init="orthogonal"))


def test_biases_are_added_and_not_decayed() -> None:
    model = Model(Dense(2, init="zeros", bias_init=0.5), Flat(3), create_backend("numpy", "double"))
    np.testing.assert_array_equal(model.scores(np.ones((1, 3)))[1], [[0.5, 0.5]])
    assert [p.decay for _, p in model.params.named()] == [True, False]
    Dense(2, bias=False, bias_init=0.5)


@pytest.mark.parametrize("wrong", ["zeroes", True, None, math.nan])
def test_initial_biases_are_checked(wrong: Any) -> None:
    for make in (lambda: Dense(3, bias_init=wrong), lambda: Conv2D(3, 2, bias_init=wrong)):
        with refused("bias_init"):
            make()


@pytest.mark.parametrize(
    "init", [lambda r, s: np.ones(3), lambda r, s: None, lambda r, s: np.full(s, np.nan)], ids=["shape", "none", "nan"]
)
def test_the_result_of_a_users_initializer_is_checked(init: Any) -> None:
    network = Sequential({"conv": Conv2D(4, 1, init=init)})
    with pytest.raises(ConfigError, match="'conv.weight'"):
        Model(network, Image(3, 3, 2), create_backend("numpy"))


def test_a_vector_needs_an_initializer_of_vectors() -> None:
    with pytest.raises(ConfigError):
        Model(Vector(), Flat(3), create_backend("numpy"))


class Vector(Layer):
    def build(self, input: Any, params: Any, backend: Any) -> Any:
        params.add("bias", input.shape, initializer("xavier"))
        return input


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Normal(0), "deviation"),
        (lambda: TruncatedNormal(-1), "deviation"),
        (lambda: Uniform(0), "limit"),
        (lambda: VarianceScaling(mode="fan"), "mode"),
        (lambda: VarianceScaling(distribution="even"), "distribution"),
        (lambda: Orthogonal(0), "gain"),
        (lambda: Filled("1"), "value"),
    ],
)
def test_arguments_are_checked(make: Any, setting: str) -> None:
    with refused(setting):
        make()
