"""By which rules an update moves weights that are looked at one by one: the steps of optimizers, as array code.

All share what comes before the rule (the gradient's factor, clipping by value, penalties) and what comes behind it, so
each is one pass over flat vectors, see `Backend.move_weights`. Here g is the slope, gradient and penalties; a step is
what the weight goes down by. Means that forget are written as m += (1 - beta) · (g - m): 1 - beta is what is passed, as
beta in single precision says little about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from cupynet.backend.array import Array


@dataclass(frozen=True)
class Move:
    """The numbers of one update.

    Attributes:
        rate: the learning rate.
        scale: the factor that gradients are multiplied with first.
        clip: what is larger than this, either way, becomes this; then penalties are added.
        l1, l2: the factors of sign(w) and of w that are added to the gradient.
        decay: beside its step, a weight loses this fraction times the rate (Loshchilov & Hutter 2019).
        numbers: of this iteration, as the rule asks for them; 1 where it does not.
        factors: of the rule.
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
        """All of them, as kernels take them."""
        own = self.rate, *self.numbers, self.scale, self.clip, self.l1, self.l2, self.decay
        return (*own, *self.factors)


@dataclass(frozen=True)
class Rule:
    """A step from a slope and vectors of its own.

    Attributes:
        name: also of its kernels.
        states: the names of its vectors.
        step: (xp, move, g, *states) -> the step; changes its vectors, and may change g.
        moves: whether weights move at once. Else the step and the decay of the weight, without the learning rate, take
            the gradient's place.
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


@dataclass(frozen=True)
class Layers:
    """Which stretches of a flat vector belong together, as operations that look at a layer as a whole ask for it.

    Attributes:
        bounds: start and stop of each stretch, which do not overlap.
        group: the number of the layer that each stretch is of, from 0.
        count: how many layers there are.
        table: (T, 3) integers, start, stop and layer of each, where the backend wants them.
    """

    bounds: tuple[tuple[int, int], ...]
    group: tuple[int, ...]
    count: int
    table: Array
