"""Networks for export tests, with random weights and running statistics."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from cupynet import export_torch, nn
from cupynet.backend import PixelScale, create_backend
from cupynet.interop import torch_source


def model_of(network: nn.Layer, image: nn.Image, dtype: str = "double", **more: Any) -> nn.Model:
    """Return a model with weights drawn by NumPy, too small to overflow, and pixels normalized by channel."""
    model = nn.Model(network, image, create_backend("numpy", dtype), 1, **more)
    random = np.random.default_rng(3)
    weights = {}
    for name, weight in sorted(model.weights().items()):
        drawn = random.normal(0, 1 / np.sqrt(max(weight.size / weight.shape[-1], 1)), weight.shape)
        own = name.rpartition(".")[2]
        drawn = 0.5 + np.abs(drawn) if own in ("variance", "scale") else drawn
        weights[name] = drawn.astype(np.float32)  # the precision in which other programs keep weights
    model.load_weights(weights)
    each = range(image.channels)
    model.pixels = PixelScale.of([0.1 + 0.2 * c for c in each], [0.5 + 0.25 * c for c in each])
    return model


def everything() -> nn.Sequential:
    """Return a network with every layer and all options, for images of 13 x 10 pixels with 2 channels."""
    layers: dict[str, nn.Layer] = {
        "conv1": nn.Conv2D(6, kernel_size=(3, 2), padding="same", activation="leaky_relu"),
        "conv1_activation": nn.Conv2D(6, kernel_size=3, stride=(2, 1), padding=(1, 0), bias=False, activation="gelu"),
        "norm1": nn.BatchNorm(epsilon=1e-3),
        "act1": nn.Activation("leaky_relu", slope=0.3),
        "conv2": nn.Conv2D(12, kernel_size=2, dilation=2, groups=3, padding=2, activation="silu"),
        "pool1": nn.MaxPool2D((3, 2), stride=2, padding="same"),
        "norm2": nn.LayerNorm(),
        "block": nn.Residual(
            {"conv": nn.Conv2D(12, kernel_size=3, padding=1, activation="elu"), "norm": nn.BatchNorm()},
            shortcut=nn.Conv2D(12, kernel_size=1, activation="tanh"),
        ),
        "block2": nn.Residual([nn.Conv2D(12, kernel_size=1, activation="softplus")]),
        "norm3": nn.LayerNorm(axis="channels", epsilon=1e-2),
        "mixed": nn.Concat(
            {
                "narrow": nn.Conv2D(3, kernel_size=1, activation="softmax"),
                "wide": [nn.Conv2D(4, kernel_size=3, padding="same", activation="sigmoid"), nn.MaxPool2D(1)],
                "seen": nn.AvgPool2D(2, stride=1, padding="same"),
            }
        ),
        "pool2": nn.AvgPool2D(3, stride=2, padding=1),
        "pool3": nn.MaxPool2D(2, stride=1, padding=1),
        "ways": nn.Concat(
            {
                "mean": nn.GlobalAvgPool2D(),
                "all": [nn.Flatten(), nn.Dense(6)],
                "some": nn.Dense(4, activation="relu"),
            }
        ),
        "norm4": nn.BatchNorm(),
        "drop": nn.Dropout(0.5),
        "norm5": nn.LayerNorm(),
        "again": nn.Residual([nn.Activation("tanh")]),
        "dense1": nn.Dense(8, activation="softmax", bias=False),
        "norm6": nn.BatchNorm(),
        "output": nn.Dense(5),
    }
    return nn.Sequential(layers)


def everything_as_model() -> nn.Model:
    return model_of(everything(), nn.Image(13, 10, 2))


def images_for(model: nn.Model) -> Any:
    """Return images (7, H, W, C) uint8."""
    return np.random.default_rng(11).integers(0, 256, (7, *model.input.shape), np.uint8)


def logits(model: nn.Model, images: Any) -> Any:
    x = model.backend.load_images(images, np.arange(len(images)), model.pixels)
    return model.scores(x)[1]


def imported(model: nn.Model, folder: Path) -> ModuleType:
    """Write a model's module, and return it as imported by Python."""
    (folder / "written.py").write_text(torch_source(model), "utf-8")
    spec = importlib.util.spec_from_file_location("written", folder / "written.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_torch(model: nn.Model, images: Any, folder: Path) -> Any:
    """Return the logits of the written module with the written weights, in double."""
    import torch

    module = imported(model, folder)
    export_torch(model, folder / "a.safetensors")
    net = module.network()
    tensors = {name: torch.from_numpy(array) for name, array in load_file(folder / "a.safetensors").items()}
    net.load_state_dict(tensors)
    net.eval().double()
    with torch.no_grad():
        return net(module.prepared(torch.from_numpy(images)).double()).numpy()
