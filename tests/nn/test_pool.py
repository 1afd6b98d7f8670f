"""Pooling: gradients for every geometry, ties, padding, NaN, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Convolution, Window, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    INFERENCE,
    AvgPool2D,
    Context,
    Conv2D,
    Dense,
    Flat,
    GlobalAvgPool2D,
    Image,
    MaxPool2D,
    Model,
    Params,
    Sequential,
)
from cupynet.nn.pool import Pool
from tests.support.backends import Reference, every_backend, every_compiled_backend, every_dtype
from tests.support.gradients import check_layer, distinct
from tests.support.pairwise import pairwise
from tests.support.refusals import refused


@pairwise(
    pool=(MaxPool2D, AvgPool2D),
    kernel=(1, 2, 3, (3, 2), [1, 3]),
    stride=(1, 2, 4, None, (2, 1)),
    image=(Image(6, 7, 2), Image(5, 3, 1), Image(3, 8, 3)),
)
def test_gradients_for_every_geometry(pool: Any, kernel: Any, stride: Any, image: Image) -> None:
    check_layer(pool(kernel, stride), image, x=distinct((2, *image.shape)))


@pairwise(
    pool=(MaxPool2D, AvgPool2D),
    geometry=(
        (2, 1, 1), (3, 2, "same"), ((3, 2), (1, 3), (2, 1)), (3, 3, "valid"), ((1, 4), 1, (0, 3)), (5, 2, "same"),
    ),
    image=(Image(6, 7, 2), Image(5, 3, 1)),
)  # fmt: skip
def test_gradients_with_padding(pool: Any, geometry: Any, image: Image) -> None:
    """All values are negative: zeros around the image would be the largest."""
    check_layer(pool(*geometry), image, x=distinct((2, *image.shape)) - 100)


@pytest.mark.parametrize("image", [Image(6, 7, 2), Image(1, 1, 3), Image(1, 5, 1)], ids=str)
def test_gradients_of_the_mean_of_an_image(image: Image) -> None:
    check_layer(GlobalAvgPool2D(), image)
    check_layer(Sequential([Conv2D(4, 1, activation="tanh"), GlobalAvgPool2D(), Dense(3)]), image)


@every_backend
@every_dtype
def test_padding_never_wins_a_max_pool_and_does_not_count_in_a_mean(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    x = backend.asarray(np.full((1, 3, 3, 1), -2, backend.policy.storage))
    for layer, features in ((MaxPool2D(3, 1, "same"), 9), (AvgPool2D(2, 1, 1), 16), (GlobalAvgPool2D(), 1)):
        assert layer.build(Image(3, 3, 1), Params().scope("p"), backend).features == features
        y, _ = layer.forward(x, INFERENCE)
        np.testing.assert_array_equal(np.array(backend.to_host(y), np.float64), np.full(y.shape, -2.0))


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("padding", lambda: AvgPool2D(2, padding=2)),
        ("padding", lambda: MaxPool2D((3, 1), padding=(0, 1))),
        ("padding", lambda: MaxPool2D(2, padding="full")),
        ("kernel", lambda: MaxPool2D(0, 1)),
        ("kernel", lambda: MaxPool2D("2", 1)),
        ("stride", lambda: MaxPool2D(2, 0)),
    ],
)
def test_invalid_arguments_are_refused(setting: str, make: Callable[[], Pool]) -> None:
    with refused(setting):
        make()


@every_backend
def test_a_convolution_and_a_padded_pool_equal_the_reference(name: str) -> None:
    network = Sequential({"conv": Conv2D(3, 2), "pool": MaxPool2D(3, 3, 1)})
    x, outputs = np.random.default_rng(0).normal(size=(2, 7, 6, 2)), []
    for backend in (Reference("double"), create_backend(name, "double")):
        model = Model(network, Image(7, 6, 2), backend, seed=1)
        y, _ = model.forward(backend.asarray(x), INFERENCE)
        outputs.append(np.array(backend.to_host(y)))
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)


def pooled_gradient(name: str, dtype: str, x: Any, dy: Any, kernel: int, stride: int) -> Any:
    backend, params, layer = create_backend(name, dtype), Params(), MaxPool2D(kernel, stride)
    layer.build(Image(*x.shape[1:]), params.scope("pool"), backend)
    y, backward = layer.forward(backend.asarray(x.astype(backend.policy.storage)), Context(train=True))
    gradient = backend.borrow(y.shape)
    gradient[...] = backend.asarray(dy.astype(backend.policy.storage))
    return np.array(backend.to_host(backward(gradient)), np.float64)


def naive_gradient(x: Any, dy: Any, kernel: int, stride: int) -> Any:
    """The rule as it is documented: of equal values the first, row by row, gets the whole gradient."""
    dx = np.zeros(x.shape)
    for n, row, col, channel in np.ndindex(*dy.shape):
        window = x[n, row * stride : row * stride + kernel, col * stride : col * stride + kernel, channel]
        ky, kx = divmod(int(window.argmax()), kernel)
        dx[n, row * stride + ky, col * stride + kx, channel] += dy[n, row, col, channel]
    return dx


@every_backend
@pairwise(dtype=("half", "float", "double"), kernel=(1, 2, 3), stride=(1, 2, 3))
def test_ties_send_the_gradient_to_the_first(name: str, dtype: str, kernel: int, stride: int) -> None:
    rng = np.random.default_rng(kernel * 10 + stride)
    x = rng.integers(-1, 2, (3, 7, 6, 2)).astype(float)  # three values: nearly every window has a tie
    x[0] = 0  # what ReLU leaves: all equal
    shape = (3, (7 - kernel) // stride + 1, (6 - kernel) // stride + 1, 2)
    dy = rng.integers(1, 5, shape).astype(float)
    found = pooled_gradient(name, dtype, x, dy, kernel, stride)
    np.testing.assert_array_equal(found, naive_gradient(x, dy, kernel, stride))


def test_inputs_that_cannot_be_pooled_are_refused() -> None:
    scope, backend = Params().scope("pool1"), create_backend("numpy")
    for layer, input in ((MaxPool2D(2), Flat(9)), (GlobalAvgPool2D(), Flat(3)), (MaxPool2D(5), Image(4, 6, 1))):
        with pytest.raises(ConfigError, match="'pool1'"):
            layer.build(input, scope, backend)


PAIRS = [
    (Conv2D(3, 3), MaxPool2D(2)),
    (Conv2D(3, 2, padding=1, activation="relu", bias=False), MaxPool2D(3, 2)),
    (Conv2D(3, 3, padding="same", activation="softmax"), MaxPool2D(2, 3)),
    (Conv2D(3, 2, activation="elu"), MaxPool2D(3, 3, 1)),
    (Conv2D(3, (3, 2), (1, 2), (1, 0)), MaxPool2D((1, 3))),
    (Conv2D(17, (2, 5), padding="same", bias=False), MaxPool2D((3, 2), (3, 4))),
    (Conv2D(9, [1, 3], activation="relu"), MaxPool2D([2, 1])),
    (Conv2D(2, (3, 1)), MaxPool2D(2, (2, 1))),  # windows that overlap
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].describe()}; {pair[1].describe()}")
def test_gradients_of_a_convolution_and_its_pooling(pair: tuple[Conv2D, MaxPool2D]) -> None:
    check_layer(Sequential([Conv2D(2, 1), *copy.deepcopy(pair)]), Image(6, 9, 2))


@pytest.mark.parametrize("pair", [PAIRS[i] for i in (0, 4, 5, 6)], ids=lambda pair: pair[1].describe())
def test_a_fused_pair_equals_the_reference_in_double(pair: tuple[Conv2D, MaxPool2D]) -> None:
    """Behind another convolution, so that it has several channels and a gradient of its input."""
    pytest.importorskip("numba")
    x, found = np.random.default_rng(0).normal(size=(3, 6, 9, 2)), []
    for backend, steps in ((create_backend("numba", "double"), 2), (Reference("double"), 3)):
        network, params = Sequential([Conv2D(8, 1), *copy.deepcopy(pair)]), Params()
        network.build(Image(6, 9, 2), params.scope(), backend)
        assert len(network.steps) == steps
        params.allocate(backend, seed=1)
        y, backward = network.forward(x, Context(train=True))
        dy = backend.borrow(y.shape)
        dy[...] = np.random.default_rng(1).normal(size=y.shape)
        found.append((np.array(y), np.array(backward(dy)), params.grad))
    for numbers, expected in zip(*found, strict=True):
        np.testing.assert_allclose(numbers, expected, rtol=1e-10, atol=1e-12)


def test_a_fused_pair_sees_every_image_of_a_large_batch() -> None:
    """The gradient of the weight is summed over a few images at a time, as many as the L1 cache holds."""
    pytest.importorskip("numba")
    rng, backend, reference = np.random.default_rng(0), create_backend("numba", "double"), Reference("double")
    x, weight = rng.normal(size=(7, 10, 10, 20)), rng.normal(size=(3, 3, 20, 8))
    window, pool = Window((3, 3)), Window((2, 2), (2, 2))
    pair = backend.fused_pair(Convolution((10, 10, 20), 8, window), pool)
    assert pair is not None
    y, saved = pair.forward(x, (weight, None))
    dy, found, expected = rng.normal(size=y.shape), np.zeros_like(weight), np.zeros_like(weight)
    pair.backward(dy, saved, x, (weight, None), (found, None), need_dx=False)
    convolved, columns = reference.conv2d(x, weight, None, window)
    _, winners = reference.max_pool2d(convolved, pool)
    through = reference.max_pool2d_backward(dy, winners, convolved.shape, pool)
    reference.conv2d_backward(through, columns, x, weight, expected, None, window, need_dx=False)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_pairs_are_fused_if_windows_are_small_and_do_not_overlap() -> None:
    pytest.importorskip("numba")
    for pool, steps in (((2, 2), 1), ((1, 3), 1), ((3, 3), 1), ((1, 1), 2), ((2, 5), 2)):
        network = Sequential([Conv2D(3, 2), MaxPool2D(pool)])
        network.build(Image(7, 8, 1), Params().scope(), create_backend("numba"))
        assert len(network.steps) == steps, pool


# NaN ------------------------------------------------------------------------------------------------------------------


@every_backend
@every_dtype
def test_a_nan_anywhere_in_a_window_is_passed_on(name: str, dtype: str) -> None:
    for place, second in product(range(6), (False, True)):
        x = np.arange(2 * 2 * 3 * 20.0).reshape(2, 2, 3, 20)
        x[0, place // 3, place % 3, 7] = np.nan
        if second:
            x[0, 1, 2, 7] = np.nan
        backend = create_backend(name, dtype)
        y, winners = backend.max_pool2d(backend.asarray(x.astype(backend.policy.storage)), Window((2, 3)))
        found, won = np.array(backend.to_host(y)), backend.to_host(winners)
        assert np.isnan(found[0, 0, 0, 7]) and won[0, 0, 0, 7] == place, "the first NaN wins"
        found[0, 0, 0, 7] = 0
        assert np.isfinite(found).all() and (won[1] == 5).all()


@every_backend
@pytest.mark.parametrize(
    ("dtype", "channels", "activation"), [("float", 1, "identity"), ("float", 16, "relu"), ("half", 1, "relu")]
)
def test_a_nan_under_a_convolution_is_passed_on(name: str, dtype: str, channels: int, activation: str) -> None:
    """From each pixel of a pooling window; a backend may do the pair in one operation."""
    backend, params = create_backend(name, dtype), Params()
    network = Sequential({"conv": Conv2D(21, 1, activation=activation), "pool": MaxPool2D(2)})
    network.build(Image(4, 4, channels), params.scope(), backend)
    params.allocate(backend, seed=0)
    params.master[...] = 0.5
    params.publish()
    for place in range(4):
        x = np.ones((2, 4, 4, channels), backend.policy.storage)
        x[1, 2 + place // 2, place % 2, 0] = np.nan
        y, backward = network.forward(backend.asarray(x), Context(train=True))
        found = np.array(backend.to_host(y))
        assert np.isnan(found[1, 1, 0]).all()
        found[1, 1, 0] = 0
        assert np.isfinite(found).all()
        dy = backend.borrow(y.shape)
        dy[...] = 1
        dx = backend.to_host(backward(dy))
        hit = np.zeros((2, 4, 4), bool)
        hit[:, ::2, ::2] = True  # all others are equal: the first of a window
        if activation == "identity":
            hit[1, 2, 0] = False
            hit[1, 2 + place // 2, place % 2] = True
        else:
            hit[1, 2, 0] = False  # relu lets no gradient through where NaN came out
        np.testing.assert_array_equal(dx.any(axis=3), hit)


@every_compiled_backend
@np.errstate(all="ignore")
@pairwise(value=(np.inf, -np.inf, np.nan, 1e30, 1.0), weight=(np.inf, np.nan, 1e30, 1.0), filters=(9, 40))
def test_a_nan_that_arises_in_a_convolution_is_passed_on(name: str, value: float, weight: float, filters: int) -> None:
    """Of infinities that meet, or of zero times infinity, in a few pixels and filters; too large sums among them."""
    found = []
    for backend in (create_backend(name, "float"), Reference("float")):
        params, rng = Params(), np.random.default_rng(3)
        network = Sequential({"conv": Conv2D(filters, 2), "pool": MaxPool2D(2)})
        network.build(Image(7, 7, 2), params.scope(), backend)
        params.allocate(backend, seed=1)
        factors = rng.integers(-2, 3, (2, 2, 2, filters)).astype(np.float32)
        factors[rng.random(factors.shape) < 0.1] *= np.float32(weight)
        dict(params.named())["conv.weight"].master[...] = backend.asarray(factors)
        params.publish()
        x = rng.integers(-2, 3, (3, 7, 7, 2)).astype(np.float32)
        x[rng.random(x.shape) < 0.1] *= np.float32(value)
        y, _ = network.forward(backend.asarray(x), INFERENCE)
        found.append(np.array(backend.to_host(y)))
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(found[1]))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=50)  # small numbers are lost where large ones cancel
    assert np.isnan(found[1]).any() or not np.isnan(value)
    assert np.isfinite(found[1]).all() or (value, weight) != (1.0, 1.0)


@every_backend
def test_a_nan_in_the_gradient_stays_in_its_place(name: str) -> None:
    """Times zero it would spread over the window, or through what ReLU has closed."""
    backend = create_backend(name, "float")
    dy = np.full((1, 2, 2, 1), np.nan, np.float32)
    winners = backend.asarray(np.full((1, 2, 2, 1), 3, np.uint8))
    dx = backend.max_pool2d_backward(backend.asarray(dy), winners, (1, 4, 4, 1), Window((2, 2), (2, 2)))
    assert np.isnan(backend.to_host(dx)).sum() == 4 and not np.nan_to_num(backend.to_host(dx)).any()
    closed = backend.asarray(np.array([[[[0.0], [-1.0]], [[1.0], [0.0]]]], np.float32))
    dx = backend.to_host(backend.relu_backward(backend.asarray(dy), closed))
    np.testing.assert_array_equal(np.isnan(dx).ravel(), [False, False, True, False])


@every_backend
@pytest.mark.parametrize("bias", [-100.0, 0.0])
def test_a_closed_relu_passes_no_gradient_through_a_pool(name: str, bias: float) -> None:
    backend, params = create_backend(name, "float"), Params()
    network = Sequential({"conv": Conv2D(2, 3, activation="relu"), "pool": MaxPool2D(2)})
    network.build(Image(6, 6, 1), params.scope(), backend)
    params.allocate(backend, seed=0)
    dict(params.named())["conv.bias"].master[...] = bias
    x = backend.asarray(np.zeros((2, 6, 6, 1), np.float32))
    y, backward = network.forward(x, Context(train=True))
    assert not bool(y.any())
    dy = backend.borrow(y.shape)
    dy[...] = 1
    dx = backward(dy)
    assert not bool(dx.any()) and not bool(params.grad.any())
