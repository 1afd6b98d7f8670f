"""Three training steps of a network compared with PyTorch (values from tests/golden/make_golden.py)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Context, Conv2D, Dense, Image, MaxPool2D, Model, Sequential
from cupynet.optim import Nesterov
from tests.support.backends import every_backend

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "lenet.npz", allow_pickle=False)


def stored(prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): GOLDEN[name] for name in GOLDEN.files if name.startswith(prefix)}


def network() -> Sequential:
    return Sequential(
        {
            "conv1": Conv2D(3, 3),
            "pool1": MaxPool2D(3, 2),
            "conv2": Conv2D(4, 2, padding=1, activation="relu"),
            "pool2": MaxPool2D(2),
            "dense1": Dense(6, "relu"),
            "output": Dense(3),
        }
    )


@every_backend
@pytest.mark.parametrize(("dtype", "tolerance"), [("double", 1e-12), ("float", 1e-5)])
def test_three_steps_of_training(name: str, dtype: str, tolerance: float) -> None:
    backend, optimizer = create_backend(name, dtype), Nesterov(0.05, momentum=0.9, l2=0.02)
    model = Model(network(), Image(9, 10, 2), backend)
    model.load_weights(stored("start/"))
    optimizer.init(model.params, backend)

    def close(found: Any, expected: Any, what: str) -> None:
        found = np.asarray(backend.to_host(found))
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=what)

    for step, (images, labels) in enumerate(zip(GOLDEN["images"], GOLDEN["labels"], strict=True)):
        x = backend.asarray(images.astype(backend.policy.storage))
        logits, backward = model.forward(x, Context(train=True))
        close(logits, GOLDEN[f"logits/{step}"], "logits")
        losses, gradient = model.loss(backend, logits, backend.asarray(labels))
        close(losses, GOLDEN[f"losses/{step}"], "losses")
        backward(gradient)
        for parameter, p in model.params.named():
            close(p.grad, GOLDEN[f"gradient/{step}/{parameter}"], f"gradient of {parameter}")
        optimizer.step(model.params, step)
        for parameter, value in model.weights().items():
            close(value, GOLDEN[f"after/{step}/{parameter}"], f"{parameter} after step {step}")
