"""Weight initializers. They run on the host, so initial weights do not depend on the backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.checks import number, one_of
from cupynet.core.described import Described
from cupynet.core.errors import ConfigError

Initializer: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Array]

CUT = 2.0  # truncation of normal distributions, in standard deviations
REMAINS = 0.87962566103423978  # standard deviation of the standard normal distribution after truncation
FANS = ("fan_in", "fan_out", "fan_avg")
DISTRIBUTIONS = ("normal", "uniform", "truncated_normal")


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the fan-in and fan-out of a weight (..., inputs, outputs). Raise ConfigError for a vector."""
    if len(shape) < 2:
        raise ConfigError(
            f"a weight of shape {shape} has no fan-in or fan-out. Initialize it with zeros, ones or Constant"
        )
    window = math.prod(shape[:-2])
    return shape[-2] * window, shape[-1] * window


def grouped(init: Initializer, groups: int) -> Initializer:
    """Return an initializer that draws the weight (K_h, K_w, C / groups, O) of a grouped convolution group by group."""
    if groups == 1:
        return init

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        part = (*shape[:-1], shape[-1] // groups)
        return np.concatenate([init(rng, part) for _ in range(groups)], axis=-1)

    return draw


class Constant(Described):
    """The constant `value`."""

    def __init__(self, value: float) -> None:
        self.value = number("Constant value", value)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return np.full(shape, self.value)


class Normal(Described):
    """Normal distribution N(mean, std²)."""

    def __init__(self, std: float = 0.05, mean: float = 0.0) -> None:
        self.std = number(f"{type(self).__name__} std", std, above=0)
        self.mean = number(f"{type(self).__name__} mean", mean)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.normal(self.mean, self.std, shape)


class TruncatedNormal(Normal):
    """N(mean, std²) truncated at two standard deviations, which reduces its standard deviation to 0.88 std."""

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        values = rng.standard_normal(shape)
        while (far := abs(values) > CUT).any():
            values[far] = rng.standard_normal(int(far.sum()))
        return self.mean + self.std * values


class Uniform(Described):
    """Uniform distribution U(-limit, limit)."""

    def __init__(self, limit: float = 0.05) -> None:
        self.limit = number("Uniform limit", limit, above=0)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.uniform(-self.limit, self.limit, shape)


class VarianceScaling(Described):
    """A distribution with mean 0 and variance scale / fan.

    Args:
        mode: `fan_in`, `fan_out`, or `fan_avg` for their mean.
        distribution: `normal`, `uniform`, or `truncated_normal`, which has this variance after truncation.
    """

    def __init__(self, scale: float = 1.0, mode: str = "fan_in", distribution: str = "normal") -> None:
        self.scale = number("VarianceScaling scale", scale, above=0)
        self.mode = one_of("VarianceScaling mode", mode, FANS)
        self.distribution = one_of("VarianceScaling distribution", distribution, DISTRIBUTIONS)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        inputs, outputs = fans(shape)
        fan = {"fan_in": inputs, "fan_out": outputs, "fan_avg": (inputs + outputs) / 2}[self.mode]
        variance = self.scale / fan
        if self.distribution == "uniform":
            limit = math.sqrt(3 * variance)
            return rng.uniform(-limit, limit, shape)
        if self.distribution == "normal":
            return rng.normal(0.0, math.sqrt(variance), shape)
        return TruncatedNormal(math.sqrt(variance) / REMAINS)(rng, shape)


class Orthogonal(Described):
    """A random semi-orthogonal matrix times `gain` (Saxe et al. 2014), uniformly distributed (Mezzadri 2007).

    Its columns, or its rows if there are fewer, are orthogonal. For a convolution, the matrix is (K_h · K_w · C, O).
    """

    def __init__(self, gain: float = 1.0) -> None:
        self.gain = number("Orthogonal gain", gain, above=0)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        fans(shape)  # raise for vectors
        rows, columns = math.prod(shape[:-1]), shape[-1]
        q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
        q *= np.where(np.diag(r) < 0, -1.0, 1.0)
        return self.gain * (q if rows >= columns else q.T).reshape(shape)


xavier = VarianceScaling(1.0, "fan_avg")
zeros, ones = Constant(0.0), Constant(1.0)

# Deeplearning4j: XAVIER = xavier, RELU = he, LECUN_NORMAL = lecun. Keras: glorot = xavier. PyTorch: kaiming = he.
INITIALIZERS: dict[str, Initializer] = {
    "xavier": xavier,  # N(0, 2 / (in + out)) (Glorot & Bengio 2010)
    "xavier_uniform": VarianceScaling(1.0, "fan_avg", "uniform"),
    "glorot": xavier,
    "glorot_uniform": VarianceScaling(1.0, "fan_avg", "uniform"),
    "he": VarianceScaling(2.0, "fan_in"),  # N(0, 2 / in), for layers followed by ReLU (He et al. 2015)
    "he_uniform": VarianceScaling(2.0, "fan_in", "uniform"),
    "kaiming": VarianceScaling(2.0, "fan_in"),
    "kaiming_uniform": VarianceScaling(2.0, "fan_in", "uniform"),
    "lecun": VarianceScaling(1.0, "fan_in"),  # N(0, 1 / in) (LeCun et al. 1998)
    "lecun_uniform": VarianceScaling(1.0, "fan_in", "uniform"),
    "orthogonal": Orthogonal(),
    "normal": Normal(),
    "truncated_normal": TruncatedNormal(),
    "uniform": Uniform(),
    "zeros": zeros,
    "ones": ones,
}
ELSEWHERE = {f"{name}_normal": name for name in ("xavier", "glorot", "he", "kaiming", "lecun")}  # other libraries


def initializer(init: str | Initializer, argument: str = "init") -> Initializer:
    if callable(init) and not isinstance(init, type):
        return init
    return INITIALIZERS[one_of(argument, init, INITIALIZERS, ", or an initializer object", elsewhere=ELSEWHERE)]


def bias_initializer(argument: str, init: float | str | Initializer) -> Initializer:
    if isinstance(init, str) or callable(init):
        return initializer(init, argument)
    return Constant(number(argument, init, also=", or an initializer or its name"))
