"""A network as plain data, for a process that builds its equivalent with another library: see `cupynet.peer`."""

from __future__ import annotations

from typing import Any

from cupynet.errors import ConfigError
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
from cupynet.nn.loss import SoftmaxNLL
from cupynet.optim import Optimizer

Words = dict[str, Any]

# as PyTorch calls them, at rates at which nothing explodes
OPTIMIZERS: dict[str, Words] = {
    "SGD": {"name": "SGD", "lr": 0.01},
    "Momentum": {"name": "SGD", "lr": 0.01, "momentum": 0.9},
    "Nesterov": {"name": "SGD", "lr": 0.01, "momentum": 0.9, "nesterov": True},
    "Adam": {"name": "Adam", "lr": 0.001},
    "AdamW": {"name": "AdamW", "lr": 0.001},
    "AMSGrad": {"name": "Adam", "lr": 0.001, "amsgrad": True},
    "Nadam": {"name": "NAdam", "lr": 0.001},
    "AdaMax": {"name": "Adamax", "lr": 0.001},
    "AdaGrad": {"name": "Adagrad", "lr": 0.001},
    "AdaDelta": {"name": "Adadelta", "lr": 0.001},
    "RMSProp": {"name": "RMSprop", "lr": 0.001},
}


def described(model: Model, optimizer: Optimizer) -> Words:
    """The input (height, width, channels), the layers in order, and the optimizer.

    Raises:
        ConfigError: a layer, the loss or the optimizer has no equivalent.
    """
    name = type(optimizer).__name__
    if name not in OPTIMIZERS:
        raise ConfigError(f"peers=torch: PyTorch has no {name}: choose one of {', '.join(OPTIMIZERS)}, or peers=null")
    if type(model.loss) is not SoftmaxNLL:
        raise ConfigError(
            f"peers=torch: PyTorch is measured with softmax and cross-entropy, not with {type(model.loss).__name__}: "
            "leave out loss=, or peers=torch"
        )
    sizes = {"input": list(model.input.shape), "outputs": model.output.features}
    return {**sizes, "layers": _layer(model.network), "optimizer": OPTIMIZERS[name]}


def _layer(layer: Layer) -> list[Words]:
    """One built layer, or those that it holds one after the other."""
    if isinstance(layer, Sequential):
        return [words for _, inner in layer.children() for words in _layer(inner)]
    if isinstance(layer, Residual):
        shortcut = [] if layer.shortcut is None else _layer(layer.shortcut)
        return [{"kind": "residual", "body": _layer(layer.body), "shortcut": shortcut}]
    if isinstance(layer, Concat):
        return [{"kind": "concat", "branches": [_layer(branch) for _, branch in layer.children()]}]
    return [_words(layer)]


def _words(layer: Layer) -> Words:
    channels = layer.input.shape[-1]
    if isinstance(layer, Conv2D | MaxPool2D | AvgPool2D):
        window = layer.window
        seen = {"kernel": window.kernel, "stride": window.stride, "padding": window.padding}
        if not isinstance(layer, Conv2D):
            return {"kind": "max_pool" if isinstance(layer, MaxPool2D) else "avg_pool", **seen}
        more = {"dilation": layer.dilation, "groups": layer.groups, "bias": layer.use_bias}
        return {"kind": "conv", "in": channels, "out": layer.filters, "activation": layer.activation, **seen, **more}
    if isinstance(layer, Dense):
        features, out = layer.input.features, layer.units
        return {"kind": "dense", "in": features, "out": out, "activation": layer.activation, "bias": layer.use_bias}
    if isinstance(layer, BatchNorm):
        sizes = {"channels": channels, "of_images": len(layer.input.shape) == 3}
        return {"kind": "batch_norm", **sizes, "momentum": layer.momentum, "epsilon": layer.epsilon}
    if isinstance(layer, LayerNorm) and layer.axis == "features":
        return {"kind": "layer_norm", "shape": [channels, *layer.input.shape[:-1]], "epsilon": layer.epsilon}
    if isinstance(layer, Activation):
        return {"kind": "activation", "name": layer.name, "slope": layer.slope}
    if isinstance(layer, Dropout):
        return {"kind": "dropout", "rate": layer.rate}
    if isinstance(layer, GlobalAvgPool2D | Flatten):
        return {"kind": "global_avg_pool" if isinstance(layer, GlobalAvgPool2D) else "flatten"}
    raise ConfigError(
        f"peers=torch: layer '{layer.path}' is a {type(layer).__name__}, for which nothing is known that is like it "
        "there: measure another model, or leave peers=null"
    )
