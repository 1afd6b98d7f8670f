"""Fifty steps of each optimizer compared with PyTorch's, in double (values of tests/golden/make_optim.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn.init import zeros
from cupynet.nn.params import Params
from cupynet.optim import (
    LAMB,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    AdaMax,
    AdamW,
    AMSGrad,
    Momentum,
    Nadam,
    Nesterov,
    Optimizer,
    RMSProp,
)
from tests.support.backends import every_backend

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "optim.npz")
RATE = 0.05
KEPT = [0, 1, 4, 9, 24, 49]
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: SGD(RATE, l2=0.01),
    "momentum": lambda: Momentum(RATE, 0.8),
    "nesterov": lambda: Nesterov(RATE, 0.8),
    "adam": lambda: Adam(RATE, 0.8, 0.95),
    "adam, l2": lambda: Adam(RATE, l2=0.1),
    "adamw": lambda: AdamW(RATE, weight_decay=0.1),
    "amsgrad": lambda: AMSGrad(RATE, 0.8, 0.9),
    "adamax": lambda: AdaMax(RATE),
    "nadam": lambda: Nadam(RATE),
    "nadam, decayed": lambda: Nadam(RATE, weight_decay=0.1),
    "adagrad": lambda: AdaGrad(RATE),
    "rmsprop": lambda: RMSProp(RATE, 0.9),
    "adadelta": lambda: AdaDelta(1.0, 0.9),
}
CLIPPED: dict[str, Callable[[], Optimizer]] = {
    "value": lambda: Momentum(RATE, 0.8, clip_value=0.4),
    "norm": lambda: Momentum(RATE, 0.8, clip_layer_norm=2.0),  # of the only layer
}


def steps(name: str, make: Callable[[], Optimizer], start: Any, gradients: Any) -> Any:
    """The weights after each step."""
    backend = create_backend(name, "double")
    params = Params()
    params.scope("layer").add("weight", start.shape, zeros)
    params.allocate(backend, seed=1)
    ((_, weight),) = params.named()
    weight.master[...] = backend.asarray(start)
    optimizer, found = make(), []
    optimizer.init(params, backend)
    for iteration, gradient in enumerate(gradients):
        weight.grad += backend.asarray(gradient)
        optimizer.step(params, iteration)
        found.append(np.array(backend.to_host(weight.master)))
    return np.array(found)


@every_backend
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_move_weights_as_in_pytorch(name: str, kind: str) -> None:
    found = steps(name, OPTIMIZERS[kind], GOLDEN["start"], GOLDEN["gradients"])[KEPT]
    np.testing.assert_allclose(found, GOLDEN[f"optimizer/{kind}"], rtol=1e-6, atol=1e-9)


@every_backend
@pytest.mark.parametrize("kind", CLIPPED)
def test_gradients_are_limited_as_in_pytorch(name: str, kind: str) -> None:
    """Its norms are a millionth too large."""
    found = steps(name, CLIPPED[kind], GOLDEN["start"], GOLDEN["gradients"])[KEPT]
    np.testing.assert_allclose(found, GOLDEN[f"clipped/{kind}"], rtol=2e-6, atol=1e-6)


def test_every_golden_file_is_compared() -> None:
    for group, known in (("optimizer", OPTIMIZERS), ("clipped", CLIPPED)):
        assert {name.partition("/")[2] for name in GOLDEN if name.startswith(f"{group}/")} == known.keys()


@every_backend
def test_lamb_follows_its_paper(name: str) -> None:
    """Algorithm 2 of You et al. 2020 with phi the identity, written out; a weight of zero takes Adam's step."""
    beta1, beta2, decay, epsilon = 0.9, 0.99, 0.1, 1e-6
    start, gradients = GOLDEN["start"], GOLDEN["gradients"]
    weight, mean, squares, expected = start.copy(), 0.0, 0.0, []
    for t, gradient in enumerate(gradients, 1):
        mean = beta1 * mean + (1 - beta1) * gradient
        squares = beta2 * squares + (1 - beta2) * gradient**2
        step = mean / (1 - beta1**t) / (np.sqrt(squares / (1 - beta2**t)) + epsilon) + decay * weight
        weight = weight - RATE * np.linalg.norm(weight) / np.linalg.norm(step) * step
        expected.append(weight)
    found = steps(name, lambda: LAMB(RATE, beta1, beta2, weight_decay=decay), start, gradients)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    (moved,) = steps(name, lambda: LAMB(RATE), np.zeros(4), np.ones((1, 4)))
    np.testing.assert_allclose(moved, -RATE, rtol=1e-5)


