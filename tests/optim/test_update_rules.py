"""Fifty steps of each optimizer compared with PyTorch's, in double (values from tests/golden/make_optim.py)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import optim
from cupynet.backend import Backend, create_backend
from cupynet.nn.params import Params
from tests.support.backends import every_backend

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "optim.npz")
RATE = 0.05
KEPT = [0, 1, 4, 9, 24, 49]
OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "optimizer/sgd": lambda: optim.SGD(RATE, l2=0.01),
    "optimizer/momentum": lambda: optim.Momentum(RATE, 0.8),
    "optimizer/nesterov": lambda: optim.Nesterov(RATE, 0.8),
    "optimizer/adam": lambda: optim.Adam(RATE, 0.8, 0.95),
    "optimizer/adam, l2": lambda: optim.Adam(RATE, l2=0.1),
    "optimizer/adamw": lambda: optim.AdamW(RATE, weight_decay=0.1),
    "optimizer/amsgrad": lambda: optim.AMSGrad(RATE, 0.8, 0.9),
    "optimizer/adamax": lambda: optim.AdaMax(RATE),
    "optimizer/nadam": lambda: optim.Nadam(RATE),
    "optimizer/nadam, decayed": lambda: optim.Nadam(RATE, weight_decay=0.1),
    "optimizer/adagrad": lambda: optim.AdaGrad(RATE),
    "optimizer/rmsprop": lambda: optim.RMSProp(RATE, 0.9),
    "optimizer/adadelta": lambda: optim.AdaDelta(1.0, 0.9),
    "clipped/value": lambda: optim.Momentum(RATE, 0.8, clip_value=0.4),
    "clipped/norm": lambda: optim.Momentum(RATE, 0.8, clip_layer_norm=2.0),  # the network has only one layer
}


def params_of(backend: Backend, values: dict[str, Any]) -> Params:
    """Declare weights by name. Biases do not decay."""
    params = Params()
    for name, value in values.items():
        layer, _, kind = name.rpartition(".")
        start = np.array(value, float)
        params.scope(layer).add(kind, start.shape, given(start), decay=kind == "weight")
    params.allocate(backend, seed=1)
    return params


def given(start: Any) -> Any:
    return lambda rng, shape: start


def stepped(optimizer: optim.Optimizer, params: Params, backend: Backend) -> dict[str, Any]:
    optimizer.init(params, backend)
    optimizer.step(params, 0)
    return {name: np.array(backend.to_host(p.master)) for name, p in params.named()}


def steps(name: str, optimizer: optim.Optimizer, start: Any, gradients: Any) -> Any:
    backend, found = create_backend(name, "double"), []
    params = params_of(backend, {"a.weight": start})
    ((_, weight),) = params.named()
    optimizer.init(params, backend)
    for iteration, gradient in enumerate(gradients):
        weight.grad += backend.asarray(gradient)
        optimizer.step(params, iteration)
        found.append(np.array(backend.to_host(weight.master)))
    return np.array(found)


@every_backend
@pytest.mark.parametrize("kind", [name for name in GOLDEN if name.startswith(("optimizer/", "clipped/"))])
def test_optimizers_move_weights_as_in_pytorch(name: str, kind: str) -> None:
    found = steps(name, OPTIMIZERS[kind](), GOLDEN["start"], GOLDEN["gradients"])[KEPT]
    tolerance = 2e-6 if kind == "clipped/norm" else 1e-6  # PyTorch's norms are a millionth too large
    np.testing.assert_allclose(found, GOLDEN[kind], rtol=tolerance, atol=1e-3 * tolerance)


@every_backend
def test_lamb_follows_its_paper(name: str) -> None:
    """The expected values follow algorithm 2 of You et al. 2020, with phi the identity."""
    beta1, beta2, decay, epsilon = 0.9, 0.99, 0.1, 1e-6
    weight, mean, squares, expected = GOLDEN["start"], 0.0, 0.0, []
    for t, gradient in enumerate(GOLDEN["gradients"], 1):
        mean = beta1 * mean + (1 - beta1) * gradient
        squares = beta2 * squares + (1 - beta2) * gradient**2
        step = mean / (1 - beta1**t) / (np.sqrt(squares / (1 - beta2**t)) + epsilon) + decay * weight
        weight = weight - RATE * np.linalg.norm(weight) / np.linalg.norm(step) * step
        expected.append(weight)
    found = steps(
        name, optim.LAMB(RATE, beta1=beta1, beta2=beta2, weight_decay=decay), GOLDEN["start"], GOLDEN["gradients"]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@every_backend
def test_lamb_scales_each_array_by_its_norm_and_biases_move_as_in_adam(name: str) -> None:
    """An array of zeros also moves as in Adam."""
    backend = create_backend(name, "float")
    params = params_of(
        backend, {"a.weight": [1.0] * 20, "a.bias": [5.0] * 4, "b.weight": [10.0] * 20, "c.weight": [0.0] * 4}
    )
    params.grad[...] = 3.0
    found = stepped(optim.LAMB(0.1, weight_decay=0.0), params, backend)
    expected = {"a.weight": 0.9, "a.bias": 4.9, "b.weight": 9.0, "c.weight": -0.1}
    assert {name: value[0] for name, value in found.items()} == pytest.approx(expected, rel=1e-5)


@every_backend
@pytest.mark.parametrize("dtype", ["half", "float", "double"])
def test_clip_layer_norm_clips_weights_and_biases_of_a_layer_together(name: str, dtype: str) -> None:
    """The layers' gradients have norms 5 and 1."""
    backend = create_backend(name, dtype)
    gradients = {"block.a.weight": 3.0, "block.a.bias": 4.0, "block.b.weight": 0.6, "block.b.bias": 0.8}
    params = params_of(backend, dict.fromkeys(gradients, [0.0] * 3))
    for name, p in params.named():
        p.grad[0] = gradients[name] * backend.policy.loss_scale
    found = stepped(optim.SGD(1.0, clip_layer_norm=2.0), params, backend)
    assert [value[0] for value in found.values()] == pytest.approx([-1.2, -1.6, -0.6, -0.8], rel=1e-5)
    assert backend.workspace.on_loan == 0


@every_backend
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optim.SGD(0.5, l1=0.1), [0.95, -1.95, 0.0]),
        (optim.SGD(0.5, l1=0.1, l2=0.2), [0.85, -1.75, 0.0]),
        (optim.Momentum(0.5, weight_decay=0.2), [0.9, -1.8, 0.0]),
        (optim.Adam(0.5, weight_decay=0.2), [0.9, -1.8, 0.0]),
    ],
    ids=["l1", "l1 and l2", "momentum", "adam"],
)
def test_penalties_change_weights_but_not_biases(name: str, optimizer: optim.Optimizer, expected: list[float]) -> None:
    """With a zero gradient, only the terms in sign(w) and w and the decoupled decay are left."""
    backend = create_backend(name, "double")
    found = stepped(optimizer, params_of(backend, {"a.weight": [1.0, -2.0, 0.0], "a.bias": [1.0]}), backend)
    np.testing.assert_allclose(found["a.weight"], expected, rtol=1e-12)
    assert found["a.bias"] == 1.0
