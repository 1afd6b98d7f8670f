"""dtype=half and bfloat16: storage in 16 bits, accumulation in 32, and training as good as in float."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Context, Conv2D, Dense, Image, MaxPool2D, Model, Sequential
from cupynet.optim import Nesterov
from tests.support.backends import every_backend, every_narrow_dtype
from tests.support.networks import SMALL, examples, gradients, small_networks, train_step

IMAGE = Image(8, 8, 1)


def striped(count: int) -> tuple[Any, Any]:
    """Noisy stripes: across, down, or none."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, count)
    stripes = np.arange(8) % 2 * 1.0
    patterns = np.array([stripes[:, None] * np.ones(8), stripes * np.ones((8, 1)), np.full((8, 8), 0.5)])
    return (patterns[labels] + rng.normal(0, 0.3, (count, 8, 8)))[..., None], labels


def trained(name: str, dtype: str) -> list[float]:
    backend = create_backend(name, dtype)
    network = Sequential({"conv": Conv2D(4, 3, activation="relu"), "pool": MaxPool2D(2), "output": Dense(3)})
    model = Model(network, IMAGE, backend, seed=1)
    optimizer = Nesterov(0.05, l2=1e-4)
    optimizer.init(model.params, backend)
    images, labels = striped(96)
    x = backend.asarray(images.astype(backend.policy.storage))
    batches = [(x[i : i + 32], backend.asarray(labels[i : i + 32])) for i in range(0, 96, 32)]
    return [train_step(model, *batches[i % 3], optimizer, i) for i in range(45)]


@every_backend
@every_narrow_dtype
def test_half_learns_what_float_learns(name: str, dtype: str) -> None:
    narrow, single, near = trained(name, dtype), trained(name, "float"), 1 if dtype == "half" else 4
    assert np.mean(single[:3]) > 0.9 and np.mean(single[-3:]) < 0.1
    assert np.mean(narrow[:3]) == pytest.approx(np.mean(single[:3]), rel=0.01 * near)
    assert np.mean(narrow[-3:]) == pytest.approx(np.mean(single[-3:]), rel=0.05 * near)


@every_backend
@every_narrow_dtype
@pytest.mark.parametrize("kind", ["lenet", "blocks"])
def test_weights_are_stored_narrow_and_summed_wide(name: str, kind: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    narrow = backend.policy.storage
    model = Model(small_networks()[kind], SMALL, backend)
    optimizer = Nesterov(0.1)
    optimizer.init(model.params, backend)
    for _, p in model.params.named():
        assert (p.data.dtype, p.master.dtype, p.grad.dtype) == (narrow, np.float32, np.float32)
    assert optimizer.state["velocity"].dtype == np.float32
    x, labels = examples(backend, 3)
    logits, backward = model.forward(x, Context(train=True))
    losses, gradient = model.loss(backend, logits, labels)
    assert (logits.dtype, gradient.dtype, losses.dtype) == (narrow, narrow, np.float32)
    assert all(value.dtype == np.float32 for value in model.weights().values())
    backward(gradient)


@every_backend
def test_the_update_removes_the_loss_scale_from_the_gradients(name: str) -> None:
    models = {
        dtype: Model(small_networks()["lenet"], SMALL, create_backend(name, dtype)) for dtype in ("half", "float")
    }
    before = models["half"].weights()
    for model in models.values():
        train_step(model, *examples(model.backend, 4))
    for parameter, expected in gradients(models["float"]).items():
        found = gradients(models["half"])[parameter] / 1024
        np.testing.assert_allclose(found, expected, atol=5e-3 * max(np.abs(expected).max(), 0.1), err_msg=parameter)
    for model in models.values():
        optimizer = Nesterov(0.1)
        optimizer.init(model.params, model.backend)
        optimizer.step(model.params, 0)
    for parameter, value in models["half"].weights().items():
        expected = models["float"].weights()[parameter]
        assert (value != before[parameter]).any()
        np.testing.assert_allclose(value, expected, atol=2e-3, err_msg=parameter)


@every_backend
def test_gradients_too_small_for_half_are_not_lost(name: str) -> None:
    backend = create_backend(name, "half")
    logits = backend.asarray(np.array([[9.0, -9.0]], np.float16))  # a probability of 1.5e-8: zero in half
    _, gradient = Model(Dense(2), IMAGE, backend).loss(backend, logits, backend.asarray(np.array([0])))
    assert float(gradient[0, 1]) == pytest.approx(1024 * 1.523e-8, rel=0.01)
