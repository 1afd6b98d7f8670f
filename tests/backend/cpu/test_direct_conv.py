"""The CPU's direct convolution compared with the reference, at the ends of tiles, chunks and vectors."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend
from cupynet.backend.cpu.kernels import tiles, vectors
from cupynet.backend.window import Window

ROOM = ((1, 1), (1, 1))


class Case(NamedTuple):
    images: tuple[int, int, int]
    channels: int
    filters: int
    window: Window


# sums longer than a chunk, columns that do not fill a vector, rows that do not fill a tile; widths of LeNet
CASES = {
    "one pixel": Case((1, 1, 1), 1, 1, Window((1, 1))),
    "a chunk and a rest": Case((2, 5, 4), 33, 20, Window((4, 2), (1, 1), ROOM)),
    "two blocks and a rest": Case((1, 5, 5), 3, 50, Window((2, 2))),
    "many patches": Case((2, 21, 20), 3, 20, Window((3, 3), (1, 1), ROOM)),
    "pixels that no window sees": Case((3, 9, 8), 3, 20, Window((2, 1), (4, 3))),
    "gaps": Case((2, 9, 11), 3, 50, Window((3, 2), (1, 2), ((2, 1), (0, 3)), (2, 3))),
    "places that see zeros alone": Case((2, 2, 3), 3, 20, Window((5, 5), (2, 2), ((3, 3), (3, 3)))),
}


@pytest.mark.parametrize("name", CASES)
def test_direct_convolution_equals_the_reference(name: str) -> None:
    images, channels, filters, window = CASES[name]
    rng = np.random.default_rng(7)
    x, weight = rng.normal(size=(*images, channels)), rng.normal(size=(*window.kernel, channels, filters))
    bias, grad = rng.normal(size=filters), rng.normal(size=weight.shape)
    dy = rng.normal(size=(images[0], *window.output(*images[1:]), filters))
    found = []
    for backend in (create_backend("numba", "float"), create_backend("numpy", "double")):
        of_x, of_weight, of_bias, added, of_dy = (a.astype(backend.policy.storage) for a in (x, weight, bias, grad, dy))
        y, kept = backend.conv2d(of_x, of_weight, of_bias, window)
        assert (kept is None) == (backend.name == "numba")
        of_bias[...] = 0
        dx = backend.conv2d_backward(of_dy, kept, of_x, of_weight, added, of_bias, window, need_dx=True)
        found.append([np.array(array) for array in (y, added, of_bias, dx)])
    for own, expected in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-4 * max(1, abs(expected).max()))


def test_padding_around_an_image_keeps_nothing_of_the_previous_image() -> None:
    """Padded images are borrowed from the workspace with arbitrary content."""
    backend, window = create_backend("numba"), Window((3, 3), (1, 1), ROOM)
    weight = np.ones((3, 3, 2, 6), np.float32)
    backend.borrow((6 * 6 * 2,))[...] = np.nan
    y, _ = backend.conv2d(np.ones((2, 4, 4, 2), np.float32), weight, None, window)
    assert y[0, 0].tolist() == [[8] * 6, [12] * 6, [12] * 6, [8] * 6] and np.array_equal(y[0], y[1])


def test_tiles_fill_the_registers_and_no_more() -> None:
    width, sums = vectors.registers()
    for columns, itemsize in itertools.product(range(1, 80), (4, 8)):
        height, across, rest = tiles.tile(columns, itemsize)
        across_tile = len(vectors.widths(across, width // itemsize))
        assert (
            height >= 1 and across_tile * height <= sums and (columns - rest) % across == 0 <= rest < across <= columns
        )
