"""Check a layer's, network's or loss's gradients with respect to input and weights by central differences.

In double precision, a correct derivative agrees to about 1e-9 of its largest entry. A function with kinks (ReLU, the
maximum of a window) has no derivative there, so the test has to choose another point.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cupynet.backend import Backend, create_backend
from cupynet.nn import INFERENCE, Context, InputType, Layer, Params

Array: TypeAlias = Any
STEP = 1e-5
TOLERANCE = 1e-6
KINK = 1e-2  # the slopes on both sides of a smooth point differ by only a few STEPs
ENTRIES = 24  # entries of each array checked one by one; two random directions mix all entries


def directions(size: int, rng: np.random.Generator) -> list[Array]:
    """Return unit vectors to differentiate along: some axes, and two vectors that mix all of them."""
    axes = [np.bincount([axis], minlength=size).astype(float) for axis in rng.permutation(size)[:ENTRIES]]
    mixed = rng.normal(size=(2, size))
    return [*axes, *(mixed / np.linalg.norm(mixed, axis=1, keepdims=True))]


def check_derivative(function: Callable[[], float], backend: Backend, point: Array, gradient: Array, what: str) -> None:
    """Assert that `gradient` is the derivative of `function()` with respect to `point`, which is restored."""
    found = np.array(backend.to_host(gradient), np.float64).reshape(-1)
    assert gradient.shape == point.shape, f"{what}: the gradient is {gradient.shape}, the point {point.shape}"
    assert np.isfinite(found).all(), f"{what}: the gradient is not finite"
    original, here = point.copy(), function()
    scale = max(float(np.abs(found).max(initial=0.0)), 1e-3)
    for direction in directions(point.size, np.random.default_rng(point.size)):
        slopes = []
        for step in (STEP, -STEP):
            point += backend.asarray((step * direction).reshape(point.shape))
            slopes.append((function() - here) / step)
            point[...] = original
        assert abs(slopes[0] - slopes[1]) <= KINK * scale, f"{what}: slopes {slopes} at a kink: choose another point"
        error = abs(found @ direction - sum(slopes) / 2) / scale
        assert error < TOLERANCE, f"{what}: {found @ direction}, by differences {sum(slopes) / 2}, error {error:.1e}"


def check_layer(
    layer: Layer,
    input: InputType,
    backend: Backend | None = None,
    x: Array | None = None,
    batch: int = 2,
    *,
    training: bool = False,
) -> None:
    """Assert that gradients with respect to a layer's input and weights are correct, and that no buffer stays on loan.

    The layer is not yet built, and differentiated at x (N, ...), by default `batch` normal samples. training: in the
    training pass, which some layers compute differently. The backend, by default NumPy, must be in double precision.
    """
    backend = create_backend("numpy", "double") if backend is None else backend
    rng = np.random.default_rng(7)
    params = Params()
    output = layer.build(input, params.scope("it"), backend)
    params.allocate(backend, seed=3)
    for _, p in params.named():
        p.master += backend.asarray(rng.normal(0, 0.5, p.shape))  # biases start at zero, which would hide mistakes
    params.publish()
    point = backend.asarray(rng.normal(size=(batch, *input.shape)) if x is None else np.array(x, np.float64))
    towards = rng.normal(size=(len(point), *output.shape))

    def value() -> float:
        y, backward = layer.forward(point, Context(train=True) if training else INFERENCE)
        total = float((y * backend.asarray(towards)).sum())
        if training:
            nothing = backend.borrow(y.shape)
            nothing[...] = 0
            backward(nothing)
        return total

    y, backward = layer.forward(point, Context(train=True))
    assert y.shape == (len(point), *output.shape), f"the output is {y.shape}, but `build` returned {output}"
    dy = backend.borrow(y.shape)
    dy[...] = backend.asarray(towards)
    dx = backward(dy)
    assert dx is not None
    gradient = dx.copy()
    del y, backward, dy, dx
    assert backend.workspace.on_loan == 0, "a borrowed array is kept"
    check_derivative(value, backend, point, gradient, "input")
    for name, p in params.named():
        check_derivative(value, backend, p.data, p.grad, name)
    assert backend.workspace.on_loan == 0, "inference kept a borrowed array"


def distinct(shape: tuple[int, ...]) -> Array:
    """Return values at least 0.01 apart, in random order: no two in a window are equal, and none is zero."""
    size = int(np.prod(shape))
    values = (np.random.default_rng(0).permutation(size) - size / 2 + 0.25) * max(0.01, 4 / size)
    return values.reshape(shape)
