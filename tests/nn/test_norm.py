"""Normalization layers: outputs, gradients and running statistics."""

from typing import Any

import numpy as np
import pytest

from cupynet import nn
from cupynet.backend import create_backend
from tests.support.backends import every_backend, every_dtype
from tests.support.gradients import check_layer
from tests.support.passes import built, inferred, passed

TRAINING = nn.Context(train=True)
TOLERANCES = {"half": 2e-2, "float": 1e-5, "double": 1e-10}
EPSILON = 1e-3


def drawn(*shape: int) -> Any:
    return np.random.default_rng(shape).normal(0.7, 1.5, shape)


def normalized(x: Any, mean: Any, variance: Any, layer: nn.BatchNorm | nn.LayerNorm) -> Any:
    scale, shift = (np.asarray(layer.backend.to_host(p.master)) for p in (layer.scale, layer.shift))
    return (x - mean) / np.sqrt(variance + EPSILON) * scale + shift


def compare(found: Any, expected: Any, dtype: str) -> None:
    tolerance = TOLERANCES[dtype] * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance)


@every_backend
@every_dtype
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (7, 5)], ids=["images", "vectors"])
def test_batch_norm_normalizes_channels_and_tracks_their_moments(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """As in PyTorch, the running variance is unbiased."""
    layer, backend, channels = nn.BatchNorm(momentum=0.8, epsilon=EPSILON), create_backend(name, dtype), shape[-1]
    built(layer, shape[1:], backend, scale=drawn(1, channels)[0], shift=drawn(2, channels)[0])
    axes, mean, variance = tuple(range(len(shape) - 1)), np.zeros(channels), np.ones(channels)
    for step in (1, 2, 3):
        x = drawn(step, *shape)[0]
        y, _ = passed(layer, x)
        compare(y, normalized(x, x.mean(axes), x.var(axes), layer), dtype)
        mean, variance = 0.8 * mean + 0.2 * x.mean(axes), 0.8 * variance + 0.2 * x.var(axes, ddof=1)
        compare(backend.to_host(layer.mean.data), mean, dtype)
        compare(backend.to_host(layer.variance.data), variance, dtype)
    compare(inferred(layer, x), normalized(x, mean, variance, layer), dtype)


@every_backend
@pytest.mark.parametrize(
    ("dtype", "axis", "shape"),
    [("half", "features", (3, 4, 2, 5)), ("float", "features", (3, 9)), ("double", "channels", (3, 4, 2, 5))],
)
def test_layer_norm_normalizes_each_example_or_pixel(name: str, dtype: str, axis: str, shape: tuple[int, ...]) -> None:
    layer, axes = nn.LayerNorm(axis, epsilon=EPSILON), tuple(range(1, len(shape))) if axis == "features" else (3,)
    own = [shape[i] for i in axes]
    built(layer, shape[1:], create_backend(name, dtype), scale=drawn(1, *own)[0], shift=drawn(2, *own)[0])
    x = drawn(*shape)
    expected = normalized(x, x.mean(axes, keepdims=True), x.var(axes, keepdims=True), layer)
    compare(passed(layer, x)[0], expected, dtype)
    compare(inferred(layer, x), expected, dtype)


@pytest.mark.parametrize(
    ("layer", "input"),
    [
        (nn.BatchNorm(), nn.Image(3, 4, 2)),
        (nn.BatchNorm(), nn.Flat(5)),
        (nn.LayerNorm(), nn.Image(3, 4, 2)),
        (nn.LayerNorm(), nn.Flat(5)),
        (nn.LayerNorm("channels"), nn.Image(3, 2, 4)),
    ],
    ids=str,
)
def test_gradients_of_normalization_layers_equal_finite_differences(layer: nn.Layer, input: nn.InputType) -> None:
    check_layer(layer, input, batch=3, training=True)


@every_backend
@every_dtype
def test_the_variance_of_channels_is_accurate_if_their_mean_is_large(name: str, dtype: str) -> None:
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
def test_layer_norm_of_long_rows_is_accurate(name: str, rows: Any, tolerance: float) -> None:
    backend, epsilon, rows = create_backend(name, "float"), 1e-5, rows.astype(np.float32)
    scale, shift = backend.asarray(np.ones_like(rows[0])), backend.asarray(np.zeros_like(rows[0]))
    y, _ = backend.normalize_rows(backend.asarray(rows), scale, shift, epsilon)
    centered = rows.astype(np.float64) - rows.mean(axis=1, dtype=np.float64, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + epsilon)
    np.testing.assert_allclose(backend.to_host(y), expected, rtol=0, atol=tolerance)


@every_backend
@every_dtype
def test_a_batch_with_one_value_per_channel_leaves_the_running_statistics_unchanged(name: str, dtype: str) -> None:
    """The output is the shift and does not depend on the input."""
    layer = nn.BatchNorm()
    built(layer, (3,), create_backend(name, dtype), scale=[2.0, -1.0, 3.0], shift=[0.5, 0.25, -1.0])
    y, dx = passed(layer, [[1000.1, -3.3, 7.0]], [[1.0, 2.0, 4.0]])
    np.testing.assert_array_equal(y, [[0.5, 0.25, -1.0]])
    np.testing.assert_array_equal(dx, np.zeros((1, 3)))
    arrays = layer.shift.grad, layer.scale.grad, layer.mean.data, layer.variance.data
    for array, expected in zip(arrays, ([1, 2, 4], [0] * 3, [0] * 3, [1] * 3), strict=True):
        np.testing.assert_array_equal(layer.backend.to_host(array), expected)


def model_with_norm(name: str) -> tuple[nn.Model, Any]:
    layers = {"conv": nn.Conv2D(3, 2), "norm": nn.BatchNorm(), "dense": nn.Dense(3), "ln": nn.LayerNorm()}
    model = nn.Model(layers, nn.Image(4, 4, 1), create_backend(name))
    return model, model.backend.asarray(np.random.default_rng(0).normal(size=(5, 4, 4, 1)).astype(np.float32))


@every_backend
def test_only_training_passes_change_the_running_statistics(name: str) -> None:
    model, x = model_with_norm(name)
    before = model.weights()
    model.forward(x, nn.INFERENCE)
    np.testing.assert_array_equal(model.weights()["norm.mean"], before["norm.mean"])
    model.forward(x, TRAINING)
    moved = {key for key, value in model.weights().items() if (value != before[key]).any()}
    assert moved == {"norm.mean", "norm.variance"}
    assert not moved & {key for key, _ in model.params.named()}


@every_backend
def test_a_skipped_batch_restores_the_running_statistics(name: str) -> None:
    model, x = model_with_norm(name)
    before = model.weights()["norm.mean"]
    model.params.snapshot_buffers()
    model.forward(x, TRAINING)
    assert (model.weights()["norm.mean"] != before).all()
    model.params.restore_buffers()
    np.testing.assert_array_equal(model.weights()["norm.mean"], before)
