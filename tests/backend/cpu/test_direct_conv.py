"""The CPU's direct convolution compared with the reference, at the ends of tiles, chunks and vectors."""

import itertools

import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend
from cupynet.backend.cpu.kernels import tiles, vectors
from cupynet.backend.window import Window
from tests.support.arguments import Shape
from tests.support.comparisons import compare

ROOM = ((1, 1), (1, 1))
# sums longer than a chunk, columns that do not fill a vector, rows that do not fill a tile; widths of LeNet
SHAPES = {
    "one pixel": Shape(1, 1, 1, 1, 1, Window((1, 1)), True, True),
    "a chunk and a rest": Shape(2, 5, 4, 33, 20, Window((4, 2), (1, 1), ROOM), True, True),
    "two blocks and a rest": Shape(1, 5, 5, 3, 50, Window((2, 2)), True, True),
    "many patches": Shape(2, 21, 20, 3, 20, Window((3, 3), (1, 1), ROOM), True, True),
    "pixels that no window sees": Shape(3, 9, 8, 3, 20, Window((2, 1), (4, 3)), True, True),
    "gaps": Shape(2, 9, 11, 3, 50, Window((3, 2), (1, 2), ((2, 1), (0, 3)), (2, 3)), True, True),
    "places that see zeros alone": Shape(2, 2, 3, 3, 20, Window((5, 5), (2, 2), ((3, 3), (3, 3))), True, True),
}


@pytest.mark.parametrize("operation", ["conv2d", "conv2d_backward"])
@pytest.mark.parametrize("shape", SHAPES)
def test_direct_convolution_equals_the_reference(operation: str, shape: str) -> None:
    compare(operation, create_backend("numba"), SHAPES[shape], seed=7)


def test_tiles_fill_the_registers_and_no_more() -> None:
    width, sums = vectors.registers()
    for columns, itemsize in itertools.product(range(1, 80), (4, 8)):
        height, across, rest = tiles.tile(columns, itemsize)
        across_tile = len(vectors.widths(across, width // itemsize))
        assert (
            height >= 1 and across_tile * height <= sums and (columns - rest) % across == 0 <= rest < across <= columns
        )
