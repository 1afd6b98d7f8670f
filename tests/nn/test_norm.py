"""Normalization compared with PyTorch, and its running estimates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import nn
from cupynet.backend import create_backend
from tests.support.backends import every_backend, every_dtype
from tests.support.passes import built, inferred, passed

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "norms.npz")
TRAINING = nn.Context(train=True)
TOLERANCES = {"half": 2e-2, "float": 1e-5, "double": 1e-10}


def golden(kind: str) -> dict[str, Any]:
    return {name.partition(".")[2]: GOLDEN[name] for name in GOLDEN.files if name.startswith(f"{kind}.")}


def results_of(layer: nn.BatchNorm | nn.LayerNorm, x: Any, dy: Any) -> dict[str, Any]:
    y, dx = passed(layer, x, dy)
    gradients = {"scale_grad": layer.scale.grad, "shift_grad": layer.shift.grad}
    estimates = {"mean": layer.mean.data, "variance": layer.variance.data} if isinstance(layer, nn.BatchNorm) else {}
    return {"y": y, "dx": dx} | {name: layer.backend.to_host(a) for name, a in (gradients | estimates).items()}


def compare(found: Any, expected: Any, dtype: str, name: str) -> None:
    tolerance = TOLERANCES[dtype] * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance, err_msg=name)


@every_backend
@every_dtype
@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_batch_norm_and_its_derivative_are_those_of_pytorch(name: str, dtype: str, kind: str) -> None:
    known, layer = golden(kind), nn.BatchNorm(momentum=0.8, epsilon=1e-3)
    shape = known["x0"].shape[1:]
    built(layer, shape, create_backend(name, dtype), scale=known["scale"], shift=known["shift"])
    for step in range(3):
        layer.scale.grad[...] = layer.shift.grad[...] = 0
        for result, found in results_of(layer, known[f"x{step}"], known[f"dy{step}"]).items():
            compare(found, known[f"{result}{step}"], dtype, result)
    compare(inferred(layer, known["x0"]), known["inferred"], dtype, "inferred")


@every_backend
@pytest.mark.parametrize(("dtype", "kind"), [("half", "features"), ("float", "flat features"), ("double", "channels")])
def test_layer_norm_and_its_derivative_are_those_of_pytorch(name: str, dtype: str, kind: str) -> None:
    known, layer = golden(kind), nn.LayerNorm("channels" if kind == "channels" else "features", epsilon=1e-3)
    shape = known["x"].shape[1:]
    built(layer, shape, create_backend(name, dtype), scale=known["scale"], shift=known["shift"])
    for result, found in results_of(layer, known["x"], known["dy"]).items():
        compare(found, known[result], dtype, result)
    compare(inferred(layer, known["x"]), known["y"], dtype, "inferred")


@every_backend
@every_dtype
def test_the_variance_is_accurate_if_the_mean_is_large(name: str, dtype: str) -> None:
    """In single precision, a sum of squares minus a squared sum would lose the variance."""
    backend, rng = create_backend(name, dtype), np.random.default_rng(1)
    x = backend.asarray((rng.normal(size=(40, 9, 9, 3)) * 4 + 1000).astype(backend.policy.storage))
    moments = backend.to_host(backend.channel_moments(x))
    exact = np.array(backend.to_host(x), np.float64).reshape(-1, 3)
    np.testing.assert_allclose(moments[0], exact.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(moments[1], exact.var(axis=0), rtol=1e-4)


@every_backend
@pytest.mark.parametrize(
    ("rows", "tolerance"),
    [
        (np.full((2, 25088), 123.4), 5e-3),
        (100 + np.random.default_rng(0).normal(size=(1, 10**6)), 2e-5),
    ],
    ids=["equal values", "a large mean"],
)
def test_long_rows_keep_their_mean(name: str, rows: Any, tolerance: float) -> None:
    backend, epsilon, rows = create_backend(name, "float"), 1e-5, rows.astype(np.float32)
    scale, shift = backend.asarray(np.ones_like(rows[0])), backend.asarray(np.zeros_like(rows[0]))
    y, _ = backend.normalize_rows(backend.asarray(rows), scale, shift, epsilon)
    centered = rows.astype(np.float64) - rows.mean(axis=1, dtype=np.float64, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + epsilon)
    np.testing.assert_allclose(backend.to_host(y), expected, rtol=0, atol=tolerance)


@every_backend
@every_dtype
def test_one_value_of_a_channel_has_no_variance(name: str, dtype: str) -> None:
    """The output is the shift and does not depend on the input. The running estimates do not change."""
    layer = nn.BatchNorm()
    built(layer, (3,), create_backend(name, dtype), scale=[2.0, -1.0, 3.0], shift=[0.5, 0.25, -1.0])
    found = results_of(layer, [[1000.1, -3.3, 7.0]], [[1.0, 2.0, 4.0]])
    np.testing.assert_array_equal(found["y"], [[0.5, 0.25, -1.0]])
    np.testing.assert_array_equal(found["dx"], np.zeros((1, 3)))
    np.testing.assert_array_equal(found["shift_grad"], [1, 2, 4])
    for result, expected in (("scale_grad", 0), ("mean", 0), ("variance", 1)):
        np.testing.assert_array_equal(found[result], [expected] * 3)


def model_with_norm(name: str, dtype: str = "float", seed: int = 1) -> tuple[nn.Model, Any]:
    network = nn.Sequential(
        {"conv": nn.Conv2D(3, 2), "norm": nn.BatchNorm(), "dense": nn.Dense(3), "ln": nn.LayerNorm()}
    )
    model = nn.Model(network, nn.Image(4, 4, 1), create_backend(name, dtype), seed)
    x = np.random.default_rng(0).normal(size=(5, 4, 4, 1))
    return model, model.backend.asarray(x.astype(model.backend.policy.storage))


@every_backend
def test_only_passes_that_train_move_running_estimates(name: str) -> None:
    model, x = model_with_norm(name)
    before = model.weights()
    model.forward(x, nn.INFERENCE)
    np.testing.assert_array_equal(model.weights()["norm.mean"], before["norm.mean"])
    model.forward(x, TRAINING)
    moved = {key for key, value in model.weights().items() if (value != before[key]).any()}
    assert moved == {"norm.mean", "norm.variance"}
    assert not moved & {key for key, _ in model.params.named()}


@every_backend
def test_a_skipped_batch_restores_the_buffers(name: str) -> None:
    model, x = model_with_norm(name)
    before = model.weights()["norm.mean"]
    model.params.snapshot_buffers()
    model.forward(x, TRAINING)
    assert (model.weights()["norm.mean"] != before).all()
    model.params.restore_buffers()
    np.testing.assert_array_equal(model.weights()["norm.mean"], before)
