"""Optimizers compared with plain formulas; clipping, state, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Move, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn.init import xavier
from cupynet.nn.params import Params, Segment
from cupynet.optim import SGD, Constant, Momentum, Nesterov, OneCycle, Optimizer
from cupynet.training import ParallelWrapper
from tests.support.backends import every_backend
from tests.support.pairwise import pairwise
from tests.support.training import small_model

MU = 0.9


def sgd(w: Any, v: Any, g: Any, rate: float) -> tuple[Any, Any]:
    return w - rate * g, v


def momentum(w: Any, v: Any, g: Any, rate: float) -> tuple[Any, Any]:
    v = MU * v - rate * g
    return w + v, v


def nesterov(w: Any, v: Any, g: Any, rate: float) -> tuple[Any, Any]:
    v = MU * v - rate * g
    return w + MU * v - rate * g, v


FORMULAS: dict[str, tuple[type[Optimizer], Callable[..., tuple[Any, Any]]]] = {
    "sgd": (SGD, sgd),
    "momentum": (Momentum, momentum),
    "nesterov": (Nesterov, nesterov),
}


def weights(backend: Any) -> Params:
    params = Params()
    params.scope("a").add("weight", (5, 3), xavier)
    params.scope("a").add("bias", (3, 1), xavier, decay=False)
    params.scope("b").add("weight", (2, 2), xavier)
    params.allocate(backend, seed=1)
    return params


@every_backend
@pairwise(rule=FORMULAS, l2=(0.0, 0.03), dtype=("half", "float", "double"))
def test_updates_follow_the_formula(name: str, rule: Any, l2: float, dtype: str) -> None:
    kind, formula = rule
    backend = create_backend(name, dtype)
    params, rng = weights(backend), np.random.default_rng(0)
    schedule = OneCycle(0.2)
    schedule.span(0, 4)
    optimizer = kind(schedule, l2=l2)
    optimizer.init(params, backend)
    expected = {label: np.array(backend.to_host(p.master), np.float64) for label, p in params.named()}
    velocity = {label: np.zeros(w.shape) for label, w in expected.items()}
    for iteration in range(4):
        for label, p in params.named():
            gradient = rng.normal(size=p.shape).astype(np.float32)
            p.grad += backend.asarray((gradient * backend.policy.loss_scale).astype(p.grad.dtype))
            rate = schedule(iteration)
            g = gradient.astype(float) + (0 if label == "a.bias" else l2) * expected[label]
            expected[label], velocity[label] = formula(expected[label], velocity[label], g, rate)
        optimizer.step(params, iteration)
        assert not bool(params.grad.any()), "the gradient is not zero after the step"
    tolerance = 1e-13 if dtype == "double" else 1e-6
    for label, p in params.named():
        np.testing.assert_allclose(backend.to_host(p.master), expected[label], rtol=0, atol=tolerance, err_msg=label)
        rounded = backend.to_host(p.master).astype(backend.policy.storage)
        np.testing.assert_array_equal(backend.to_host(p.data), rounded)


class InPlainArrays(SGD):
    """Somebody's own update, which knows nothing of copies."""

    def update(self, params: Params, segment: Segment, move: Move) -> None:
        params.master[segment.part] -= move.rate * params.grad[segment.part] * move.scale


