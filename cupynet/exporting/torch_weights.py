"""A model's weights as a PyTorch state dict: the way back from `import_torch`."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.checks import one
from cupynet.errors import ConfigError
from cupynet.files import PathLike, save_weights
from cupynet.layouts import name_in_torch, orders, to_torch
from cupynet.nn import (
    Activation,
    AvgPool2D,
    BatchNorm,
    Concat,
    Conv2D,
    Dense,
    Dropout,
    Flatten,
    GlobalAvgPool2D,
    Layer,
    LayerNorm,
    MaxPool2D,
    Model,
    Residual,
    Sequential,
)

HOLDERS = (Sequential, Residual, Concat)
KNOWN = (
    *(*HOLDERS, Conv2D, Dense, BatchNorm, LayerNorm, MaxPool2D, AvgPool2D, GlobalAvgPool2D),
    *(Flatten, Dropout, Activation),
)


def export_torch(model: Model, path: PathLike) -> None:
    """Write the weights of `model` as safetensors, in PyTorch's names and layouts.

        net.load_state_dict(safetensors.torch.load_file(path))

    Layers keep their names: `conv1.weight` (O, C, K_h, K_w), `dense1.weight` (O, F), `norm1.running_mean`. A dense
    layer behind an image looks at it as `torch.nn.Flatten` leaves it. `torch_source` writes the module that fits.

    Raises:
        ConfigError: a layer is not known there.
        OutputError: the file cannot be written.
    """
    save_weights(path, torch_tensors(model))


def torch_tensors(model: Model) -> dict[str, Any]:
    """Name -> array, as a state dict of PyTorch has them. ConfigError."""
    check_known(model.network, "PyTorch")
    layers, order = {layer.path: layer for layer in model.network.walk()}, orders(model.network)
    found = {}
    for name, weight in model.weights().items():
        path, _, own = name.rpartition(".")
        layer = layers[path]
        there = f"{path}." if path else ""
        looks_at = None if own == "bias" else order.get(id(layer))
        found[f"{there}{name_in_torch(layer, own)}"] = np.ascontiguousarray(to_torch(weight, looks_at))
        if own == "mean":
            found[f"{there}num_batches_tracked"] = np.array(0, np.int64)  # which PyTorch looks for, and we do not count
    return found


def check_known(network: Layer, where: str) -> None:
    """Refuse layers that are none of cupynet's own, whose equivalent nobody knows. ConfigError.

    where: what it is to be written for.
    """
    for layer in network.walk():
        if type(layer) not in KNOWN:
            kind, name = type(layer), layer.path or "network"
            raise ConfigError(
                f"layer '{name}' is {one(kind.__name__)} of {kind.__module__}, and nothing is known of what is like it "
                f"in {where}: only layers of cupynet.nn are written"
            )
