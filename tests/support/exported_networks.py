"""Networks for tests of export, with random weights and running statistics."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from cupynet import export_torch
from cupynet.backend import PixelScale, create_backend
from cupynet.interop import torch_source
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
    Image,
    Layer,
    LayerNorm,
    MaxPool2D,
    Model,
    Residual,
    Sequential,
)


def model_of(network: Layer, image: Image, dtype: str = "double", seed: int = 3, **more: Any) -> Model:
    """A model whose weights are drawn by NumPy alone, of sizes at which nothing overflows; normalised by channel."""
    model = Model(network, image, create_backend("numpy", dtype), 1, **more)
    random = np.random.default_rng(seed)
    weights = {}
    for name, weight in sorted(model.weights().items()):
        drawn = random.normal(0, 1 / np.sqrt(max(weight.size / weight.shape[-1], 1)), weight.shape)
        own = name.rpartition(".")[2]
        drawn = 0.5 + np.abs(drawn) if own in ("variance", "scale") else drawn
        weights[name] = drawn.astype(np.float32)  # which other programs keep them in
    model.load_weights(weights)
    each = range(image.channels)
    model.pixels = PixelScale.of([0.1 + 0.2 * c for c in each], [0.5 + 0.25 * c for c in each])
    return model


def everything() -> Sequential:
    """Every layer, with all its options; images of 13 x 10 with 2 channels."""
    return Sequential(
        {
            "conv1": Conv2D(6, kernel_size=(3, 2), padding="same", activation="leaky_relu"),
            "conv1_activation": Conv2D(6, kernel_size=3, stride=(2, 1), padding=(1, 0), bias=False, activation="gelu"),
            "norm1": BatchNorm(epsilon=1e-3),
            "act1": Activation("leaky_relu", slope=0.3),
            "conv2": Conv2D(12, kernel_size=2, dilation=2, groups=3, padding=2, activation="silu"),
            "pool1": MaxPool2D((3, 2), stride=2, padding="same"),
            "norm2": LayerNorm(),
            "block": Residual(
                {"conv": Conv2D(12, kernel_size=3, padding=1, activation="elu"), "norm": BatchNorm()},
                shortcut=Conv2D(12, kernel_size=1, activation="tanh"),
            ),
            "block2": Residual([Conv2D(12, kernel_size=1, activation="softplus")]),
            "norm3": LayerNorm(axis="channels", epsilon=1e-2),
            "mixed": Concat(
                {
                    "narrow": Conv2D(3, kernel_size=1, activation="softmax"),
                    "wide": [Conv2D(4, kernel_size=3, padding="same", activation="sigmoid"), MaxPool2D(1)],
                    "seen": AvgPool2D(2, stride=1, padding="same"),
                }
            ),
            "pool2": AvgPool2D(3, stride=2, padding=1),
            "pool3": MaxPool2D(2, stride=1, padding=1),
            "ways": Concat(
                {"mean": GlobalAvgPool2D(), "all": [Flatten(), Dense(6)], "some": Dense(4, activation="relu")}
            ),
            "norm4": BatchNorm(),
            "drop": Dropout(0.5),
            "norm5": LayerNorm(),
            "again": Residual([Activation("tanh")]),
            "dense1": Dense(8, activation="softmax", bias=False),
            "norm6": BatchNorm(),
            "output": Dense(5),
        }
    )


def everything_as_model(dtype: str = "double") -> Model:
    return model_of(everything(), Image(13, 10, 2), dtype)


def images_for(model: Model, count: int = 7) -> Any:
    """Images (count, H, W, C) uint8."""
    return np.random.default_rng(11).integers(0, 256, (count, *model.input.shape), np.uint8)


def logits(model: Model, images: Any) -> Any:
    x = model.backend.load_images(images, np.arange(len(images)), model.pixels)
    return model.scores(x)[1]


def imported(model: Model, folder: Path) -> ModuleType:
    """The module that was written, as Python reads it."""
    (folder / "written.py").write_text(torch_source(model), "utf-8")
    spec = importlib.util.spec_from_file_location("written", folder / "written.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_torch(model: Model, images: Any, folder: Path) -> Any:
    """The logits of the written module with the written weights, in double."""
    import torch

    module = imported(model, folder)
    export_torch(model, folder / "a.safetensors")
    net = module.network()
    tensors = {name: torch.from_numpy(array) for name, array in load_file(folder / "a.safetensors").items()}
    net.load_state_dict(tensors)
    net.eval().double()
    with torch.no_grad():
        return net(module.prepared(torch.from_numpy(images)).double()).numpy()
