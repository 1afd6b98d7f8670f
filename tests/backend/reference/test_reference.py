"""The reference itself, compared with plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import Window
from tests.support.backends import Reference
from tests.support.comparisons import SHAPES

Array = Any


def windows(x: Array, window: Window, around: float = 0.0) -> Array:
    """(N, H', W', K_h, K_w, C), by loops; `around` the image."""
    (top, bottom), (left, right) = window.padding
    (down, across), (gap_down, gap_across) = window.stride, window.dilation
    kh, kw = (gap * (k - 1) + 1 for gap, k in zip(window.dilation, window.kernel, strict=True))
    n, height, width, channels = x.shape
    padded = np.full((n, height + top + bottom, width + left + right, channels), around)
    padded[:, top : top + height, left : left + width] = x
    rows = range(0, padded.shape[1] - kh + 1, down)
    cols = range(0, padded.shape[2] - kw + 1, across)
    return np.array([[[p[r : r + kh : gap_down, c : c + kw : gap_across] for c in cols] for r in rows] for p in padded])


def test_convolution_is_a_sum_over_each_window() -> None:
    for seed, shape in enumerate(SHAPES):
        rng, backend = np.random.default_rng(seed), Reference("double")
        x = rng.normal(size=shape.image)
        weight = rng.normal(size=(*shape.window.kernel, shape.channels, shape.outputs))
        bias = rng.normal(size=shape.outputs)
        looked_at = windows(x, shape.window)
        y, _ = backend.conv2d(x, weight, bias, shape.window)
        expected = np.empty((*looked_at.shape[:3], shape.outputs))
        for place in np.ndindex(*expected.shape):
            expected[place] = (looked_at[place[:3]] * weight[..., place[3]]).sum() + bias[place[3]]
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)


def test_windows_as_rows_and_back() -> None:
    for seed, shape in enumerate(SHAPES):
        rng, backend = np.random.default_rng(seed), Reference("double")
        x = rng.normal(size=shape.image)
        columns = backend.im2col(x, shape.window)
        looked_at = windows(x, shape.window)
        np.testing.assert_array_equal(columns, looked_at.reshape(columns.shape))
        # the transpose: <im2col(x), v> = <x, col2im(v)> for any v
        v = rng.normal(size=columns.shape)
        back = backend.col2im(v, x.shape, shape.window)
        assert (columns * v).sum() == pytest.approx((x * back).sum(), rel=1e-10, abs=1e-10)


def test_pooling_takes_the_first_largest_of_each_window() -> None:
    for seed, shape in enumerate(SHAPES):
        rng, backend = np.random.default_rng(seed), Reference("double")
        window, size = shape.pooled
        x = rng.integers(-2, 3, size).astype(float)
        y, winners = backend.max_pool2d(x, window)
        looked_at = windows(x, window, -np.inf).reshape(*y.shape[:3], window.places, -1)
        np.testing.assert_array_equal(y, looked_at.max(axis=3))
        np.testing.assert_array_equal(winners, looked_at.argmax(axis=3))  # argmax: the first


def test_means_leave_out_the_padding() -> None:
    for seed, shape in enumerate(SHAPES):
        rng, backend = np.random.default_rng(seed), Reference("double")
        window, size = shape.pooled
        x = rng.normal(size=size)
        y = backend.avg_pool2d(x, window)
        np.testing.assert_allclose(y, np.nanmean(windows(x, window, np.nan), axis=(3, 4)), rtol=1e-12, atol=1e-14)
        # the transpose: <mean(x), v> = <x, back(v)> for any v
        v = rng.normal(size=y.shape)
        back = backend.avg_pool2d_backward(v, size, window)
        assert (y * v).sum() == pytest.approx((x * back).sum(), rel=1e-10, abs=1e-10)


def test_winners_of_windows_with_more_than_255_places() -> None:
    backend = Reference("float")
    for kernel, size in ((15, 1), (16, 4)):
        x = np.zeros((1, kernel, kernel, 1), np.float32)
        x[0, -1, -1, 0] = 1
        _, winners = backend.max_pool2d(x, Window((kernel, kernel)))
        assert (winners.item(), winners.itemsize) == (kernel * kernel - 1, size)


@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (1, 7), (5, 2), (4, 6)])
def test_softmax_and_its_loss_follow_the_textbook(rows: int, classes: int) -> None:
    rng, backend = np.random.default_rng(rows), Reference("double")
    logits, labels = rng.normal(0, 3, (rows, classes)), rng.integers(0, classes, rows)
    exponentials = np.exp(logits)
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    losses, gradient = backend.softmax_cross_entropy(logits, labels)
    np.testing.assert_allclose(losses, [-np.log(p[label]) for p, label in zip(probabilities, labels, strict=True)])
    onehot = np.eye(classes)[labels]
    np.testing.assert_allclose(gradient, (probabilities - onehot) / rows, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(backend.softmax(logits), probabilities, rtol=1e-12)
