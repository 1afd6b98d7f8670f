"""Normalization compared with PyTorch and with differences, and its running estimates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    INFERENCE,
    Activation,
    BatchNorm,
    Context,
    Conv2D,
    Dense,
    Flat,
    Image,
    LayerNorm,
    Model,
    Params,
    Sequential,
)
from cupynet.nn.norm import BatchNormReLU
from tests.support.backends import every_backend, every_dtype
from tests.support.gradients import check_layer
from tests.support.refusals import refused

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "norms.npz")
TRAINING = Context(train=True)
TOLERANCES = {"half": 2e-2, "float": 1e-5, "double": 1e-10}


def golden(kind: str) -> dict[str, Any]:
    return {name.partition(".")[2]: GOLDEN[name] for name in GOLDEN.files if name.startswith(f"{kind}.")}


def built(layer: Any, input: Any, backend: Any, **weights: Any) -> Params:
    params = Params()
    layer.build(input, params.scope("norm"), backend)
    params.allocate(backend, seed=3)
    for name, p in params.named():
        if name.partition(".")[2] in weights:
            p.master[...] = backend.asarray(weights[name.partition(".")[2]], p.master.dtype)
    params.publish()
    return params


def input_of(x: Any) -> Any:
    return Image(*x.shape[1:]) if x.ndim == 4 else Flat(x.shape[1])


def passed(layer: Any, backend: Any, x: Any, dy: Any) -> tuple[Any, Any]:
    """y and dx on the host."""
    storage = backend.policy.storage
    y, backward = layer.forward(backend.asarray(x, storage), TRAINING)
    found = np.array(backend.to_host(y), np.float64)
    gradient = backend.borrow(dy.shape)
    gradient[...] = backend.asarray(dy, storage)
    dx = backward(gradient)
    result = np.array(backend.to_host(dx), np.float64)
    del y, gradient, dx, backward
    assert backend.workspace.on_loan == 0
    return found, result


def close(found: Any, expected: Any, dtype: str, backend: Any = None) -> None:
    found = np.asarray(found if backend is None else backend.to_host(found), np.float64)
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=TOLERANCES[dtype])


@every_backend
@every_dtype
@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_batch_norm_is_that_of_pytorch(name: str, dtype: str, kind: str) -> None:
    """Outputs, derivatives and running estimates over some steps, and an evaluation with these."""
    backend, known = create_backend(name, dtype), golden(kind)
    layer = BatchNorm(momentum=0.8, epsilon=1e-3)
    params = built(layer, input_of(known["x0"]), backend, scale=known["scale"], shift=known["shift"])
    for step in range(3):
        params.grad[...] = 0
        y, dx = passed(layer, backend, known[f"x{step}"], known[f"dy{step}"])
        close(y, known[f"y{step}"], dtype)
        close(dx, known[f"dx{step}"], dtype)
        close(layer.scale.grad, known[f"scale_grad{step}"], dtype, backend)
        close(layer.shift.grad, known[f"shift_grad{step}"], dtype, backend)
        close(layer.mean.data, known[f"mean{step}"], dtype, backend)
        close(layer.variance.data, known[f"variance{step}"], dtype, backend)
    y, _ = layer.forward(backend.asarray(known["x0"], backend.policy.storage), INFERENCE)
    close(y, known["inferred"], dtype, backend)


@every_backend
@pytest.mark.parametrize(("dtype", "kind"), [("half", "features"), ("float", "flat features"), ("double", "channels")])
def test_layer_norm_is_that_of_pytorch(name: str, dtype: str, kind: str) -> None:
    backend, known = create_backend(name, dtype), golden(kind)
    layer = LayerNorm("channels" if kind == "channels" else "features", epsilon=1e-3)
    built(layer, input_of(known["x"]), backend, scale=known["scale"], shift=known["shift"])
    y, dx = passed(layer, backend, known["x"], known["dy"])
    close(y, known["y"], dtype)
    close(dx, known["dx"], dtype)
    close(layer.scale.grad, known["scale_grad"], dtype, backend)
    close(layer.shift.grad, known["shift_grad"], dtype, backend)
    y, _ = layer.forward(backend.asarray(known["x"], backend.policy.storage), INFERENCE)
    close(y, known["y"], dtype, backend)


LAYERS: dict[str, Any] = {
    "batch": BatchNorm,
    "batch, then relu": lambda: Sequential([BatchNorm(), Activation("relu")]),
    "layer": LayerNorm,
    "channels": lambda: LayerNorm("channels"),
    "behind a layer": lambda: Sequential([Dense(6), BatchNorm(), Activation("relu"), Dense(2), BatchNorm()]),
}


@pytest.mark.parametrize("input", [Image(3, 2, 4), Flat(5)], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_with_the_statistics_of_the_batch(layer: str, input: Any) -> None:
    check_layer(LAYERS[layer](), input, batch=4, training=True)


@every_backend
@every_dtype
def test_a_relu_after_it_is_computed_in_the_same_pass(name: str, dtype: str) -> None:
    known, results = golden("images"), []
    for together in (True, False):
        backend = create_backend(name, dtype)
        pair = Sequential({"norm": BatchNorm(), "relu": Activation("relu")})
        params = built(pair, input_of(known["x0"]), backend)
        assert [(names, type(step)) for names, step in pair.steps] == [(["norm", "relu"], BatchNormReLU)]
        if not together:
            pair.steps = [([name], layer) for name, layer in pair]
        y, dx = passed(pair, backend, known["x0"], known["dy0"])
        inferred, _ = pair.forward(backend.asarray(known["x0"], backend.policy.storage), INFERENCE)
        results.append((y, dx, backend.to_host(inferred), backend.to_host(params.grad)))
    for one, other in zip(*results, strict=True):
        close(one, np.asarray(other, np.float64), dtype)
    assert (results[0][0] == 0).any() and (results[0][0] >= 0).all()


@every_backend
@every_dtype
def test_the_variance_is_accurate_if_the_mean_is_large(name: str, dtype: str) -> None:
    """A sum of squares less the square of a sum would have lost it in single precision."""
    backend, rng = create_backend(name, dtype), np.random.default_rng(1)
    x = backend.asarray((rng.normal(size=(40, 9, 9, 3)) * 4 + 1000).astype(backend.policy.storage))
    moments = backend.to_host(backend.channel_moments(x))
    exact = np.array(backend.to_host(x), np.float64).reshape(-1, 3)
    np.testing.assert_allclose(moments[0], exact.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(moments[1], exact.var(axis=0), rtol=1e-4)


@every_backend
def test_long_rows_keep_their_mean(name: str) -> None:
    """A sum of 25,088 equal values, and one of 10^6 values whose mean is far above their deviation."""
    backend, epsilon = create_backend(name, "float"), 1e-5
    many = (100 + np.random.default_rng(0).normal(size=(1, 10**6))).astype(np.float32)
    for rows, within in ((np.full((2, 25088), 123.4, np.float32), 5e-3), (many, 2e-5)):
        ones, zeros = np.ones_like(rows[0]), np.zeros_like(rows[0])
        y, moments = backend.normalize_rows(*map(backend.asarray, (rows, ones, zeros)), epsilon)
        exact = rows.astype(np.float64) - rows.mean(axis=1, dtype=np.float64, keepdims=True)
        expected = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + epsilon)
        assert abs(backend.to_host(y) - expected).max() < within


@every_backend
@every_dtype
def test_one_value_of_a_channel_has_no_variance(name: str, dtype: str) -> None:
    """The output is the shift, nothing of it depends on the input, and the running estimates stay as they are."""
    backend = create_backend(name, dtype)
    layer = BatchNorm()
    params = built(layer, Flat(3), backend, scale=[2.0, -1.0, 3.0], shift=[0.5, 0.25, -1.0])
    y, dx = passed(layer, backend, np.array([[1000.1, -3.3, 7.0]]), np.array([[1.0, 2.0, 4.0]]))
    np.testing.assert_array_equal(y, [[0.5, 0.25, -1.0]])
    np.testing.assert_array_equal(dx, np.zeros((1, 3)))
    np.testing.assert_array_equal(backend.to_host(layer.shift.grad), [1, 2, 4])
    np.testing.assert_array_equal(backend.to_host(layer.scale.grad), np.zeros(3))
    np.testing.assert_array_equal(backend.to_host(layer.mean.data), np.zeros(3))
    np.testing.assert_array_equal(backend.to_host(layer.variance.data), np.ones(3))
    passed(layer, backend, np.array([[0.0, 1, 2], [2, 1, 4]]), np.ones((2, 3)))  # two have one
    np.testing.assert_allclose(backend.to_host(layer.variance.data), [1.1, 0.9, 1.1], rtol=1e-6)
    images = BatchNorm()
    built(images, Image(2, 2, 3), backend)
    assert params.count == 6
    passed(images, backend, np.arange(12.0).reshape(1, 2, 2, 3), np.ones((1, 2, 2, 3)))
    np.testing.assert_allclose(backend.to_host(images.mean.data), 0.1 * np.array([4.5, 5.5, 6.5]), rtol=1e-6)


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("momentum", lambda: BatchNorm(momentum=1.0)),
        ("epsilon", lambda: BatchNorm(epsilon=0)),
        ("sync", lambda: BatchNorm(sync="yes")),
        ("axis", lambda: LayerNorm("rows")),
        ("epsilon", lambda: LayerNorm(epsilon=-1)),
    ],
)
def test_invalid_arguments_are_refused(setting: str, make: Any) -> None:
    with refused(setting):
        make()


def network() -> Sequential:
    return Sequential({"conv": Conv2D(3, 2), "norm": BatchNorm(), "dense": Dense(3), "ln": LayerNorm()})


@every_backend
@every_dtype
def test_running_estimates_are_part_of_a_model(name: str, dtype: str) -> None:
    """Saved, loaded, replicated and cut with it; no weights: nothing decays or moves them but passes that train."""
    model = Model(network(), Image(4, 4, 1), create_backend(name, dtype))
    backend, rng = model.backend, np.random.default_rng(0)
    x = backend.asarray(rng.normal(size=(5, 4, 4, 1)).astype(backend.policy.storage))
    before = model.weights()
    assert {"norm.mean", "norm.variance", "norm.scale"} <= before.keys() and model.params.count == 12 + 3 + 6 + 84 + 6
    assert before["norm.mean"].dtype == backend.policy.accumulate
    np.testing.assert_array_equal(before["norm.variance"], np.ones(3))
    model.forward(x, INFERENCE)
    np.testing.assert_array_equal(model.weights()["norm.mean"], before["norm.mean"])
    _, backward = model.forward(x, TRAINING)
    moved = model.weights()
    assert (moved["norm.mean"] != before["norm.mean"]).all()
    np.testing.assert_array_equal(moved["conv.weight"], before["conv.weight"])
    scores = model.scores(x)[1]
    other = model.replicate(create_backend(name, dtype))
    np.testing.assert_array_equal(other.scores(x)[1], scores)
    fresh = Model(network(), Image(4, 4, 1), create_backend(name, dtype), seed=9)
    assert np.abs(fresh.scores(x)[1] - scores).max() > 1e-3
    fresh.load_weights(moved)
    np.testing.assert_array_equal(fresh.scores(x)[1], scores)
    part = model.part(["norm", "dense"], create_backend(name, dtype))
    assert part.weights().keys() == {name for name in moved if name.partition(".")[0] in ("norm", "dense")}
    np.testing.assert_array_equal(part.weights()["norm.mean"], moved["norm.mean"])
    with pytest.raises(ConfigError, match=r"norm\.mean"):
        fresh.load_weights({name: weight for name, weight in moved.items() if name != "norm.mean"})


@every_backend
def test_a_skipped_batch_restores_the_buffers(name: str) -> None:
    model = Model(network(), Image(4, 4, 1), create_backend(name))
    x = model.backend.asarray(np.random.default_rng(0).normal(size=(5, 4, 4, 1)).astype(np.float32))
    before = model.weights()["norm.mean"]
    model.params.snapshot_buffers()
    model.forward(x, TRAINING)
    moved = model.weights()["norm.mean"]
    model.params.restore_buffers()
    np.testing.assert_array_equal(model.weights()["norm.mean"], before)
    assert (moved != before).all()
