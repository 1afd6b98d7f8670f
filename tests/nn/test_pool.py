"""Pooling: gradients for every geometry and batch size, padding, fusion with convolutions, NaN."""

import copy
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cupynet.backend import Convolution, Window, create_backend
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.nn import AvgPool2D, Conv2D, Image, MaxPool2D, Sequential
from tests.support.backends import every_backend, every_compiled_backend, every_dtype
from tests.support.comparisons import HALVING
from tests.support.gradients import check_layer, distinct
from tests.support.pairwise import pairwise
from tests.support.passes import built, inferred, passed


@pairwise(
    pool=(MaxPool2D, AvgPool2D),
    kernel=(2, 3, (3, 2), [2, 3]),
    stride=(1, 2, 4, None, (2, 1)),
    padding=(0, 1, "same", (1, 0)),
    image=(Image(6, 7, 2), Image(5, 3, 1), Image(3, 8, 3)),
    batch=(1, 2, 5),
)
def test_gradients_of_pools_of_every_geometry_equal_finite_differences(
    pool: Any, kernel: Any, stride: Any, padding: Any, image: Image, batch: int
) -> None:
    """All values are negative, so zeros around the image would be the largest."""
    check_layer(pool(kernel, stride, padding), image, x=distinct((batch, *image.shape)) - 100)


@every_compiled_backend
@pytest.mark.parametrize(
    ("conv", "pool"),
    [
        (Conv2D(3, 2), MaxPool2D(3, 3, 1)),
        (Conv2D(3, 2, dilation=2), MaxPool2D(2)),
        (Conv2D(6, 2, groups=2), MaxPool2D(2)),
        (Conv2D(3, 2), MaxPool2D(2, 1)),
    ],
    ids=["padding", "gaps", "groups", "overlapping windows"],
)
def test_convolutions_and_pools_not_fused_equal_the_reference(name: str, conv: Conv2D, pool: MaxPool2D) -> None:
    x, found = np.random.default_rng(0).normal(size=(2, 7, 6, 2)), []
    for backend in (create_backend(name, "double"), NumpyBackend("double")):
        network = Sequential(copy.deepcopy([conv, pool]))
        built(network, (7, 6, 2), backend)
        found.append(passed(network, x))
    for numbers, expected in zip(*found, strict=True):
        np.testing.assert_allclose(numbers, expected, rtol=1e-12, atol=1e-12)


@every_backend
@every_dtype
@pytest.mark.parametrize("place", range(6))
def test_the_first_nan_of_a_pooling_window_is_returned_and_gets_the_gradient(name: str, dtype: str, place: int) -> None:
    backend, window = create_backend(name, dtype), Window((2, 3))
    x = np.arange(2 * 2 * 3 * 20.0).reshape(2, 2, 3, 20)
    x[0, [place // 3, 1], [place % 3, 2], 7] = np.nan  # the first of two NaN wins
    y, indices = backend.max_pool2d(backend.asarray(x.astype(backend.policy.storage)), window)
    assert np.flatnonzero(np.isnan(backend.to_host(y))).tolist() == [7]
    dy = backend.asarray(np.ones(y.shape, backend.policy.storage))
    dx = backend.to_host(backend.max_pool2d_backward(dy, indices, x.shape, window))
    won = np.argwhere(dx)
    assert [0, place // 3, place % 3, 7] in won.tolist() and len(won) == 40 and dx[1, 1, 2].all()


@every_compiled_backend
@np.errstate(all="ignore")
@pairwise(value=(np.inf, -np.inf, np.nan, 1e30, 1.0), weight=(np.inf, np.nan, 1e30, 1.0), filters=(9, 40))
def test_a_nan_that_arises_in_a_convolution_is_passed_on_by_the_fused_pool(
    name: str, value: float, weight: float, filters: int
) -> None:
    """The NaN arises from infinities of both signs or from zero times infinity, in a few pixels and filters."""
    rng, found = np.random.default_rng(3), []
    factors = rng.integers(-2, 3, (2, 2, 2, filters)).astype(np.float32)
    factors[rng.random(factors.shape) < 0.1] *= np.float32(weight)
    x = rng.integers(-2, 3, (3, 7, 7, 2)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] *= np.float32(value)
    for backend in (create_backend(name, "float"), NumpyBackend("float")):
        network = Sequential([Conv2D(filters, 2), MaxPool2D(2)])
        built(network, (7, 7, 2), backend, weight=factors)
        found.append(inferred(network, x))
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(found[1]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=50)  # small numbers are lost where large ones cancel


def test_a_nan_pixel_reaches_only_its_windows_in_a_fused_convolution_and_pool() -> None:
    """Winograd's algorithm would spread a NaN over its tile, unless it is in a corner."""
    pytest.importorskip("numba")
    rng, backend, reference = np.random.default_rng(0), create_backend("numba", "float"), NumpyBackend("float")
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 12, 12, 20), (5, 5, 20, 50)))
    x[1, 1, 1, 2] = np.nan
    pair, window = backend.fused_pair(Convolution((12, 12, 20), 50, Window((5, 5))), HALVING), Window((5, 5))
    assert pair is not None
    y, saved = pair.forward(x, (weight, None))
    expected, _ = reference.max_pool2d(reference.conv2d(x, weight, None, window)[0], HALVING)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    grad = np.zeros_like(weight)
    pair.backward(np.ones_like(y), saved, x, (weight, None), (grad, None), need_dx=True)
    grad[:2, :2, 2] = 0
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_gradients_after_a_relu_do_not_depend_on_the_share_of_zeros(share: float) -> None:
    """Dense gradients go through Winograd's algorithm, sparse ones through kernels that skip zeros."""
    pytest.importorskip("numba")
    rng, backend, reference = np.random.default_rng(0), create_backend("numba", "float"), NumpyBackend("float")
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 12, 12, 20), (5, 5, 20, 50)))
    pair = backend.fused_pair(Convolution((12, 12, 20), 50, Window((5, 5)), "relu"), HALVING)
    assert pair is not None
    y, saved = pair.forward(x, (weight, None))
    dy = rng.normal(size=y.shape).astype(np.float32) * (rng.random(y.shape) < share)
    found, expected = np.ones_like(weight), np.ones_like(weight)
    dx = pair.backward(dy, saved, x, (weight, None), (found, None), need_dx=True)
    through = reference.max_pool2d_backward(dy, saved[0], (2, 8, 8, 50), HALVING)
    arguments = through, reference.im2col(x, Window((5, 5))), x, weight, expected, None, Window((5, 5))
    expected_dx = reference.conv2d_backward(*arguments, need_dx=True)
    assert dx is not None and expected_dx is not None
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_gradients_of_zeros_compile_kernels_for_dense_and_for_sparse_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up has no other gradients."""
    pytest.importorskip("numba")
    from cupynet.backend.cpu.kernels import rows, winograd

    dense, sparse = Mock(wraps=winograd.backward), Mock(wraps=rows.weight_gradient)
    monkeypatch.setattr(winograd, "backward", dense)
    monkeypatch.setattr(rows, "weight_gradient", sparse)
    pair = create_backend("numba", "float").fused_pair(Convolution((12, 12, 20), 50, Window((5, 5)), "relu"), HALVING)
    assert pair is not None
    x, weight = np.zeros((2, 12, 12, 20), np.float32), np.ones((5, 5, 20, 50), np.float32)
    y, saved = pair.forward(x, (weight, None))
    pair.backward(np.zeros_like(y), saved, x, (weight, None), (np.zeros_like(weight), None), need_dx=True)
    assert dense.called and sparse.called