@every_backend
@pytest.mark.parametrize(("kind", "passes"), [(SGD, 0), (Nesterov, 0), (InPlainArrays, 1)])
def test_layers_see_updated_weights(name: str, kind: type[SGD], passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same pass where the update writes the narrower copy too, else in one more."""
    backend = create_backend(name, "half")
    params, optimizer, published = weights(backend), kind(0.5), []
    optimizer.init(params, backend)
    before = np.array(backend.to_host(params.data))
    params.grad[...] = 1024.0
    publish = params.publish
    monkeypatch.setattr(params, "publish", lambda: (published.append(True), publish()))
    optimizer.step(params, 0)
    data, master = (np.array(backend.to_host(vector)) for vector in (params.data, params.master))
    np.testing.assert_array_equal(data, master.astype(np.float16))
    assert (data != before).any() and len(published) == passes


def test_l2_alone_shrinks_weights_and_leaves_biases() -> None:
    backend = create_backend("numpy", "double")
    params = weights(backend)
    before = {label: p.master.copy() for label, p in params.named()}
    optimizer = SGD(0.5, l2=0.1)
    optimizer.init(params, backend)
    optimizer.step(params, 0)
    after = dict(params.named())
    np.testing.assert_allclose(after["a.weight"].master, 0.95 * before["a.weight"], rtol=1e-15)
    np.testing.assert_array_equal(after["a.bias"].master, before["a.bias"])


def test_without_momentum_all_are_sgd() -> None:
    results = []
    for optimizer in (SGD(0.1, l2=0.01), Momentum(0.1, 0.0, l2=0.01), Nesterov(0.1, momentum=0.0, l2=0.01)):
        backend = create_backend("numpy", "double")
        params = weights(backend)
        optimizer.init(params, backend)
        for iteration in range(3):
            params.grad += params.master + 1
            optimizer.step(params, iteration)
        results.append(params.master.copy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-14)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-14)


@every_backend
def test_state_is_one_flat_vector_like_the_weights(name: str) -> None:
    backend = create_backend(name, "half")
    params = weights(backend)
    for optimizer, names in ((SGD(0.1), []), (Momentum(0.1), ["velocity"]), (Nesterov(0.1), ["velocity"])):
        optimizer.init(params, backend)
        assert list(optimizer.state) == names
        for vector in optimizer.state.values():
            assert (vector.shape, vector.dtype) == (params.master.shape, params.master.dtype)
            assert not bool(vector.any()) and backend.address(vector) % 64 == 0


def test_init_resets_the_state() -> None:
    backend, optimizer = create_backend("numpy"), Nesterov(0.1)
    params = weights(backend)
    optimizer.init(params, backend)
    optimizer.state["velocity"][...] = 1
    optimizer.init(params, backend)
    assert not optimizer.state["velocity"].any()


def test_a_learning_rate_is_a_number_above_zero_or_a_schedule() -> None:
    wrong: list[Any] = [0, -0.1, math.nan, math.inf, "0.1", None, True]
    for value, kind in product(wrong, (SGD, Momentum, Nesterov)):
        with pytest.raises(ConfigError, match=rf"{kind.__name__} learning_rate={value!r}: must be a number above 0"):
            kind(value)


def test_factors_are_checked() -> None:
    wrong: list[Any] = [-0.1, 1, 1.5, math.nan, "0.1", None, True]
    for value in wrong:
        for kind in (SGD, Momentum, Nesterov):
            with pytest.raises(ConfigError, match=rf"{kind.__name__} l2={value!r}: must be a number of at least 0"):
                kind(0.1, l2=value)
        with pytest.raises(ConfigError, match=rf"Nesterov momentum={value!r}: must be a number of at least 0"):
            Nesterov(0.1, momentum=value)


def test_a_schedule_is_taken_as_it_is() -> None:
    schedule = OneCycle(0.1)
    assert SGD(schedule).learning_rate is schedule
    constant = Nesterov(1).learning_rate
    assert isinstance(constant, Constant) and constant(0) == constant(10**6) == 1.0


@every_backend
@pytest.mark.parametrize("dtype", ["half", "float", "double"])
def test_a_long_gradient_is_shortened_and_a_short_one_is_not(name: str, dtype: str) -> None:
    for length, factor in ((8.0, 0.5), (2.0, 1.0)):
        backend = create_backend(name, dtype)
        params = weights(backend)
        before = np.array(backend.to_host(params.master), np.float64)
        gradient = np.zeros_like(before)
        gradient[1] = length
        params.grad[...] = backend.asarray(gradient * backend.policy.loss_scale, params.grad.dtype)
        optimizer = SGD(0.1, max_grad_norm=4.0)
        optimizer.init(params, backend)
        optimizer.step(params, 0)
        moved = before - np.array(backend.to_host(params.master), np.float64)
        assert moved[1] == pytest.approx(0.1 * length * factor, rel=1e-6)


@every_backend
@pytest.mark.parametrize("dtype", ["half", "float", "double"])
def test_parts_of_a_gradient_are_clipped_by_the_norm_of_the_whole(name: str, dtype: str) -> None:
    """As the stages of a pipeline are: each has a part, and their squared norms add up."""
    backend = create_backend(name, dtype)
    parts = [weights(backend), weights(backend)]
    optimizers = [SGD(0.1, max_grad_norm=4.0) for _ in parts]
    before = np.array(backend.to_host(parts[0].master), np.float64)
    for params, optimizer, length in zip(parts, optimizers, (6.0, 8.0), strict=True):
        optimizer.init(params, backend)
        params.grad[1] = length * backend.policy.loss_scale
    total = sum(backend.squared_norm(params.grad) for params in parts)
    assert math.sqrt(float(total)) == pytest.approx(10 * backend.policy.loss_scale)
    for params, optimizer, length in zip(parts, optimizers, (6.0, 8.0), strict=True):
        optimizer.step(params, 0, total)
        moved = before - np.array(backend.to_host(params.master), np.float64)
        assert moved[1] == pytest.approx(0.1 * length * 0.4, rel=1e-5)


def test_a_norm_to_clip_at_is_positive() -> None:
    wrong: list[Any] = [0, -1.0, True, "1", math.nan]
    for norm in wrong:
        with pytest.raises(ConfigError, match="SGD max_grad_norm=.*: must be a number above 0"):
            SGD(0.1, max_grad_norm=norm)


@pytest.mark.parametrize("wrong", [SGD, "adam", 0.1])
def test_objects_that_are_not_optimizers_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelWrapper(small_model(), optimizer=wrong)
    assert caught.value.setting == "optimizer"


def test_a_string_is_not_a_learning_rate() -> None:
    with pytest.raises(ConfigError, match=r"SGD learning_rate='fast': must be a number above 0, or a schedule such as"):
        SGD("fast")  # type: ignore[arg-type]


def test_numpy_numbers_are_taken() -> None:
    optimizer = Nesterov(np.float32(0.1), np.float64(0.9), l2=np.float32(0.01), max_grad_norm=np.int64(2))
    assert optimizer.learning_rate(0) == float(np.float32(0.1))
    for value in (optimizer.learning_rate(0), optimizer.momentum, optimizer.l2, optimizer.max_grad_norm):
        assert type(value) is float


def test_a_class_may_fix_the_factors_of_its_rule():
    class Heavy(SGD):
        factors = (0.5, 0.0, 0.0)

    assert Heavy(0.1).factors == (0.5, 0.0, 0.0)
