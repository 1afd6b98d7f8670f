"""A network with weights from PyTorch (tests/golden/make_importing.py), for import tests."""

from pathlib import Path
from typing import Any

import numpy as np

from cupynet import nn
from cupynet.backend import create_backend

GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = GOLDEN / "torch_small.safetensors"
# layer in cupynet -> layer in PyTorch
SMALL_NAMES = {"conv1": "0", "conv2": "3", "dense1": "5", "output": "7"}


def torch_logits() -> dict[str, Any]:
    """Return the images, and the logits that PyTorch computed for them."""
    with np.load(GOLDEN / "torch_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def small_model(*, flatten: bool = False, dtype: str = "double", backend: str = "numba") -> nn.Model:
    layers: dict[str, Any] = {
        "conv1": nn.Conv2D(4, kernel_size=(3, 2), activation="relu"),
        "pool1": nn.MaxPool2D(2),
        "conv2": nn.Conv2D(5, kernel_size=2, bias=False),
        **({"flat": nn.Flatten(), "again": nn.Activation("identity")} if flatten else {}),
        "dense1": nn.Dense(6, activation="relu"),
        "output": nn.Dense(3),
    }
    return nn.Model(nn.Sequential(layers), nn.Image(9, 8, 3), create_backend(backend, dtype), seed=1)


def check_same_weights(found: nn.Model, weights: dict[str, Any]) -> None:
    for name, weight in weights.items():
        np.testing.assert_array_equal(found.weights()[name], weight, err_msg=name)
