"""dtype=half and bfloat16: networks learn as well as in float."""

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, Flat, Image, Model
from cupynet.optim import Nesterov
from tests.support.backends import every_backend, every_narrow_dtype
from tests.support.networks import train_step
from tests.support.training import stripes, stripes_network


def trained(name: str, dtype: str) -> list[float]:
    backend, optimizer, data = create_backend(name, dtype), Nesterov(0.05, l2=1e-4), stripes(96)
    model = Model(stripes_network(), Image(8, 8, 1), backend, seed=1)
    optimizer.init(model.params, backend)
    x, labels = backend.asarray((data.images / 255).astype(backend.policy.storage)), backend.asarray(data.labels)
    parts = [slice(start, start + 32) for start in (0, 32, 64)] * 15
    return [train_step(model, x[part], labels[part], optimizer, i) for i, part in enumerate(parts)]


@every_backend
@every_narrow_dtype
def test_half_and_bfloat16_learn_what_float_learns(name: str, dtype: str) -> None:
    narrow, single, near = trained(name, dtype), trained(name, "float"), 1 if dtype == "half" else 4
    assert np.mean(single[:3]) > 0.9 and np.mean(single[-3:]) < 0.1
    assert np.mean(narrow[:3]) == pytest.approx(np.mean(single[:3]), rel=0.01 * near)
    assert np.mean(narrow[-3:]) == pytest.approx(np.mean(single[-3:]), rel=0.05 * near)


@every_backend
@every_narrow_dtype
def test_probabilities_sum_to_1_as_those_of_float_do(name: str, dtype: str) -> None:
    model = Model([Activation("identity")], Flat(10), create_backend(name, dtype))
    scores = model.predict(np.random.default_rng(0).normal(size=(50, 10)).astype(np.float32))
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=3e-7)
