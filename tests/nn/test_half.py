"""dtype=half and bfloat16: storage in 16 bits, accumulation in 32, and training as good as in float."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Context, Image, Model, SoftmaxNLL
from cupynet.optim import Nesterov, Optimizer
from tests.support.backends import every_backend, every_narrow_dtype
from tests.support.networks import SMALL, examples, gradients, small_networks, train_step
from tests.support.training import stripes, stripes_network


def trained(name: str, dtype: str) -> list[float]:
    """The loss of each of 45 steps."""
    backend, optimizer, data = create_backend(name, dtype), Nesterov(0.05, l2=1e-4), stripes(96)
    model = Model(stripes_network(), Image(8, 8, 1), backend, seed=1)
    optimizer.init(model.params, backend)
    x, labels = backend.asarray((data.images / 255).astype(backend.policy.storage)), backend.asarray(data.labels)
    parts = [slice(start, start + 32) for start in (0, 32, 64)] * 15
    return [train_step(model, x[part], labels[part], optimizer, i) for i, part in enumerate(parts)]


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
    backend, optimizer = create_backend(name, dtype), Nesterov(0.1)
    narrow, wide = backend.policy.storage, np.dtype(np.float32)
    model = Model(small_networks()[kind], SMALL, backend)
    optimizer.init(model.params, backend)
    assert {(p.data.dtype, p.master.dtype, p.grad.dtype) for _, p in model.params.named()} == {(narrow, wide, wide)}
    assert optimizer.state["velocity"].dtype == wide
    x, labels = examples(backend, 3)
    logits, _ = model.forward(x, Context(train=True))
    losses, gradient = model.loss(backend, logits, labels)
    assert (logits.dtype, gradient.dtype, losses.dtype) == (narrow, narrow, wide)


@every_backend
def test_the_update_removes_the_loss_scale_from_the_gradients(name: str) -> None:
    found: dict[str, tuple[Any, Any]] = {}
    for dtype in ("half", "float"):
        model = Model(small_networks()["lenet"], SMALL, create_backend(name, dtype))
        optimizer: Optimizer = Nesterov(0.1)
        optimizer.init(model.params, model.backend)
        train_step(model, *examples(model.backend, 4))
        before = gradients(model)
        optimizer.step(model.params, 0)
        found[dtype] = before, model.weights()
    for parameter, expected in found["float"][0].items():
        bound = 5e-3 * max(np.abs(expected).max(), 0.1)
        np.testing.assert_allclose(found["half"][0][parameter] / 1024, expected, atol=bound, err_msg=parameter)
        weight = found["float"][1][parameter]
        np.testing.assert_allclose(found["half"][1][parameter], weight, atol=2e-3, err_msg=parameter)


@every_backend
def test_gradients_too_small_for_half_are_not_lost(name: str) -> None:
    backend = create_backend(name, "half")
    logits = backend.asarray(np.array([[9.0, -9.0]], np.float16))  # a probability of 1.5e-8: zero in half
    _, gradient = SoftmaxNLL()(backend, logits, backend.asarray(np.array([0])))
    assert float(gradient[0, 1]) == pytest.approx(1024 * 1.523e-8, rel=0.01)
