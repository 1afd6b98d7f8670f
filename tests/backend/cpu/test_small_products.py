"""Dense layers with small batches compared with the reference, at the ends of unrolled loops and vectors."""

import numpy as np
import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend

BOUNDS = {"double": 1e-13, "float": 1e-5, "half": 2e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("outputs", [64, 67])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_a_small_batch_has_the_gradients_of_the_reference(count: int, outputs: int, dtype: str) -> None:
    found, rng = [], np.random.default_rng(count)
    x, weight, dy, before = (
        rng.normal(size=size) for size in ((count, 7), (7, outputs), (count, outputs), (7, outputs))
    )
    for backend in (create_backend("numba", dtype), create_backend("numpy", dtype)):
        of_x, of_weight, of_dy = (array.astype(backend.policy.storage) for array in (x, weight, dy))
        grad = before.astype(backend.policy.accumulate)
        dx = backend.dense_backward(of_dy, of_x, of_weight, grad, None, need_dx=True)
        found.append((np.array(dx, np.float64), grad))
    for own, expected in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=BOUNDS[dtype] * abs(expected).max())
