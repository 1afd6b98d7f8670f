from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import inlined, kernel
from cupynet.backend.cpu.kernels.narrow import reals
from cupynet.backend.update_rules import RULES

# `numbers` are rate, first, second, third, scale, clip, l1, l2, decay, a, b, c (see `UpdateScalars.in_order`).


@inlined
def slope(g: Any, w: Any, numbers: Any) -> Any:
    """Return clip(scale · g) + l2 · w + l1 · sign(w). Branches would prevent vectorization."""
    _, _, _, _, scale, clip, l1, l2, _, _, _, _ = numbers
    zero = scale - scale  # in the same precision, because a literal 0 would promote the result to double
    g *= scale
    g = clip if g > clip else g
    g = -clip if g < -clip else g
    sign = l1 if w > 0 else zero
    sign = -l1 if w < 0 else sign
    return g + (l2 * w + sign)


@inlined
def move(weight: Array, grad: Array, i: int, step: Any, numbers: Any, moves: bool) -> None:
    """If `moves`, w -= step + rate · decay · w and g = 0. Otherwise only g = step + decay · w."""
    rate, decay = numbers[0], numbers[8]
    if moves:
        weight[i] -= step + rate * decay * weight[i]
        grad[i] = 0
    else:
        grad[i] = step + decay * weight[i] if decay != 0 else step


def _without_states(formula: Callable[..., Any], moves: bool) -> Callable[..., None]:
    @kernel
    def update(weight: Array, grad: Array, numbers: Any) -> None:
        for i in range(weight.size):
            (step,) = formula(numbers[:4] + numbers[9:], slope(grad[i], weight[i], numbers))
            move(weight, grad, i, step, numbers, moves)

    return update


def _with_one(formula: Callable[..., Any], moves: bool) -> Callable[..., None]:
    @kernel
    def update(weight: Array, grad: Array, first: Array, numbers: Any) -> None:
        for i in range(weight.size):
            g = slope(grad[i], weight[i], numbers)
            step, first[i] = formula(numbers[:4] + numbers[9:], g, first[i])
            move(weight, grad, i, step, numbers, moves)

    return update


def _with_two(formula: Callable[..., Any], moves: bool) -> Callable[..., None]:
    @kernel
    def update(weight: Array, grad: Array, first: Array, second: Array, numbers: Any) -> None:
        for i in range(weight.size):
            g = slope(grad[i], weight[i], numbers)
            step, first[i], second[i] = formula(numbers[:4] + numbers[9:], g, first[i], second[i])
            move(weight, grad, i, step, numbers, moves)

    return update


def _with_three(formula: Callable[..., Any], moves: bool) -> Callable[..., None]:
    @kernel
    def update(weight: Array, grad: Array, first: Array, second: Array, third: Array, numbers: Any) -> None:
        for i in range(weight.size):
            g = slope(grad[i], weight[i], numbers)
            step, first[i], second[i], third[i] = formula(numbers[:4] + numbers[9:], g, first[i], second[i], third[i])
            move(weight, grad, i, step, numbers, moves)

    return update


BY_STATES = (_without_states, _with_one, _with_two, _with_three)
UPDATES = {name: BY_STATES[len(rule.states)](inlined(rule.formula), rule.moves) for name, rule in RULES.items()}


@kernel
def mean_in_place(parts: Any, shares: Array) -> None:
    """Overwrite each vector in `parts` with sum_r shares[r] · parts[r]. Parts with share 0 are not read."""
    tile = np.empty(2048, np.float64)  # in double, because shares in single precision would not sum to 1
    for start in range(0, parts[0].size, tile.size):
        stop = min(start + tile.size, parts[0].size)
        tile[:] = 0
        for r in range(len(parts)):
            if shares[r] > 0:
                part, share = reals(parts[r])[start:stop], shares[r]
                for i in range(part.size):
                    tile[i] += share * part[i]
        for r in range(len(parts)):
            part = reals(parts[r])[start:stop]
            for i in range(part.size):
                part[i] = tile[i]


@kernel
def squared_norm(grad: Array) -> Any:
    total = grad.dtype.type(0)
    for i in range(grad.size):
        total += grad[i] * grad[i]
    return total


@kernel
def clip_norm(grad: Array, squared_norm: Any, largest: Any) -> None:
    """Clip the norm of a vector to `largest`. If the norm is NaN, all values become NaN."""
    length = np.sqrt(squared_norm)
    if not length <= largest:
        for i in range(grad.size):
            grad[i] *= largest / length


@kernel
def convert(source: Array, target: Array) -> None:
    source, target = reals(source), reals(target)
    for i in range(source.size):
        target[i] = source[i]


@kernel
def accumulate(total: Array, x: Array) -> None:
    """total += x. A kernel with a third array for the result is not vectorized if two of the arrays are the same."""
    total, x = reals(total), reals(x)
    for i in range(total.size):
        total[i] += x[i]
