"""The update rules of `cupynet.backend.update_rules` as compiled loops, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import inlined, kernel

# Numbers, in this order: rate, first, second, third, scale, clip, l1, l2, decay, a, b, c; see `Move.in_order`.


@inlined
def slope(g: Any, w: Any, numbers: Any) -> Any:
    """clip(scale · g) + l2 · w + l1 · sign(w).

    Unused terms are added as 0: branches would prevent vectorization.
    """
    _, _, _, _, scale, clip, l1, l2, _, _, _, _ = numbers
    zero = scale - scale  # in their precision: a plain 0 would promote to double
    g *= scale
    g = clip if g > clip else g
    g = -clip if g < -clip else g
    sign = l1 if w > 0 else zero
    sign = -l1 if w < 0 else sign
    return g + (l2 * w + sign)


@inlined
def move(weight: Array, grad: Array, i: int, step: Any, numbers: Any) -> None:
    """w -= step + rate · decay · w; g = 0."""
    rate, decay = numbers[0], numbers[8]
    weight[i] -= step + rate * decay * weight[i]
    grad[i] = 0


@kernel
def sgd(weight: Array, grad: Array, numbers: Any) -> None:
    """rate · g."""
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        move(weight, grad, i, numbers[0] * g, numbers)


@kernel
def momentum(weight: Array, grad: Array, velocity: Array, numbers: Any) -> None:
    """-v, with v = a · v - rate · g."""
    for i in range(weight.size):
        v = numbers[9] * velocity[i] - numbers[0] * slope(grad[i], weight[i], numbers)
        velocity[i] = v
        move(weight, grad, i, -v, numbers)


@kernel
def nesterov(weight: Array, grad: Array, velocity: Array, numbers: Any) -> None:
    """rate · g - a · v, with v as above."""
    for i in range(weight.size):
        step = numbers[0] * slope(grad[i], weight[i], numbers)
        v = numbers[9] * velocity[i] - step
        velocity[i] = v
        move(weight, grad, i, step - numbers[9] * v, numbers)


@kernel
def adam(weight: Array, grad: Array, mean: Array, squares: Array, numbers: Any) -> None:
    """rate · first · m / (sqrt(v) · second + c)."""
    rate, first, second, _, _, _, _, _, _, a, b, c = numbers
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        m = mean[i] + a * (g - mean[i])
        v = squares[i] + b * (g * g - squares[i])
        mean[i] = m
        squares[i] = v
        move(weight, grad, i, rate * (first * m) / (np.sqrt(v) * second + c), numbers)


@kernel
def nadam(weight: Array, grad: Array, mean: Array, squares: Array, numbers: Any) -> None:
    """rate · (first · m + second · g) / (sqrt(v) · third + c)."""
    rate, first, second, third, _, _, _, _, _, a, b, c = numbers
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        m = mean[i] + a * (g - mean[i])
        v = squares[i] + b * (g * g - squares[i])
        mean[i] = m
        squares[i] = v
        move(weight, grad, i, rate * (first * m + second * g) / (np.sqrt(v) * third + c), numbers)


@kernel
def amsgrad(weight: Array, grad: Array, mean: Array, squares: Array, largest: Array, numbers: Any) -> None:
    """rate · first · m / (sqrt(max v) · second + c)."""
    rate, first, second, _, _, _, _, _, _, a, b, c = numbers
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        m = mean[i] + a * (g - mean[i])
        v = squares[i] + b * (g * g - squares[i])
        mean[i] = m
        squares[i] = v
        h = largest[i]
        h = h if v <= h else v
        largest[i] = h
        move(weight, grad, i, rate * (first * m) / (np.sqrt(h) * second + c), numbers)


@kernel
def adamax(weight: Array, grad: Array, mean: Array, largest: Array, numbers: Any) -> None:
    """rate · first · m / u, with u = max(b · u, |g| + c)."""
    rate, first, _, _, _, _, _, _, _, a, b, c = numbers
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        m = mean[i] + a * (g - mean[i])
        mean[i] = m
        u, size = b * largest[i], abs(g) + c
        u = u if size <= u else size
        largest[i] = u
        move(weight, grad, i, rate * (first * m) / u, numbers)


@kernel
def adagrad(weight: Array, grad: Array, squares: Array, numbers: Any) -> None:
    """rate · g / (sqrt(sum of g²) + a)."""
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        h = squares[i] + g * g
        squares[i] = h
        move(weight, grad, i, numbers[0] * g / (np.sqrt(h) + numbers[9]), numbers)


@kernel
def rmsprop(weight: Array, grad: Array, squares: Array, numbers: Any) -> None:
    """rate · g / (sqrt(s) + b)."""
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        s = squares[i] + numbers[9] * (g * g - squares[i])
        squares[i] = s
        move(weight, grad, i, numbers[0] * g / (np.sqrt(s) + numbers[10]), numbers)


@kernel
def adadelta(weight: Array, grad: Array, squares: Array, steps: Array, numbers: Any) -> None:
    """rate · d, with d = sqrt(u + b) / sqrt(s + b) · g, and u the mean of d²."""
    rate, share, epsilon = numbers[0], numbers[9], numbers[10]
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        s = squares[i] + share * (g * g - squares[i])
        squares[i] = s
        step = np.sqrt(steps[i] + epsilon) / np.sqrt(s + epsilon) * g
        steps[i] += share * (step * step - steps[i])
        move(weight, grad, i, rate * step, numbers)


@kernel
def lamb(weight: Array, grad: Array, mean: Array, squares: Array, numbers: Any) -> None:
    """g = first · m / (sqrt(v) · second + c) + decay · w; weights stay."""
    _, first, second, _, _, _, _, _, decay, a, b, c = numbers
    for i in range(weight.size):
        g = slope(grad[i], weight[i], numbers)
        m = mean[i] + a * (g - mean[i])
        v = squares[i] + b * (g * g - squares[i])
        mean[i] = m
        squares[i] = v
        step = first * m / (np.sqrt(v) * second + c)
        if decay != 0:
            step += decay * weight[i]
        grad[i] = step


UPDATES: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (sgd, momentum, nesterov, adam, nadam, amsgrad, adamax, adagrad, rmsprop, adadelta, lamb)
}


@kernel
def mean_in_place(parts: Any, shares: Array) -> None:
    """Overwrite all of `parts`, a tuple of vectors, with sum_r shares[r] · parts[r]; parts of share 0 are not read."""
    tile = np.empty(2048, np.float64)  # shares in single precision do not add up to one: averages would drift
    for start in range(0, parts[0].size, tile.size):
        stop = min(start + tile.size, parts[0].size)
        tile[:] = 0
        for r in range(len(parts)):
            if shares[r] > 0:
                part, share = parts[r][start:stop], shares[r]
                for i in range(part.size):
                    tile[i] += share * part[i]
        for r in range(len(parts)):
            part = parts[r][start:stop]
            for i in range(part.size):
                part[i] = tile[i]


@kernel
def squared_norm(grad: Array) -> Any:
    """The sum of squares of a vector."""
    total = grad.dtype.type(0)
    for i in range(grad.size):
        total += grad[i] * grad[i]
    return total


@kernel
def clip_norm(grad: Array, squared_norm: Any, largest: Any) -> None:
    """Shorten a vector of this squared norm to the length `largest` if it is longer; NaN stays NaN."""
    length = np.sqrt(squared_norm)
    if not length <= largest:
        for i in range(grad.size):
            grad[i] *= largest / length
