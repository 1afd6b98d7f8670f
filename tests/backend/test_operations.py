"""Every backend computes the same as the reference, for each operation, each precision and odd shapes.

tests/support/comparisons.py defines the operations. tests/backend/reference/test_reference.py compares the reference
itself with plain loops.
"""

import inspect
import tracemalloc
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, Convolution, UpdateScalars, Window, create_backend
from cupynet.backend.update_rules import RULES
from tests.support.arguments import CHOSEN, HALVING, SHAPES, Shape
from tests.support.backends import NO_BFLOAT16, every_backend, every_compiled_backend
from tests.support.comparisons import COMPARISONS, ELSEWHERE, EXACT, compare

# A fused pair is compiled for each shape, so only a few are tested, all large enough to pool; one is dilated.
PAIRED = [SHAPES[i] for i in (0, 3, 8, 9, 12, 21)]
PAIRED_CHOSEN = [Shape(2, 7, 6, 3, 6, Window((3, 3), padding=((1, 1), (1, 1))), True, True)]
# bfloat16 comes last: numba's kernels convert it to float, like half, and cpu/test_narrow.py tests the conversions
OTHER_PRECISIONS = ("half", "double") if NO_BFLOAT16 else ("half", "double", "bfloat16")


@every_backend
@pytest.mark.parametrize("operation", COMPARISONS)
def test_a_backend_equals_the_reference(name: str, operation: str) -> None:
    """Test single precision on all shapes, and other precisions, whose kernels have the same source, on a few."""
    shapes, chosen = (PAIRED, PAIRED_CHOSEN) if operation == "fused_pair" else (SHAPES, CHOSEN)
    for seed, shape in enumerate(shapes):
        compare(operation, create_backend(name, "float"), shape, seed)
    for dtype in OTHER_PRECISIONS[: 2 if name == "numba" else 3]:
        backend = create_backend(name, dtype)
        for seed, shape in enumerate(chosen):
            compare(operation, backend, shape, seed)


LENET = {
    "conv1": Shape(3, 28, 28, 1, 20, Window((5, 5)), True, True),
    "conv2": Shape(2, 12, 12, 20, 50, Window((5, 5)), True, True),
    "color": Shape(2, 32, 32, 3, 16, Window((3, 3), (2, 2), ((0, 1), (0, 1))), True, True),
    # several blocks of values and of filters, and a remainder
    "blocks": Shape(1, 11, 10, 33, 145, Window((3, 3), padding=((1, 1), (1, 1))), True, True, groups=True),
    "flat window": Shape(2, 12, 14, 20, 50, Window((3, 5), (1, 2), ((1, 1), (0, 2))), True, True),
    "same": Shape(3, 12, 18, 20, 50, Window((3, 3), padding=((1, 1), (1, 1))), True, True),
    # outputs that tiles of 4 x 4, or of 6 x 6 before pooling, do not divide evenly, and more of them than are pooled
    "incomplete tiles": Shape(3, 13, 15, 20, 50, Window((3, 3)), True, True),
    "outputs left over": Shape(2, 13, 12, 20, 50, Window((5, 5)), True, True),
    "tall window": Shape(2, 28, 20, 1, 6, Window((7, 3), (2, 1)), True, True),
}


@every_compiled_backend
@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("conv2d", "float"), ("conv2d_backward", "float"), ("max_pool2d", "half"), ("max_pool2d_backward", "half")],
)
@pytest.mark.parametrize("case", LENET)
def test_a_backend_equals_the_reference_at_real_sizes(name: str, operation: str, dtype: str, case: str) -> None:
    compare(operation, create_backend(name, dtype), LENET[case], seed=5)


FUSED = {name: shape for name, shape in LENET.items() if name not in ("color", "blocks")}
# numba sums the weight gradient over as many images at a time as fit in the L1 cache
FUSED["many images"] = Shape(19, 10, 10, 20, 3, Window((3, 3)), False, False)


@every_compiled_backend
@pytest.mark.parametrize("case", FUSED)
def test_a_fused_pair_equals_the_reference_at_real_sizes(name: str, case: str) -> None:
    backend, shape = create_backend(name, "float"), FUSED[case]
    convolution = Convolution(shape.image[1:], shape.outputs, shape.window, "relu")
    assert backend.fused_pair(convolution, HALVING) is not None
    compare("fused_pair", backend, shape, seed=5)


def test_every_operation_is_compared_or_tested_elsewhere() -> None:
    public = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    assert COMPARISONS.keys() | ELSEWHERE == public
    assert not COMPARISONS.keys() & ELSEWHERE and COMPARISONS.keys() >= EXACT


@every_backend
@pytest.mark.parametrize(("kernel", "itemsize"), [(15, 1), (16, 4)])
def test_max_pooling_of_more_than_255_pixels_uses_wider_indices(name: str, kernel: int, itemsize: int) -> None:
    backend, window = create_backend(name, "float"), Window((kernel, kernel))
    x = np.zeros((1, kernel, kernel, 1), np.float32)
    x[0, -1, -1, 0] = 1
    y, indices = backend.max_pool2d(backend.asarray(x), window)
    assert (int(backend.to_host(indices).item()), indices.itemsize) == (kernel * kernel - 1, itemsize)
    dx = backend.max_pool2d_backward(y, indices, x.shape, window)
    np.testing.assert_array_equal(backend.to_host(dx), x)


@every_backend
def test_operations_take_empty_vectors(name: str) -> None:
    """A pipeline's stage may have no weights, and a worker may have nothing to send."""
    backend = create_backend(name, "half")
    stored, wide = backend.policy.storage, backend.policy.accumulate

    def none(dtype: Any, *shape: int) -> Any:
        return backend.allocate((0, *shape), dtype)

    backend.convert(none(wide), none(stored))
    backend.relu_backward(none(stored, 3), backend.softmax(backend.relu(none(stored, 3))))
    backend.pointwise("tanh", none(stored, 3), none(stored, 3))
    backend.pointwise_backward("tanh", none(stored, 3), none(stored, 3))
    backend.weighted_sum(none(wide), [none(wide), none(wide)], [0.5, 0.5])
    assert float(backend.to_host(backend.total(none(wide)))) == 0
    norm = backend.squared_norm(none(wide))
    assert float(backend.to_host(norm)) == 0
    backend.clip_norm(none(wide), norm, 1.0)
    for rule in RULES.values():
        backend.move_weights(rule, none(wide), none(wide), [none(wide) for _ in rule.states], UpdateScalars(rate=0.5))


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_a_weighted_sum_needs_little_memory(name: str) -> None:
    """Training computes weighted sums in every iteration. Working in blocks does not change the sum."""
    backend, rng = create_backend(name, "float"), np.random.default_rng(0)
    mean, weights = rng.normal(size=(2, 1_000_003)).astype(np.float32)
    expected = (mean * np.float64(0.9) + weights * np.float64(0.1)).astype(np.float32)
    tracemalloc.start()
    backend.weighted_sum(mean, [mean, weights], [0.9, 0.1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < mean.nbytes / 4
    np.testing.assert_array_equal(mean, expected)
