"""CupyBackend on CuPy's stand-in: small launches, sums, fused networks.

tests/backend/test_operations.py compares its operations in launches of the usual size.
"""

from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, Window, create_backend
from cupynet.backend.cuda.backend import CupyBackend
from cupynet.nn import Conv2D, Dense, Image, MaxPool2D, Model, Sequential
from cupynet.optim import Nesterov
from tests.support.arguments import CHOSEN, Shape
from tests.support.comparisons import COMPARISONS, compare
from tests.support.networks import train_step
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("devices")


@pytest.mark.parametrize("dtype", ["float", "half"])
@pytest.mark.parametrize("operation", COMPARISONS)
def test_small_launches_equal_the_reference(operation: str, dtype: str) -> None:
    for seed, shape in enumerate(CHOSEN):
        compare(operation, CupyBackend(dtype, 0, 48, 1), shape, seed)  # 48 threads per block, and one block


LARGE = {
    "inside": Shape(2, 9, 8, 8, 1, Window((7, 6)), True, True),
    "padded": Shape(2, 9, 8, 4, 1, Window((6, 7), (1, 1), ((3, 2), (2, 4))), True, True),
}


@pairwise(operation=("im2col", "col2im"), shape=LARGE, dtype=("half", "float", "double"))
def test_large_windows_equal_the_reference(operation: str, shape: Shape, dtype: str) -> None:
    compare(operation, CupyBackend(dtype), shape, seed=1)


def test_a_product_is_not_rounded_to_half_before_it_is_added_to_a_gradient() -> None:
    """2049 and 90000 are sums of products that half cannot represent."""
    backend = CupyBackend("half")
    x = backend.asarray(np.array([[1, 300], [1, 0]], np.float16))
    dy = backend.asarray(np.array([[2048, 300], [1, 0]], np.float16))
    weight, bias = backend.asarray(np.zeros((2, 2), np.float16)), backend.asarray(np.zeros(2, np.float32))
    grad = backend.asarray(np.ones((2, 2), np.float32))
    backend.dense_backward(dy, x, weight, grad, bias, need_dx=False)
    np.testing.assert_array_equal(backend.to_host(grad), [[2050, 301], [614401, 90001]])
    np.testing.assert_array_equal(backend.to_host(bias), [2049, 300])


def trained(backend: Backend, activation: str) -> tuple[Model, Any]:
    layers = {"conv": Conv2D(4, 3, padding=1, activation=activation), "pool": MaxPool2D(2)}
    layers |= {"conv2": Conv2D(5, 2, activation=activation), "pool2": MaxPool2D(2, 1), "output": Dense(3)}
    rng = np.random.default_rng(2)
    images, labels = backend.asarray(rng.normal(size=(4, 8, 8, 2))), backend.asarray(rng.integers(0, 3, 4))
    model, optimizer = Model(Sequential(layers), Image(8, 8, 2), backend, seed=1), Nesterov(0.1, l2=0.01)
    optimizer.max_grad_norm = 0.5
    optimizer.init(model.params, backend)
    for iteration in range(3):
        train_step(model, images, labels, optimizer, iteration)
    assert backend.workspace.on_loan == 0
    return model, model.scores(images)


@pytest.mark.parametrize(("activation", "fused"), [("relu", True), ("tanh", True), ("softmax", False), ("silu", False)])
def test_a_network_trains_on_cupy_as_on_numpy_fused_or_not(activation: str, fused: bool) -> None:
    """A convolution, its activation and its pool are one operation here if the activation is monotone."""
    found, scores = trained(CupyBackend("double"), activation)
    expected, expected_scores = trained(create_backend("numpy", "double"), activation)
    network: Any = found.network
    assert (network.together() == [["conv", "pool"], ["conv2", "pool2"], ["output"]]) == fused
    for name, weight in expected.weights().items():
        np.testing.assert_allclose(found.weights()[name], weight, rtol=1e-10, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-10, atol=1e-12)
