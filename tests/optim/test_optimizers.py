"""Optimizers: updated weights, clipping, state, bad arguments. test_update_rules.py compares steps with PyTorch's."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, UpdateScalars, create_backend
from cupynet.nn.init import xavier
from cupynet.nn.params import Params, Segment
from cupynet.optim import SGD, Adam, Momentum, Nesterov, Optimizer
from tests.guides.extending.lion import Lion
from tests.support.backends import every_backend, every_dtype
from tests.support.refusals import refused


def weights(backend: Backend) -> Params:
    params = Params()
    params.scope("a").add("weight", (5, 3), xavier)
    params.scope("a").add("bias", (3, 1), xavier, decay=False)
    params.scope("b").add("weight", (2, 2), xavier)
    params.allocate(backend, seed=1)
    return params


def on_host(backend: Backend, vector: Any) -> Any:
    return np.array(backend.to_host(vector), np.float64)


class InPlainArrays(SGD):
    """A user-defined update, which does not write the 16-bit copy."""

    def update(self, params: Params, segment: Segment, move: UpdateScalars) -> None:
        params.master[segment.part] -= move.rate * params.grad[segment.part] * move.scale


@every_backend
@pytest.mark.parametrize("kind", [Nesterov, InPlainArrays])
def test_the_16_bit_weights_of_layers_follow_every_update(name: str, kind: type[SGD]) -> None:
    backend = create_backend(name, "half")
    params, optimizer = weights(backend), kind(0.5)
    optimizer.init(params, backend)
    params.grad[...] = 1024.0
    before = on_host(backend, params.data)
    optimizer.step(params, 0)
    data = on_host(backend, params.data)
    np.testing.assert_array_equal(data, backend.to_host(params.master).astype(np.float16))
    assert (data != before).any()


def test_init_resets_the_state_of_an_optimizer() -> None:
    backend, optimizer = create_backend("numpy"), Nesterov(0.1)
    params = weights(backend)
    optimizer.init(params, backend)
    optimizer.state["velocity"][...] = 1
    optimizer.init(params, backend)
    assert not optimizer.state["velocity"].any()


def test_the_representation_of_a_user_defined_optimizer_has_its_arguments() -> None:
    assert repr(Lion(0.001, beta1=0.5)) == "Lion(0.001, beta1=0.5)"


def test_arguments_of_an_optimizer_may_be_changed_before_training() -> None:
    changed, expected = Momentum(0.1, 0.9), Momentum(0.1, 0.2)
    changed.momentum = 0.2
    found = []
    for optimizer in (changed, expected):
        params = weights(backend := create_backend("numpy"))
        optimizer.init(params, backend)
        for iteration in range(2):
            params.grad[...] = 1
            optimizer.step(params, iteration)
        found.append(params.master.copy())
    np.testing.assert_array_equal(*found)


@every_backend
@every_dtype
@pytest.mark.parametrize(("length", "elsewhere", "factor"), [(8.0, 0.0, 0.5), (2.0, 0.0, 1.0), (6.0, 8.0, 0.4)])
def test_max_grad_norm_shortens_a_long_gradient_and_not_a_short_one(
    name: str, dtype: str, length: float, elsewhere: float, factor: float
) -> None:
    """Stages of a pipeline have parts of the gradient, which are clipped by the norm of the whole."""
    backend = create_backend(name, dtype)
    params, optimizer = weights(backend), SGD(0.1, max_grad_norm=4.0)
    before = on_host(backend, params.master)
    params.grad[1] = length * backend.policy.loss_scale
    optimizer.init(params, backend)
    other_stage = (elsewhere * backend.policy.loss_scale) ** 2
    whole = [backend.squared_norm(params.grad) + other_stage] if elsewhere else []
    optimizer.step(params, 0, *whole)
    moved = before - on_host(backend, params.master)
    assert moved[1] == pytest.approx(0.1 * length * factor, rel=1e-5)


class Mixin:
    update = InPlainArrays.update


class Mixed(Mixin, SGD):
    pass


@pytest.mark.parametrize("kind", [InPlainArrays, Mixed])
def test_a_user_defined_update_gets_a_clipped_gradient(kind: type[SGD]) -> None:
    backend = create_backend("numpy")
    params, optimizer = weights(backend), kind(0.1, max_grad_norm=4.0)
    before = on_host(backend, params.master)
    params.grad[1] = 8.0
    optimizer.init(params, backend)
    optimizer.step(params, 0)
    assert before[1] - params.master[1] == pytest.approx(0.4, rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("learning_rate", lambda: Momentum(math.nan)),
        ("learning_rate", lambda: SGD("fast")),
        ("l2", lambda: SGD(0.1, l2=-0.1)),
        ("l2", lambda: SGD(0.1, l2=0.1, weight_decay=0.1)),
        ("l2", lambda: Adam(0.1, l2=1)),
        ("momentum", lambda: Nesterov(0.1, momentum=1)),
        ("max_grad_norm", lambda: SGD(0.1, max_grad_norm=0)),
    ],
)
def test_invalid_arguments_of_optimizers_are_refused(setting: str, make: Callable[[], Optimizer]) -> None:
    with refused(setting):
        make()
