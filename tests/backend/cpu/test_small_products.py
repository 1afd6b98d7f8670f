"""Dense layers with small batches compared with the reference, at the ends of unrolled loops and vectors."""

import pytest

pytest.importorskip("numba")

from cupynet.backend import Window, create_backend
from tests.support.arguments import Shape
from tests.support.comparisons import compare


@pytest.mark.parametrize("dtype", ["double", "float", "half", "bfloat16"])
@pytest.mark.parametrize("outputs", [64, 67])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_a_small_batch_has_the_gradients_of_the_reference(count: int, outputs: int, dtype: str) -> None:
    shape = Shape(count, 1, 1, 7, outputs, Window((1, 1)), False, True)
    compare("dense_backward", create_backend("numba", dtype), shape, seed=count)
