"""Operations refuse arrays that do not fit, on every backend, and take any layout and precision.

Unchecked, compiled code would read and write beyond the arrays: garbage, NaN, or a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import RULES, Backend, Convolution, MaxPool, Move, Window, create_backend
from tests.support.backends import every_backend

ONE, TWO = Window((3, 3)), Window((2, 2), (2, 2))
Refused = Callable[[Backend, Callable[..., Any]], Any]


def conv2d(x: tuple[int, ...], weight: tuple[int, ...]) -> Refused:
    return lambda backend, zeros: backend.conv2d(zeros(*x), zeros(*weight), None, ONE)


def conv2d_backward(dy: tuple[int, ...]) -> Refused:
    def call(backend: Backend, zeros: Callable[..., Any]) -> Any:
        x, weight, columns = zeros(2, 6, 6, 3), zeros(3, 3, 3, 4), zeros(2 * 16, 27)
        return backend.conv2d_backward(zeros(*dy), columns, x, weight, weight, None, ONE, need_dx=True)

    return call


def pair(x: tuple[int, ...], weight: tuple[int, ...], bias: int = 4, dy: tuple[int, ...] = (2, 2, 2, 4)) -> Refused:
    """The convolution and its pool as one, where a backend has that; else the first of the two."""

    def call(backend: Backend, zeros: Callable[..., Any]) -> Any:
        both = backend.fused_pair(Convolution((6, 6, 3), 4, ONE), MaxPool(TWO))
        if both is None:
            if dy != (2, 2, 2, 4):
                raise ValueError("nothing to refuse")
            return backend.conv2d(zeros(*x), zeros(*weight), zeros(bias), ONE)
        weights = zeros(*weight), zeros(bias)
        _, saved = both.forward(zeros(*x), weights)
        return both.backward(zeros(*dy), saved, zeros(*x), weights, (zeros(*weight), zeros(bias)), need_dx=True)

    return call


REFUSED: dict[str, Refused] = {
    "channels": conv2d((2, 6, 6, 3), (3, 3, 1, 4)),
    "fewer channels": conv2d((2, 6, 6, 1), (3, 3, 3, 4)),
    "another kernel": conv2d((2, 6, 6, 3), (3, 2, 3, 4)),
    "too small": conv2d((2, 6, 2, 3), (3, 3, 3, 4)),
    "not images": conv2d((6, 6, 3), (3, 3, 3, 4)),
    "a weight of two axes": conv2d((2, 6, 6, 3), (27, 4)),
    "dy of another size": conv2d_backward((2, 5, 4, 4)),
    "dy of other filters": conv2d_backward((2, 4, 4, 3)),
    "groups of channels": lambda backend, zeros: backend.conv2d(
        zeros(2, 6, 6, 3), zeros(3, 3, 1, 4), None, ONE, groups=2
    ),
    "groups of filters": lambda backend, zeros: backend.conv2d(
        zeros(2, 6, 6, 4), zeros(3, 3, 2, 3), None, ONE, groups=2
    ),
    "a weight for all channels": lambda backend, zeros: backend.conv2d(
        zeros(2, 6, 6, 4), zeros(3, 3, 4, 4), None, ONE, groups=2
    ),
    "pair: channels": pair((2, 6, 6, 1), (3, 3, 3, 4)),
    "pair: more channels": pair((2, 6, 6, 4), (3, 3, 3, 4)),
    "pair: the weight's channels": pair((2, 6, 6, 3), (3, 3, 2, 4)),
    "pair: the weight's kernel": pair((2, 6, 6, 3), (2, 3, 3, 4)),
    "pair: the bias": pair((2, 6, 6, 3), (3, 3, 3, 4), bias=3),
    "pair: dy": pair((2, 6, 6, 3), (3, 3, 3, 4), dy=(2, 1, 2, 4)),
    "im2col": lambda backend, zeros: backend.im2col(zeros(2, 2, 6, 3), ONE),
    "im2col of rows": lambda backend, zeros: backend.im2col(zeros(6, 6), ONE),
    "col2im": lambda backend, zeros: backend.col2im(zeros(2 * 16, 27), (2, 6, 7, 3), ONE),
    "col2im: channels": lambda backend, zeros: backend.col2im(zeros(2 * 16, 27), (2, 6, 6, 4), ONE),
    "max_pool2d": lambda backend, zeros: backend.max_pool2d(zeros(2, 2, 6, 3), ONE),
    "max_pool2d of rows": lambda backend, zeros: backend.max_pool2d(zeros(2, 6, 3), ONE),
    "pool of zeros alone": lambda backend, zeros: backend.max_pool2d(
        zeros(2, 6, 6, 3), Window((2, 2), (1, 1), ((0, 2), (1, 1)))
    ),
    "means of zeros alone": lambda backend, zeros: backend.avg_pool2d(
        zeros(2, 6, 6, 3), Window((2, 2), (1, 1), ((0, 0), (2, 1)))
    ),
    "pool with gaps": lambda backend, zeros: backend.max_pool2d(zeros(2, 6, 6, 3), Window((2, 2), dilation=(2, 1))),
    "avg_pool2d of rows": lambda backend, zeros: backend.avg_pool2d(zeros(2, 6, 3), TWO),
    "mean's dy": lambda backend, zeros: backend.avg_pool2d_backward(zeros(2, 3, 3, 4), (2, 4, 4, 4), TWO),
    "pool's dy": lambda backend, zeros: backend.max_pool2d_backward(
        zeros(2, 3, 3, 4), zeros(2, 3, 3, 4).astype(np.uint8), (2, 4, 4, 4), TWO
    ),
    "pool's winners": lambda backend, zeros: backend.max_pool2d_backward(
        zeros(2, 2, 2, 4), zeros(2, 2, 2, 3).astype(np.uint8), (2, 4, 4, 4), TWO
    ),
    "relu_backward": lambda backend, zeros: backend.relu_backward(zeros(4, 4), zeros(4, 1)),
    "mean_in_place": lambda backend, zeros: backend.mean_in_place([np.zeros(4), np.zeros(1)], [0.5, 0.5]),
    "shares": lambda backend, zeros: backend.mean_in_place([np.zeros(4), np.zeros(4)], [0.5]),
    "weights and gradients": lambda backend, zeros: backend.move_weights(
        RULES["sgd"], zeros(8), zeros(1), (), Move(0.1)
    ),
    "a rule's vector": lambda backend, zeros: backend.move_weights(
        RULES["adam"], zeros(8), zeros(8), (zeros(8), zeros(1)), Move(0.1)
    ),
}


@every_backend
def test_arrays_that_do_not_fit_are_refused(name: str) -> None:
    backend = create_backend(name, "float")

    def zeros(*shape: int) -> Any:
        return backend.asarray(np.zeros(shape, np.float32))

    for case, call in REFUSED.items():
        with pytest.raises(ValueError):  # a ConfigError is one
            call(backend, zeros)
            pytest.fail(f"taken: {case}")


def strided(array: Any) -> Any:
    """The same numbers, not contiguous."""
    wide = np.repeat(array, 2, axis=-1)
    view = wide[..., ::2]
    assert array.size < 2 or not view.flags.c_contiguous
    return view


def doubled(array: Any) -> Any:
    """The same numbers in another precision."""
    return array.astype(np.float64)


OPERATIONS: dict[str, Callable[[Backend, Callable[[Any], Any], np.random.Generator], Any]] = {
    "load_images": lambda b, view, rng: b.load_images(
        np.asfortranarray(rng.integers(0, 256, (5, 4, 3, 2)).astype(np.uint8)), np.array([3, 1])
    ),
    "im2col": lambda b, view, rng: b.im2col(view(rng.normal(size=(2, 6, 5, 3)).astype(np.float32)), ONE),
    "col2im": lambda b, view, rng: b.col2im(view(rng.normal(size=(24, 27)).astype(np.float32)), (2, 6, 5, 3), ONE),
    "conv2d": lambda b, view, rng: b.conv2d(
        view(rng.normal(size=(2, 6, 5, 3)).astype(np.float32)), np.ones((3, 3, 3, 2), np.float32), None, ONE
    )[0],
    "max_pool2d": lambda b, view, rng: b.max_pool2d(view(rng.normal(size=(2, 6, 5, 3)).astype(np.float32)), TWO)[1],
    "max_pool2d_backward": lambda b, view, rng: b.max_pool2d_backward(
        view(rng.normal(size=(2, 2, 2, 3)).astype(np.float32)), np.ones((2, 2, 2, 3), np.uint8), (2, 4, 4, 3), TWO
    ),
    "relu_backward": lambda b, view, rng: b.relu_backward(
        view(rng.normal(size=(6, 5)).astype(np.float32)), view(rng.normal(size=(6, 5)).astype(np.float32))
    ),
}


@pytest.mark.parametrize("view", [strided, doubled])
@pytest.mark.parametrize("name", ["numpy", "numba"])  # cupy refuses other arrays: cuda/test_launch.py
def test_any_layout_and_precision_is_taken(name: str, view: Callable[[Any], Any]) -> None:
    for operation, call in OPERATIONS.items():
        found, expected = (
            call(create_backend(name, "float"), each, np.random.default_rng(0)) for each in (view, lambda a: a)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=operation)


@pytest.mark.parametrize("view", [strided, doubled])
def test_a_fused_pair_takes_any_layout_and_precision(view: Callable[[Any], Any]) -> None:
    backend = create_backend("numba", "float")
    pair = backend.fused_pair(Convolution((6, 6, 3), 4, ONE), MaxPool(TWO))
    assert pair is not None
    rng = np.random.default_rng(0)
    x, weight, bias, dy = (
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 6, 6, 3), (3, 3, 3, 4), (4,), (2, 2, 2, 4))
    )
    results = []
    for each in (lambda a: a, view):
        weights, grads = (each(weight), each(bias)), (np.zeros_like(weight), np.zeros_like(bias))
        y, saved = pair.forward(each(x), weights)
        dx = pair.backward(each(dy), saved, each(x), weights, grads, need_dx=True)
        results.append([y.copy(), dx.copy(), *grads])
        backend.give_back(y, dx, *saved)
        assert backend.workspace.on_loan == 0
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="the weight's gradient must be contiguous, in float32"):
        y, saved = pair.forward(x, (weight, bias))
        pair.backward(dy, saved, x, (weight, bias), (view(np.zeros_like(weight)), None), need_dx=False)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_updates_of_every_second_weight(name: str) -> None:
    backend = create_backend(name, "float")
    weight, velocity, grad = (backend.asarray(np.arange(8, dtype=np.float32)) for _ in range(3))
    backend.move_weights(RULES["sgd"], weight[::2], grad[::2], (), Move(0.5))
    np.testing.assert_array_equal(backend.to_host(weight), [0, 1, 1, 3, 2, 5, 3, 7])
    backend.move_weights(RULES["momentum"], weight[1::2], grad[1::2], [velocity[1::2]], Move(1.0))
    np.testing.assert_array_equal(backend.to_host(weight), [0, 0, 1, 0, 2, 0, 3, 0])
    assert not bool(grad.any())
    assert float(backend.squared_norm(velocity[::2])) == 4 + 16 + 36
    backend.clip_norm(velocity[::2], 16.0, 2.0)
    np.testing.assert_array_equal(backend.to_host(velocity)[::2], [0, 1, 2, 3])
    parts = [np.arange(8.0)[::2], np.arange(8.0)[1::2]]
    backend.mean_in_place(parts, [0.5, 0.5])
    np.testing.assert_array_equal(parts, [[0.5, 2.5, 4.5, 6.5]] * 2)


@every_backend
def test_no_images_of_none(name: str) -> None:
    backend = create_backend(name, "float")
    for images in (np.zeros((0, 2, 2, 1), np.uint8), np.zeros((3, 2, 2, 1), np.uint8)):
        assert backend.load_images(images, np.zeros(0, np.int64)).shape == (0, 2, 2, 1)


def test_images_that_kernels_cannot_number_are_not_fused() -> None:
    """They number the values of a padded image in 32 bits; and nothing as large as an image is made before training."""
    wide = Window((5, 5), padding=((20_000, 20_000), (20_000, 20_000)))
    wider = Window((5, 5), padding=((30_000, 30_000), (30_000, 30_000)))
    backend = create_backend("numba")
    assert backend.fused_pair(Convolution((28, 28, 1), 4, wide), MaxPool(TWO)) is not None
    assert backend.fused_pair(Convolution((28, 28, 1), 4, wider), MaxPool(TWO)) is None