@every_backend
def test_lamb_scales_each_array_by_its_norm_and_biases_move_as_in_adam(name: str) -> None:
    backend = create_backend(name, "float")
    params = Params()
    for layer, value in (("a", 1.0), ("b", 10.0)):
        params.scope(layer).add("weight", (20,), lambda rng, shape, value=value: np.full(shape, value))
        params.scope(layer).add("bias", (4,), lambda rng, shape: np.full(shape, 5.0), decay=False)
    params.allocate(backend, seed=1)
    params.grad[...] = 3.0 * backend.policy.loss_scale
    optimizer = LAMB(0.1, weight_decay=0.0)
    optimizer.init(params, backend)
    optimizer.step(params, 0)
    found = {name: float(p.master[0]) for name, p in params.named()}
    assert found == pytest.approx({"a.weight": 0.9, "b.weight": 9.0, "a.bias": 4.9, "b.bias": 4.9}, rel=1e-5)


@every_backend
@pytest.mark.parametrize("dtype", ["half", "float", "double"])
def test_gradients_are_clipped_layer_by_layer(name: str, dtype: str) -> None:
    """Weights and biases together: the gradient of one layer has length 5, that of the other, in the same block, 1."""
    backend = create_backend(name, dtype)
    params = Params()
    for layer in ("block.a", "block.b"):
        params.scope(layer).add("weight", (3,), zeros)
        params.scope(layer).add("bias", (2,), zeros, decay=False)
    params.allocate(backend, seed=1)
    given = {"block.a.weight": 3.0, "block.a.bias": 4.0, "block.b.weight": 0.6, "block.b.bias": 0.8}
    for label, p in params.named():
        p.grad[0] = given[label] * backend.policy.loss_scale
    optimizer = SGD(1.0, clip_layer_norm=2.0)
    optimizer.init(params, backend)
    optimizer.step(params, 0)
    found = {label: -float(p.master[0]) for label, p in params.named()}
    assert found == pytest.approx(given | {"block.a.weight": 1.2, "block.a.bias": 1.6}, rel=1e-5)
    assert backend.workspace.on_loan == 0


@every_backend
def test_penalties_are_for_weights_alone(name: str) -> None:
    """Without a gradient, only sign(w), w and the decoupled decay are left."""
    backend = create_backend(name, "double")
    for optimizer, expected in (
        (SGD(0.5, l1=0.1), [0.95, -1.95, 0.0]),
        (SGD(0.5, l1=0.1, l2=0.2), [0.85, -1.75, 0.0]),
        (Momentum(0.5, weight_decay=0.2), [0.9, -1.8, 0.0]),
        (Adam(0.5, weight_decay=0.2), [0.9, -1.8, 0.0]),
    ):
        params = Params()
        params.scope("a").add("weight", (3,), lambda rng, shape: np.array([1.0, -2.0, 0.0]))
        params.scope("a").add("bias", (1,), lambda rng, shape: np.ones(1), decay=False)
        params.allocate(backend, seed=1)
        optimizer.init(params, backend)
        optimizer.step(params, 0)
        named = dict(params.named())
        np.testing.assert_allclose(
            backend.to_host(named["a.weight"].master), expected, rtol=1e-12, err_msg=str(optimizer)
        )
        assert float(named["a.bias"].master[0]) == 1.0
