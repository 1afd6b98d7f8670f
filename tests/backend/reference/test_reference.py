"""The reference implementation, compared with plain loops."""

from typing import Any

import numpy as np
import pytest

from cupynet.backend import Window
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from tests.support.arguments import SHAPES, Shape, grouped

Array = Any
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))


def windows(x: Array, window: Window, around: float = 0.0) -> Array:
    """Return windows (N, H', W', K_h, K_w, C), by loops. around: the padding."""
    (top, bottom), (left, right) = window.padding
    (down, across), (gap_down, gap_across) = window.stride, window.dilation
    kh, kw = (gap * (k - 1) + 1 for gap, k in zip(window.dilation, window.kernel, strict=True))
    n, height, width, channels = x.shape
    padded = np.full((n, height + top + bottom, width + left + right, channels), around)
    padded[:, top : top + height, left : left + width] = x
    rows = range(0, padded.shape[1] - kh + 1, down)
    cols = range(0, padded.shape[2] - kw + 1, across)
    return np.array([[[p[r : r + kh : gap_down, c : c + kw : gap_across] for c in cols] for r in rows] for p in padded])


def normal(*shape: int) -> Array:
    return np.random.default_rng(shape).normal(size=shape)


@every_shape
def test_convolution_is_a_sum_over_each_window(shape: Shape) -> None:
    """Each group of filters sees its own channels."""
    for _, groups, image, size in grouped(shape):
        x, weight, bias = normal(*image), normal(*size), normal(size[3])
        y, _ = NumpyBackend("double").conv2d(x, weight, bias, shape.window, groups=groups)
        looked_at = windows(x, shape.window)
        channels, filters = size[2], size[3] // groups
        expected = np.empty((*looked_at.shape[:3], size[3]))
        for n, i, j, o in np.ndindex(*expected.shape):
            first = o // filters * channels
            seen = looked_at[n, i, j, :, :, first : first + channels]
            expected[n, i, j, o] = (seen * weight[..., o]).sum() + bias[o]
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


@every_shape
def test_im2col_returns_windows_and_col2im_is_its_transpose(shape: Shape) -> None:
    backend, x = NumpyBackend("double"), normal(*shape.image)
    columns = backend.im2col(x, shape.window)
    np.testing.assert_array_equal(columns, windows(x, shape.window).reshape(columns.shape))
    v = normal(*columns.shape)
    back = backend.col2im(v, x.shape, shape.window)
    assert (columns * v).sum() == pytest.approx((x * back).sum(), rel=1e-10, abs=1e-10)  # the transpose


@every_shape
def test_max_pooling_takes_the_first_largest_of_each_window(shape: Shape) -> None:
    window, size = shape.pooled
    x = np.random.default_rng(size).integers(-2, 3, size).astype(float)
    y, indices = NumpyBackend("double").max_pool2d(x, window)
    looked_at = windows(x, window, -np.inf).reshape(*y.shape[:3], window.size, -1)
    np.testing.assert_array_equal(y, looked_at.max(axis=3))
    np.testing.assert_array_equal(indices, looked_at.argmax(axis=3))  # argmax returns the first


@every_shape
def test_average_pooling_leaves_out_the_padding(shape: Shape) -> None:
    window, size = shape.pooled
    backend, x = NumpyBackend("double"), normal(*size)
    y = backend.avg_pool2d(x, window)
    np.testing.assert_allclose(y, np.nanmean(windows(x, window, np.nan), axis=(3, 4)), rtol=1e-12, atol=1e-14)
    v = normal(*y.shape)
    back = backend.avg_pool2d_backward(v, size, window)
    assert (y * v).sum() == pytest.approx((x * back).sum(), rel=1e-10, abs=1e-10)  # the transpose
