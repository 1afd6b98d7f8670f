"""Winograd convolution compared with the reference: tiles beyond the image, blocks of tiles, all precisions."""

import numpy as np
import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend
from cupynet.backend.cpu.tiling import Tiling, tiling_of
from cupynet.backend.window import Window
from tests.support.arguments import Shape
from tests.support.comparisons import compare


def around(*padding: int) -> Window:
    above, below, left, right = padding
    return Window((3, 3), padding=((above, below), (left, right)))


# With AVX2, all 3x3 windows in float share a kernel for each pass, which takes seconds to compile, except for tiles of
# 5 x 5: channels fill blocks of three vectors, and filters blocks of two. Tiles of 5 x 5 have the reverse.
SHAPES = {
    "whole tiles": Shape(8, 4, 4, 24, 32, around(1, 1, 1, 1), False, True),
    "several blocks of tiles": Shape(3, 28, 28, 48, 32, around(1, 1, 1, 1), True, True),
    "tiles beyond the image": Shape(5, 7, 9, 20, 30, around(0, 2, 1, 0), True, True),
    "tiles of 5 x 5": Shape(4, 12, 7, 32, 33, around(0, 0, 0, 0), True, True),
    "most padding": Shape(2, 5, 6, 24, 32, around(2, 2, 2, 2), False, False),
    "vectors not full": Shape(3, 10, 7, 17, 50, around(1, 1, 1, 1), True, True),
    "five by five": Shape(3, 12, 9, 20, 50, Window((5, 5), padding=((2, 2), (0, 1))), False, True),
    "more padding than pixels": Shape(4, 2, 3, 20, 50, Window((5, 5), padding=((3, 3), (2, 4))), True, True),
}


@pytest.mark.parametrize("operation", ["conv2d", "conv2d_backward"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, "float") for shape in SHAPES), *(("tiles beyond the image", dtype) for dtype in ("double", "half"))],
)
def test_winograd_convolution_equals_the_reference(operation: str, shape: str, dtype: str) -> None:
    compare(operation, create_backend("numba", dtype), SHAPES[shape], seed=3)


@pytest.mark.parametrize("channels", [17, 32])
@pytest.mark.parametrize("dtype", ["float", "double", "half"])
def test_winograd_convolution_gives_the_same_bits_in_any_batch(dtype: str, channels: int) -> None:
    backend, rng = create_backend("numba", dtype), np.random.default_rng(0)
    stored = backend.policy.storage
    x, weight = (rng.normal(size=shape).astype(stored) for shape in ((7, 7, 7, channels), (3, 3, channels, 32)))
    y, _ = backend.conv2d(x, weight, None, around(1, 1, 1, 1))
    for n in range(7):
        assert np.array_equal(backend.conv2d(x[n : n + 1], weight, None, around(1, 1, 1, 1))[0][0], y[n])


@pytest.mark.parametrize(("size", "side"), [(3, 4), (3, 6), (5, 4)])
def test_the_error_of_winograd_in_single_precision_is_small(size: int, side: int) -> None:
    rng, window = np.random.default_rng(1), Window((size, size))
    images = 2 * side + size - 1
    x, weight = rng.normal(size=(4, images, images, 64)), rng.normal(size=(size, size, 64, 64))
    tiling = Tiling(x.shape[1:], 64, window, 4, side, pools=False)
    exact, _ = create_backend("numpy", "double").conv2d(x, weight, None, window)
    found = np.empty_like(exact, np.float32)
    assert tiling.forward(create_backend("numba"), x.astype("f"), weight.astype("f"), None, found)
    assert abs(found - exact).max() < 1e-5 * abs(exact).max()


def test_tiles_of_another_size_are_used_if_they_save_many_multiplications() -> None:
    """Four is preferred, because its errors are small. Pooling windows must not cross the edges of tiles."""
    outputs = (2, 3, 5, 6, 7, 10, 12, 14, 15, 16, 28)
    found = {n: tiling_of((n + 2, n + 2, 16), 16, Window((3, 3)), 4) for n in outputs}
    sides = {n: tiling.side for n, tiling in found.items() if tiling is not None}
    assert sides == {2: 2, 3: 3, 5: 5, 6: 6, 7: 4, 10: 5, 12: 6, 14: 5, 15: 5, 16: 4, 28: 4}
    pooled = tiling_of((12, 12, 16), 16, Window((3, 3)), 4, pools=True)
    assert pooled is not None and pooled.side == 6


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_a_nan_infinite_or_huge_pixel_reaches_only_its_windows(value: float) -> None:
    """Tiles add and subtract values of different windows, except those in their corners."""
    rng, window, backend = np.random.default_rng(2), Window((5, 5)), create_backend("numba")
    x, weight = (rng.normal(size=shape).astype("f") for shape in ((8, 12, 12, 20), (5, 5, 20, 50)))
    clean, _ = backend.conv2d(x, weight, None, window)
    x[1, 1, 1, 3] = value
    y, _ = backend.conv2d(x, weight, None, window)
    clean[1, :2, :2] = y[1, :2, :2]
    np.testing.assert_allclose(y, clean, rtol=1e-3, atol=1e-3)
    grad = np.zeros_like(weight)
    backend.conv2d_backward(np.ones_like(y), None, x, weight, grad, None, window, need_dx=True)
    grad[:2, :2, 3] = 0
    assert np.isfinite(grad).all()


def test_an_infinite_weight_reaches_only_its_filter() -> None:
    rng, window, backend = np.random.default_rng(2), Window((5, 5)), create_backend("numba")
    x, weight = (rng.normal(size=shape).astype("f") for shape in ((2, 12, 12, 20), (5, 5, 20, 50)))
    weight[2, 2, 3, 4] = np.inf
    y, _ = backend.conv2d(x, weight, None, window)
    assert np.isinf(y[..., 4]).all() and np.isfinite(np.delete(y, 4, axis=3)).all()


def test_a_slice_of_the_channels_is_convolved_like_its_copy() -> None:
    rng, window, backend = np.random.default_rng(4), Window((5, 5)), create_backend("numba")
    x, weight = (rng.normal(size=shape).astype("f") for shape in ((8, 12, 12, 30), (5, 5, 20, 50)))
    part, grads = x[..., :20], (np.zeros_like(weight), np.zeros_like(weight))
    found, expected = (backend.conv2d(images, weight, None, window)[0] for images in (part, part.copy()))
    np.testing.assert_array_equal(found, expected)
    for images, grad in zip((part, part.copy()), grads, strict=True):
        backend.conv2d_backward(found, None, images, weight, grad, None, window, need_dx=False)
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize(("window", "filters"), [(Window((5, 5)), 50), (around(0, 0, 0, 0), 32)])
def test_wide_groups_equal_one_convolution_for_each_group(window: Window, filters: int) -> None:
    rng, backend = np.random.default_rng(3), create_backend("numba")
    x, weight = (rng.normal(size=shape).astype("f") for shape in ((2, 12, 12, 80), (*window.kernel, 40, 2 * filters)))
    y, _ = backend.conv2d(x, weight, None, window, groups=2)
    for group in (0, 1):
        images, own = (
            each[..., group * each.shape[3] // 2 :][..., : each.shape[3] // 2].copy() for each in (x, weight)
        )
        expected, _ = backend.conv2d(images, own, None, window)
        np.testing.assert_array_equal(y[..., group * filters :][..., :filters], expected)
