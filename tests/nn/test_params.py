"""Params: the layout of the flat weight vector, initial values, padding."""

from typing import Any

import numpy as np

from cupynet.backend import Backend, create_backend
from cupynet.nn import BatchNorm, Conv2D, Dense, Image, LayerNorm, Model, Params
from cupynet.nn.init import xavier, zeros
from cupynet.optim import Nesterov
from tests.support.backends import every_backend, every_dtype
from tests.support.networks import SMALL, examples, small_networks, train_step


def declared(backend: Backend, seed: int = 1, *more: str) -> Params:
    """Declare weights with and without decay, in mixed order, whose sizes do not fill cache lines."""
    params = Params()
    params.scope("a").add("weight", (3, 5), xavier)
    params.scope("a").add("bias", (5,), zeros, decay=False)
    params.scope("b").scope("c").add("weight", (7, 3), xavier)
    for name in more:
        params.scope(name).add("weight", (2, 2), xavier)
    params.allocate(backend, seed)
    return params


def places(backend: Backend, view: Any, vector: Any) -> range:
    start, rest = divmod(backend.data_ptr(view) - backend.data_ptr(vector), vector.itemsize)
    assert rest == 0
    return range(start, start + view.size)


@every_backend
@every_dtype
def test_every_weight_is_an_aligned_view_of_the_same_place_in_every_vector(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    params = declared(backend)
    taken: set[int] = set()
    for label, p in params.named():
        own = places(backend, p.master, params.master)
        assert places(backend, p.data, params.data) == places(backend, p.grad, params.grad) == own
        assert taken.isdisjoint(own), f"{label} overlaps"
        taken.update(own)
        for view in (p.master, p.data, p.grad):
            assert backend.data_ptr(view) % 64 == 0 and view.shape == p.shape and view.flags.c_contiguous
    assert params.count == 15 + 5 + 21 == len(taken)
    wide = backend.policy.accumulate
    assert (params.master.dtype, params.grad.dtype, params.data.dtype) == (wide, wide, backend.policy.storage)


def test_penalties_and_weight_decay_are_for_weights_but_not_for_biases_and_normalization() -> None:
    layers = {"conv": Conv2D(2, 3), "norm": BatchNorm(), "dense": Dense(4), "rows": LayerNorm(), "output": Dense(3)}
    model = Model(layers, Image(8, 8, 1), create_backend("numpy"))
    decayed = {name for name, p in model.params.named() if p.decay}
    assert decayed == {"conv.weight", "dense.weight", "output.weight"}
    assert {"conv.bias", "norm.scale", "norm.shift", "rows.scale", "rows.shift"} < {*dict(model.params.named())}


@every_backend
@every_dtype
def test_padding_between_weights_stays_zero_in_training(name: str, dtype: str) -> None:
    backend, optimizer = create_backend(name, dtype), Nesterov(0.1, l2=0.1)
    model = Model(small_networks()["lenet"], SMALL, backend)
    params = model.params
    optimizer.init(params, backend)
    for iteration in range(3):
        train_step(model, *examples(backend, 4), optimizer, iteration)
    padding = np.ones(params.master.size, bool)
    for _, p in params.named():
        padding[places(backend, p.master, params.master)] = False
    assert padding.any()
    for vector in (params.master, params.data, params.grad, *optimizer.state.values()):
        assert not backend.to_host(vector)[padding].any()


def weights(params: Params) -> dict[str, Any]:
    return {name: np.array(p.master) for name, p in params.named()}


def test_initial_weights_follow_from_seed_and_name_alone() -> None:
    backend = create_backend("numpy", "double")
    alone, among = weights(declared(backend)), weights(declared(backend, 1, "x", "y"))
    for name, value in alone.items():
        np.testing.assert_array_equal(among[name], value)
    assert (alone["a.weight"] != weights(declared(backend, 2))["a.weight"]).all()
    assert (among["x.weight"] != among["y.weight"]).all()
