"""Params: the layout of the flat vector of weights, initial values, padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import Image, Model, Params
from cupynet.nn.init import xavier, zeros
from cupynet.optim import Nesterov
from tests.support.backends import every_backend, every_dtype
from tests.support.networks import SMALL, examples, lenet, small_networks, train_step


def declared(backend: Backend, seed: int = 1, *more: str) -> Params:
    """Three kinds of weights, in mixed order, of sizes that fill no cache line."""
    params = Params()
    scope = params.scope("a")
    scope.add("weight", (3, 5), xavier)
    scope.add("bias", (5,), zeros, decay=False)
    slow = params.scope("b").scope("c")
    slow.add("weight", (7, 3), xavier)
    slow.add("bias", (3,), zeros, decay=False)
    slow.add("slow", (1, 2), xavier)
    for name in more:
        params.scope(name).add("weight", (2, 2), xavier)
    params.allocate(backend, seed)
    return params


def offset(backend: Backend, view: Any, vector: Any) -> int:
    """Where a view begins in its vector, in elements."""
    distance, rest = divmod(backend.address(view) - backend.address(vector), vector.itemsize)
    assert rest == 0
    return distance


@every_backend
@every_dtype
def test_every_weight_is_an_aligned_view_of_the_same_place_in_every_vector(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    params = declared(backend)
    taken: set[int] = set()
    for label, p in params.named():
        places = {offset(backend, v, whole) for v, whole in vectors(params, p)}
        assert len(places) == 1, label
        start = places.pop()
        assert not taken & set(range(start, start + p.size)), f"{label} overlaps"
        taken |= set(range(start, start + p.size))
        for view, _ in vectors(params, p):
            assert backend.address(view) % 64 == 0 and view.shape == p.shape and view.flags.c_contiguous
    assert params.count == 15 + 5 + 21 + 3 + 2 == len(taken)
    assert (params.master.dtype, params.grad.dtype, params.data.dtype) == (
        backend.policy.accumulate,
        backend.policy.accumulate,
        backend.policy.storage,
    )
    assert (params.data is params.master) == (dtype != "half")


def vectors(params: Params, p: Any) -> list[tuple[Any, Any]]:
    return [(p.master, params.master), (p.data, params.data), (p.grad, params.grad)]


@every_dtype
def test_segments_cover_the_vector_and_part_it_by_treatment(dtype: str) -> None:
    backend = create_backend("numpy", dtype)
    params = declared(backend)
    bounds = [(s.start, s.stop) for s in params.segments]
    assert [b[0] for b in bounds] == [0, *(b[1] for b in bounds[:-1])] and bounds[-1][1] == params.master.size
    assert [s.decay for s in params.segments] == [True, False]
    for label, p in params.named():
        start = offset(backend, p.master, params.master)
        (segment,) = [s for s in params.segments if s.start <= start < s.stop]
        assert start + p.size <= segment.stop
        assert segment.decay == (not label.endswith("bias")) == p.decay


def test_a_network_has_its_weights_decayed_and_its_biases_not() -> None:
    model = Model(lenet(), Image(28, 28, 1), create_backend("numpy"))
    names = [name for name, _ in model.params.named()]
    assert names == [
        f"{layer}.{kind}" for layer in ("conv1", "conv2", "dense1", "output") for kind in ("weight", "bias")
    ]
    assert model.params.count == 431_080
    assert [s.decay for s in model.params.segments] == [True, False]
    assert all(p.decay == name.endswith("weight") for name, p in model.params.named())
    shapes = {name: p.shape for name, p in model.params.named()}
    assert shapes["conv2.weight"] == (5, 5, 20, 50) and shapes["dense1.weight"] == (800, 500)


@every_backend
@every_dtype
def test_padding_stays_zero(name: str, dtype: str) -> None:
    backend, optimizer = create_backend(name, dtype), Nesterov(0.1, l2=0.1)
    model = Model(small_networks()["lenet"], SMALL, backend)
    optimizer.init(model.params, backend)
    for iteration in range(3):
        train_step(model, *examples(backend, 4), optimizer, iteration)
    for vector in (model.params.master, model.params.data, model.params.grad, *optimizer.state.values()):
        outside = np.array(backend.to_host(vector))
        for _, p in model.params.named():
            start = offset(backend, p.master, model.params.master)
            outside[start : start + p.size] = 0
        assert not outside.any()
    assert model.params.count < model.params.master.size


def weights(params: Params) -> dict[str, Any]:
    return {name: np.array(p.master) for name, p in params.named()}


def test_the_numbers_follow_from_seed_and_name_alone() -> None:
    backend = create_backend("numpy", "double")
    alone, again, among = (weights(declared(backend, 1, *more)) for more in ((), (), ("x", "y")))
    other = weights(declared(backend, 2))
    for name in alone:
        np.testing.assert_array_equal(alone[name], again[name])
        np.testing.assert_array_equal(alone[name], among[name])
    assert (alone["a.weight"] != other["a.weight"]).all()
    assert (among["x.weight"] != among["y.weight"]).all()
    assert not alone["a.bias"].any()


@every_backend
def test_the_numbers_are_the_same_on_every_backend_and_in_every_precision(name: str) -> None:
    exact = weights(declared(create_backend("numpy", "double")))
    for dtype, rounded in (("double", np.float64), ("float", np.float32), ("half", np.float32)):
        backend = create_backend(name, dtype)
        for label, p in declared(backend).named():
            np.testing.assert_array_equal(backend.to_host(p.master), exact[label].astype(rounded))


@every_backend
def test_half_publishes_rounded_copies(name: str) -> None:
    backend = create_backend(name, "half")
    params = declared(backend)
    parameter = dict(params.named())["a.weight"]
    np.testing.assert_array_equal(backend.to_host(params.data), backend.to_host(params.master).astype(np.float16))
    parameter.master[...] = 1 / 3
    assert not bool((parameter.data == np.float16(1 / 3)).any())
    params.publish()
    assert bool((parameter.data == np.float16(1 / 3)).all())


def test_a_name_is_declared_once() -> None:
    params = Params()
    params.scope("a").add("weight", (1, 1), zeros)
    with pytest.raises(ConfigError, match=r"a\.weight"):
        params.scope("a").add("weight", (2, 2), zeros)
