"""Winograd convolution compared with the reference: tiles beyond the image, blocks of tiles, all precisions."""

import numpy as np
import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend
from cupynet.backend.cpu.kernels import amx
from cupynet.backend.window import Window
from tests.support.arguments import Shape
from tests.support.backends import NO_BFLOAT16
from tests.support.comparisons import compare
from tests.support.pairwise import pairwise


def around(*padding: int) -> Window:
    above, below, left, right = padding
    return Window((3, 3), padding=((above, below), (left, right)))


SHAPES = {
    "a whole tile": Shape(1, 4, 4, 16, 16, around(1, 1, 1, 1), False, True),
    "several blocks of tiles": Shape(3, 28, 28, 16, 32, around(1, 1, 1, 1), True, True),
    "tiles beyond the image": Shape(5, 7, 9, 32, 48, around(0, 2, 1, 0), True, True),
    "no padding": Shape(2, 10, 9, 48, 16, around(0, 0, 0, 0), True, False),
    "most padding": Shape(2, 5, 6, 16, 64, around(2, 2, 2, 2), False, True),
}
DTYPES = ("float", "double", "half") if NO_BFLOAT16 else ("float", "double", "half", "bfloat16")


@pairwise(operation=("conv2d", "conv2d_backward"), shape=SHAPES, dtype=DTYPES)
def test_it_equals_the_reference(monkeypatch: pytest.MonkeyPatch, operation: str, shape: Shape, dtype: str) -> None:
    monkeypatch.setattr(amx, "available", lambda: False)
    compare(operation, create_backend("numba", dtype), shape, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_image_gives_the_same_bits_in_any_batch(dtype: str) -> None:
    backend, rng = create_backend("numba", dtype), np.random.default_rng(0)
    stored = backend.policy.storage
    x, weight = (rng.normal(size=shape).astype(stored) for shape in ((7, 7, 7, 16), (3, 3, 16, 32)))
    y, _ = backend.conv2d(x, weight, None, around(1, 1, 1, 1))
    for n in range(7):
        assert np.array_equal(backend.conv2d(x[n : n + 1], weight, None, around(1, 1, 1, 1))[0][0], y[n])


def test_the_error_of_single_precision_is_small() -> None:
    rng, window = np.random.default_rng(1), around(1, 1, 1, 1)
    x, weight = rng.normal(size=(4, 16, 16, 64)), rng.normal(size=(3, 3, 64, 64))
    exact, _ = create_backend("numpy", "double").conv2d(x, weight, None, window)
    found, _ = create_backend("numba").conv2d(x.astype("f"), weight.astype("f"), None, window)
    assert abs(found - exact).max() < 1e-5 * abs(exact).max()
