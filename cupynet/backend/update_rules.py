"""Update rules: the steps of optimizers that treat each weight by itself, as array code.

`UpdateOps.move_weights` applies what all share: the scale of the gradient, clipping by value, penalties, decay. A rule
gets the slope g, which includes penalties, and returns the step that is subtracted from the weight. Moving averages are
written as m += (1 - beta) · (g - m), and 1 - beta is passed, because beta in single precision would lose its digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.device import Device


@dataclass(frozen=True)
class Move:
    """The numbers of one update.

    Attributes:
        rate: the learning rate.
        scale: the factor of gradients.
        clip: the largest magnitude of a gradient; penalties are added afterwards.
        l1, l2: the factors of sign(w) and of w that are added to the gradient.
        decay: decoupled weight decay: w loses rate * decay * w (Loshchilov & Hutter 2019).
        numbers: what `Optimizer.numbers` returns for this iteration after the rate; 1 by default.
        factors: `Optimizer.factors`; a, b, c in the kernels.
    """

    rate: float
    scale: float = 1.0
    clip: float = math.inf
    l1: float = 0.0
    l2: float = 0.0
    decay: float = 0.0
    numbers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    factors: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def in_order(self) -> tuple[float, ...]:
        """Return all of them, in the order of the kernels' parameters."""
        own = self.rate, *self.numbers, self.scale, self.clip, self.l1, self.l2, self.decay
        return (*own, *self.factors)


@dataclass(frozen=True)
class Rule:
    """The step of an optimizer.

    Attributes:
        name: a backend that has kernels of this name uses them; else `step` runs as array code.
        states: the names of the optimizer's vectors.
        step: (xp, move, g, *states) -> the step. It updates the vectors in place, and may change g.
        moves: True to move the weights at once. If False, the step and the decay of the weight, without the learning
            rate, replace the gradient.
    """

    name: str
    states: tuple[str, ...]
    step: Callable[..., Array]
    moves: bool = True


def _sgd(xp: ModuleType, move: Move, g: Array) -> Array:
    return move.rate * g


def _momentum(xp: ModuleType, move: Move, g: Array, v: Array) -> Array:
    v *= move.factors[0]
    v -= move.rate * g
    return -v


def _nesterov(xp: ModuleType, move: Move, g: Array, v: Array) -> Array:
    v *= move.factors[0]
    v -= move.rate * g
    return move.rate * g - move.factors[0] * v


def _forgetting(mean: Array, share: float, value: Array) -> None:
    """mean += share · (value - mean); in place."""
    mean += share * (value - mean)


def _adam(xp: ModuleType, move: Move, g: Array, m: Array, v: Array) -> Array:
    (first, second, _), (of_mean, of_squares, epsilon) = move.numbers, move.factors
    _forgetting(m, of_mean, g)
    _forgetting(v, of_squares, g * g)
    return move.rate * (first * m) / (xp.sqrt(v) * second + epsilon)


def _nadam(xp: ModuleType, move: Move, g: Array, m: Array, v: Array) -> Array:
    (first, second, third), (of_mean, of_squares, epsilon) = move.numbers, move.factors
    _forgetting(m, of_mean, g)
    _forgetting(v, of_squares, g * g)
    return move.rate * (first * m + second * g) / (xp.sqrt(v) * third + epsilon)


def _amsgrad(xp: ModuleType, move: Move, g: Array, m: Array, v: Array, largest: Array) -> Array:
    (first, second, _), (of_mean, of_squares, epsilon) = move.numbers, move.factors
    _forgetting(m, of_mean, g)
    _forgetting(v, of_squares, g * g)
    xp.maximum(largest, v, out=largest)
    return move.rate * (first * m) / (xp.sqrt(largest) * second + epsilon)


def _adamax(xp: ModuleType, move: Move, g: Array, m: Array, largest: Array) -> Array:
    (first, _, _), (of_mean, keeps, epsilon) = move.numbers, move.factors
    _forgetting(m, of_mean, g)
    xp.maximum(keeps * largest, abs(g) + epsilon, out=largest)
    return move.rate * (first * m) / largest


def _adagrad(xp: ModuleType, move: Move, g: Array, squares: Array) -> Array:
    squares += g * g
    return move.rate * g / (xp.sqrt(squares) + move.factors[0])


def _rmsprop(xp: ModuleType, move: Move, g: Array, squares: Array) -> Array:
    of_squares, epsilon, _ = move.factors
    _forgetting(squares, of_squares, g * g)
    return move.rate * g / (xp.sqrt(squares) + epsilon)


def _adadelta(xp: ModuleType, move: Move, g: Array, squares: Array, steps: Array) -> Array:
    share, epsilon, _ = move.factors
    _forgetting(squares, share, g * g)
    step = xp.sqrt(steps + epsilon) / xp.sqrt(squares + epsilon) * g
    _forgetting(steps, share, step * step)
    return move.rate * step


def _lamb(xp: ModuleType, move: Move, g: Array, m: Array, v: Array) -> Array:
    (first, second, _), (of_mean, of_squares, epsilon) = move.numbers, move.factors
    _forgetting(m, of_mean, g)
    _forgetting(v, of_squares, g * g)
    return first * m / (xp.sqrt(v) * second + epsilon)


# Each has kernels of its name: in cpu/kernels/update.py (`UPDATES`) and in cuda/kernels/update.cu (a struct, and a
# WITH_ line for the number of its vectors). tests/backend compares all three.
RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", (), _sgd),
        Rule("momentum", ("velocity",), _momentum),
        Rule("nesterov", ("velocity",), _nesterov),
        Rule("adam", ("mean", "squares"), _adam),
        Rule("nadam", ("mean", "squares"), _nadam),
        Rule("amsgrad", ("mean", "squares", "largest"), _amsgrad),
        Rule("adamax", ("mean", "largest"), _adamax),
        Rule("adagrad", ("squares",), _adagrad),
        Rule("rmsprop", ("squares",), _rmsprop),
        Rule("adadelta", ("squares", "steps"), _adadelta),
        Rule("lamb", ("mean", "squares"), _lamb, moves=False),
    )
}


class Layers:
    """The layers of a flat vector, for operations with one number per layer, such as norms.

    Args:
        backend: the device for `table`.
        bounds: start and stop of each stretch; stretches do not overlap.
        group: the layer of each stretch, from 0.

    Attributes:
        count: the number of layers.
        table: (T, 3) int64 on the device, start, stop and layer of each stretch.
    """

    def __init__(self, backend: Device, bounds: Sequence[tuple[int, int]], group: Sequence[int]) -> None:
        self.bounds, self.group, self.count = tuple(bounds), tuple(group), max(group, default=-1) + 1
        rows = [(*each, layer) for each, layer in zip(bounds, group, strict=True)]
        self.table: Array = backend.asarray(np.array(rows, np.int64).reshape(-1, 3))
