"""Update rules of elementwise optimizers, as array code.

`UpdateOps.move_weights` applies gradient scale, clipping, penalties and decay. A rule maps the gradient g, including
penalties, to the step to subtract from the weight. Moving averages are computed as m + (1 - beta) · (g - m), with
1 - beta as a parameter, because computing it from beta in single precision would lose digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.device import Device


@dataclass(frozen=True)
class UpdateScalars:
    """Scalars of one update.

    Attributes:
        scale: factor of the gradient.
        clip: largest magnitude of a gradient element, before penalties are added.
        l1, l2: factors of sign(w) and w, which are added to the gradient.
        decay: decoupled weight decay, which subtracts rate · decay · w (Loshchilov & Hutter 2019).
        numbers: result of `Optimizer.numbers` for this iteration, without the rate.
        factors: `Optimizer.factors`; a, b, c in the kernels.
        norm: the squared norm (0-d) of the whole gradient and the maximum norm, both before `scale`; None not to clip
            the global norm. Not part of `in_order`.
    """

    rate: float
    scale: float = 1.0
    clip: float = math.inf
    l1: float = 0.0
    l2: float = 0.0
    decay: float = 0.0
    numbers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    factors: tuple[float, float, float] = (0.0, 0.0, 0.0)
    norm: tuple[Array, float] | None = None

    def in_order(self) -> tuple[float, ...]:
        scalars = self.rate, *self.numbers, self.scale, self.clip, self.l1, self.l2, self.decay
        return (*scalars, *self.factors)


@dataclass(frozen=True)
class Rule:
    """Step of an optimizer, as a pure function.

    Attributes:
        formula: (numbers, g, *states) -> (step, *new states). numbers: rate, `UpdateScalars.numbers` and `.factors`.
        states: names of the optimizer vectors.
        moves: True to update the weights directly. If False, the step plus the decay, without the rate, replaces the
            gradient.
    """

    formula: Callable[..., tuple[Any, ...]]
    states: tuple[str, ...] = ()
    moves: bool = True

    @property
    def name(self) -> str:
        return self.formula.__name__.lstrip("_")


def _sgd(numbers: Any, g: Any) -> tuple[Any, ...]:
    return (numbers[0] * g,)


def _momentum(numbers: Any, g: Any, v: Any) -> tuple[Any, ...]:
    v = numbers[4] * v - numbers[0] * g
    return -v, v


def _nesterov(numbers: Any, g: Any, v: Any) -> tuple[Any, ...]:
    gradient_step = numbers[0] * g
    v = numbers[4] * v - gradient_step
    return gradient_step - numbers[4] * v, v


def _adam(numbers: Any, g: Any, m: Any, v: Any) -> tuple[Any, ...]:
    rate, first, second, _, of_mean, of_squares, epsilon = numbers
    m = m + of_mean * (g - m)
    v = v + of_squares * (g * g - v)
    return rate * (first * m) / (np.sqrt(v) * second + epsilon), m, v


def _nadam(numbers: Any, g: Any, m: Any, v: Any) -> tuple[Any, ...]:
    rate, first, second, third, of_mean, of_squares, epsilon = numbers
    m = m + of_mean * (g - m)
    v = v + of_squares * (g * g - v)
    return rate * (first * m + second * g) / (np.sqrt(v) * third + epsilon), m, v


def _amsgrad(numbers: Any, g: Any, m: Any, v: Any, largest: Any) -> tuple[Any, ...]:
    rate, first, second, _, of_mean, of_squares, epsilon = numbers
    m = m + of_mean * (g - m)
    v = v + of_squares * (g * g - v)
    largest = np.maximum(largest, v)
    return rate * (first * m) / (np.sqrt(largest) * second + epsilon), m, v, largest


def _adamax(numbers: Any, g: Any, m: Any, largest: Any) -> tuple[Any, ...]:
    rate, first, _, _, of_mean, keeps, epsilon = numbers
    m = m + of_mean * (g - m)
    largest = np.maximum(keeps * largest, abs(g) + epsilon)
    return rate * (first * m) / largest, m, largest


def _adagrad(numbers: Any, g: Any, squares: Any) -> tuple[Any, ...]:
    squares = squares + g * g
    return numbers[0] * g / (np.sqrt(squares) + numbers[4]), squares


def _rmsprop(numbers: Any, g: Any, squares: Any) -> tuple[Any, ...]:
    squares = squares + numbers[4] * (g * g - squares)
    return numbers[0] * g / (np.sqrt(squares) + numbers[5]), squares


def _adadelta(numbers: Any, g: Any, squares: Any, steps: Any) -> tuple[Any, ...]:
    rate, _, _, _, share, epsilon, _ = numbers
    squares = squares + share * (g * g - squares)
    step = np.sqrt(steps + epsilon) / np.sqrt(squares + epsilon) * g
    return rate * step, squares, steps + share * (step * step - steps)


def _lamb(numbers: Any, g: Any, m: Any, v: Any) -> tuple[Any, ...]:
    _, first, second, _, of_mean, of_squares, epsilon = numbers
    m = m + of_mean * (g - m)
    v = v + of_squares * (g * g - v)
    return first * m / (np.sqrt(v) * second + epsilon), m, v


# Numba compiles these formulas (cpu/kernels/update.py). cuda/kernels/update.cu repeats each as a struct, registered
# with the macro for its number of optimizer vectors, such as WITH_ONE.
RULES = {
    rule.name: rule
    for rule in (
        Rule(_sgd),
        Rule(_momentum, ("velocity",)),
        Rule(_nesterov, ("velocity",)),
        Rule(_adam, ("mean", "squares")),
        Rule(_nadam, ("mean", "squares")),
        Rule(_amsgrad, ("mean", "squares", "largest")),
        Rule(_adamax, ("mean", "largest")),
        Rule(_adagrad, ("squares",)),
        Rule(_rmsprop, ("squares",)),
        Rule(_adadelta, ("squares", "steps")),
        Rule(_lamb, ("mean", "squares"), moves=False),
    )
}


class Layers:
    """Segments (start, stop) of a flat vector, and the layer of each. table: a (T, 3) array of both on the device."""

    def __init__(self, backend: Device, bounds: Sequence[tuple[int, int]], group: Sequence[int]) -> None:
        self.bounds, self.group, self.count = tuple(bounds), tuple(group), max(group, default=-1) + 1
        rows = [(*segment, layer) for segment, layer in zip(bounds, group, strict=True)]
        self.table: Array = backend.asarray(np.array(rows, np.int64).reshape(-1, 3))
