"""Initial weights, always drawn by NumPy on the host, so that the backend does not change them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from cupynet.backend.array import Array
from cupynet.checks import one_of

Initializer: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Array]


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of one unit: a weight is (..., inputs, outputs), before them a convolution's window."""
    window = math.prod(shape[:-2])
    return shape[-2] * window, shape[-1] * window


def grouped(init: Initializer, groups: int) -> Initializer:
    """Draws a convolution's weight (K_h, K_w, C / groups, O) group by group: each is a convolution of its own, whose
    units have O / groups outputs, not O."""
    if groups == 1:
        return init

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        part = (*shape[:-1], shape[-1] // groups)
        return np.concatenate([init(rng, part) for _ in range(groups)], axis=-1)

    return draw


def xavier(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """N(0, 2 / (in + out)) (Glorot & Bengio 2010); Deeplearning4j's XAVIER."""
    return rng.normal(0.0, math.sqrt(2.0 / sum(fans(shape))), shape)


def xavier_uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """U(-a, a), a = sqrt(6 / (in + out)) (Glorot & Bengio 2010)."""
    limit = math.sqrt(6.0 / sum(fans(shape)))
    return rng.uniform(-limit, limit, shape)


def he(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """N(0, 2 / in), for layers followed by ReLU (He et al. 2015); Deeplearning4j's RELU."""
    return rng.normal(0.0, math.sqrt(2.0 / fans(shape)[0]), shape)


def lecun(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """N(0, 1 / in) (LeCun et al. 1998)."""
    return rng.normal(0.0, math.sqrt(1.0 / fans(shape)[0]), shape)


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """All zero: biases."""
    return np.zeros(shape)


INITIALIZERS: dict[str, Initializer] = {
    "xavier": xavier,
    "xavier_uniform": xavier_uniform,
    "he": he,
    "lecun": lecun,
    "zeros": zeros,
}


def initializer(name: str) -> Initializer:
    """The initializer called `name`; ConfigError for an unknown name."""
    return INITIALIZERS[one_of("init", name, INITIALIZERS)]
