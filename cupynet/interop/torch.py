"""Import weights from PyTorch, and export weights or the source code of an equivalent module.

Images are (H, W, C) in cupynet and (C, H, W) in PyTorch. In layers with a flattened input, the rows of dense weights
and the values of normalization weights are therefore permuted (see `orders`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet import nn
from cupynet.backend import Window
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import FOREIGN, PathLike, load_tensors, save_weights
from cupynet.core.wording import one
from cupynet.interop.matching import check_all_taken, check_known, check_shape, take, weights_of

Order = NDArray[np.int64]  # (F,), the index in cupynet's vector of each value in PyTorch's vector
Modules = dict[str, str]  # name suffix -> Python expression


@dataclass(frozen=True)
class Equivalent:
    """PyTorch equivalent of a layer.

    Attributes:
        modules: returns the modules of a built layer in order, by suffix. The module with the suffix "" has the name
            and weights of the layer. Other modules (":pad", ":activation") have no weights.
        names: maps weight names to PyTorch's, if they differ.
        axes: permutation from cupynet's axes to PyTorch's, applied to weights with this number of axes.
    """

    modules: Callable[[Any], Modules]
    names: Mapping[str, str] = field(default_factory=dict)
    axes: tuple[int, ...] = ()


def _conv(layer: nn.Conv2D) -> Modules:
    (top, bottom), (left, right) = layer.window.padding
    even = top == bottom and left == right
    arguments = (
        f"{layer.input.shape[-1]}, {layer.filters}, {layer.kernel_size}, stride={layer.stride}, "
        f"padding={(top, left) if even else 0}, dilation={layer.dilation}, groups={layer.groups}, bias={layer.use_bias}"
    )
    pad = {} if even else {":pad": f"nn.ZeroPad2d({_padding(layer.window)})"}
    return {**pad, "": f"nn.Conv2d({arguments})", **_activation(":activation", layer.activation)}


def _dense(layer: nn.Dense) -> Modules:
    flatten = {":flatten": "nn.Flatten()"} if isinstance(layer.input, nn.Image) else {}
    linear = f"nn.Linear({layer.input.features}, {layer.units}, bias={layer.use_bias})"
    return {**flatten, "": linear, **_activation(":activation", layer.activation)}


def _batch_norm(layer: nn.BatchNorm) -> Modules:
    kind = "BatchNorm2d" if isinstance(layer.input, nn.Image) else "BatchNorm1d"
    return {"": f"nn.{kind}({layer.input.shape[-1]}, eps={layer.epsilon!r}, momentum={1 - layer.momentum!r})"}


def _layer_norm(layer: nn.LayerNorm) -> Modules:
    *pixels, channels = layer.input.shape
    if layer.axis == "channels" and pixels:
        return {"": f"ChannelNorm({channels}, eps={layer.epsilon!r})"}
    return {"": f"nn.LayerNorm({[channels, *pixels]}, eps={layer.epsilon!r})"}


def _max_pool(layer: nn.MaxPool2D) -> Modules:
    window = layer.window
    pad = {":pad": f"nn.ConstantPad2d({_padding(window)}, -torch.inf)"} if window.pads else {}
    return {**pad, "": f"nn.MaxPool2d({window.kernel}, {window.stride})"}


def _avg_pool(layer: nn.AvgPool2D) -> Modules:
    window = layer.window
    if window.pads:
        return {"": f"MaskedAvgPool({window.kernel}, {window.stride}, {_padding(window)})"}
    return {"": f"nn.AvgPool2d({window.kernel}, {window.stride})"}


def _padding(window: Window) -> tuple[int, int, int, int]:
    """Return the padding as PyTorch's padding layers expect it: left, right, top, bottom."""
    (top, bottom), (left, right) = window.padding
    return left, right, top, bottom


ACTIVATIONS = {
    "relu": "ReLU()", "elu": "ELU()", "gelu": "GELU()", "silu": "SiLU()", "tanh": "Tanh()", "sigmoid": "Sigmoid()",
    "softplus": "Softplus()", "softmax": "Softmax(1)",
}  # fmt: skip


def _activation(suffix: str, name: str, slope: float = 0.01) -> Modules:
    if name == "identity":
        return {}
    return {suffix: f"nn.LeakyReLU({slope!r})" if name == "leaky_relu" else f"nn.{ACTIVATIONS[name]}"}


NORM_NAMES = {"scale": "weight", "shift": "bias", "mean": "running_mean", "variance": "running_var"}
LAYERS: dict[type[nn.Layer], Equivalent] = {
    nn.Conv2D: Equivalent(_conv, axes=(3, 2, 0, 1)),  # (K_h, K_w, C, O) -> (O, C, K_h, K_w)
    nn.Dense: Equivalent(_dense, axes=(1, 0)),  # (F, O) -> (O, F)
    nn.BatchNorm: Equivalent(_batch_norm, NORM_NAMES),
    nn.LayerNorm: Equivalent(_layer_norm, NORM_NAMES, axes=(2, 0, 1)),  # (H, W, C) -> (C, H, W)
    nn.MaxPool2D: Equivalent(_max_pool),
    nn.AvgPool2D: Equivalent(_avg_pool),
    nn.GlobalAvgPool2D: Equivalent(lambda layer: {":mean": "nn.AdaptiveAvgPool2d(1)", "": "nn.Flatten()"}),
    nn.Flatten: Equivalent(lambda layer: {"": "nn.Flatten()"}),
    nn.Dropout: Equivalent(lambda layer: {"": f"nn.Dropout({layer.rate!r})"}),
    nn.Activation: Equivalent(lambda layer: _activation("", layer.name, layer.slope)),
}
KNOWN = (*LAYERS, nn.Sequential, nn.Residual, nn.Concat)
UNCHANGED = Equivalent(lambda layer: {})  # weights of custom layers keep their names and axes


# weights --------------------------------------------------------------------------------------------------------------


def import_torch(model: nn.Model, path: PathLike, names: Mapping[str, str] | None = None) -> None:
    """Load a PyTorch state dict written by `safetensors.torch.save_file(net.state_dict(), path)`.

    Weights and running statistics of any precision, including bfloat16, are converted. Files written by `torch.save`
    are rejected, because they can run code.

    Args:
        names: maps cupynet's names of layers ("conv1": "features.0") or single weights ("conv1.weight":
            "features.0.weight") to PyTorch's. By default, names are the same, except that `scale`, `shift`, `mean` and
            `variance` of a normalization are `weight`, `bias`, `running_mean` and `running_var`.

    Raises:
        DataError: the file cannot be read, or a weight is missing, unexpected, or has the wrong shape.
        ConfigError: `names` contains an unknown layer or weight, or branches end in flattened images.
    """
    if not isinstance(path, str | os.PathLike):
        reason = "must be the path of a file. Write it with safetensors.torch.save_file(net.state_dict(), path)"
        raise ConfigError(reason, "path", f"<{one(type(path).__name__)}>")
    try:
        tensors = load_tensors(path)
    except DataError as error:
        if os.path.splitext(path)[1].lower() in FOREIGN:  # the message names a remedy
            raise
        raise DataError(
            f"{error}. Write it with safetensors.torch.save_file(net.float().state_dict(), path)"
        ) from error
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
    order, names = orders(model.network), names or {}
    arrays = {}
    for name, (layer, weight_name, shape) in weights_of(model, names).items():
        equivalent = LAYERS.get(type(layer), UNCHANGED)
        entry = _renamed(name, names, equivalent.names.get(weight_name, weight_name))
        tensor = take(tensors, entry, name, path)
        convert = partial(from_torch, tensor, equivalent.axes, None if weight_name == "bias" else order.get(id(layer)))
        arrays[name] = check_shape(convert, tensor.shape, shape, f"{name} of {entry!r}", path, equivalent.axes)
    check_all_taken(tensors, path)
    model.load_weights(arrays)
    model.trained_on = ""


def _renamed(name: str, names: Mapping[str, str], default: str) -> str:
    """Return PyTorch's name for a weight, using any entry in `names` for the weight or its nearest enclosing layer."""
    if name in names:
        return names[name]
    layer = name.rpartition(".")[0]
    while layer and layer not in names:
        layer, _, inner = layer.rpartition(".")
        default = f"{inner}.{default}"
    return f"{names[layer]}.{default}" if layer else default


def export_torch(model: nn.Model, path: PathLike) -> None:
    """Write the weights of a model as safetensors, with PyTorch's names and axes.

        net.load_state_dict(safetensors.torch.load_file(path))

    Layers keep their names: `conv1.weight` (O, C, K_h, K_w), `dense1.weight` (O, F), `norm1.running_mean`.
    `torch_source` creates the matching module.

    Raises:
        ConfigError: a layer has no equivalent in PyTorch, or branches end in flattened images.
        OutputError: the file cannot be written.
    """
    check_known(model.network, KNOWN, "PyTorch")
    arrays, order = model.weights(), orders(model.network)
    tensors = {}
    for name, (layer, weight_name, _) in weights_of(model).items():
        equivalent, prefix = LAYERS[type(layer)], f"{layer.path}." if layer.path else ""
        permuted = to_torch(arrays[name], equivalent.axes, None if weight_name == "bias" else order.get(id(layer)))
        tensors[f"{prefix}{equivalent.names.get(weight_name, weight_name)}"] = np.ascontiguousarray(permuted)
        if weight_name == "mean":
            tensors[f"{prefix}num_batches_tracked"] = np.array(0, np.int64)  # load_state_dict requires it
    save_weights(path, tensors)


def to_torch(weight: Any, axes: tuple[int, ...], order: Order | None = None) -> Any:
    """Convert a weight to PyTorch's axes and, if given, to PyTorch's order of flattened inputs (see `orders`)."""
    if order is not None and weight.ndim in (1, 2):
        weight = weight[order]
    return weight.transpose(axes) if weight.ndim == len(axes) else weight


def from_torch(tensor: Any, axes: tuple[int, ...], order: Order | None = None) -> Any:
    """Convert a PyTorch tensor to cupynet's axes and order. This is the inverse of `to_torch`."""
    if tensor.ndim == len(axes):
        tensor = tensor.transpose(np.argsort(axes))
    if order is None or tensor.ndim not in (1, 2) or len(tensor) != len(order):
        return tensor
    weight = np.empty_like(tensor)
    weight[order] = tensor
    return weight


# the order of a flattened image ---------------------------------------------------------------------------------------


def orders(network: nn.Layer) -> dict[int, Order]:
    """Return PyTorch's order of each flattened input, by `id(layer)`. Reject branches with flattened outputs."""
    result: dict[int, Order] = {}
    _output_order(network, None, result)
    return result


def _output_order(layer: nn.Layer, order: Order | None, result: dict[int, Order]) -> Order | None:
    """Return the order of a layer's output for an input in `order`. None: an image, or values in cupynet's order."""
    if isinstance(layer, nn.Sequential):
        for _, inner in layer.children():
            order = _output_order(inner, order, result)
        return order
    if isinstance(layer, nn.Residual | nn.Concat):
        branches = [layer.body, layer.shortcut] if isinstance(layer, nn.Residual) else list(layer.branches.values())
        found = [order if branch is None else _output_order(branch, order, result) for branch in branches]
        if any(each is not None for each in found):
            reason = f"{type(layer).__name__} '{layer.path}' joins flattened images, which PyTorch orders differently"
            raise ConfigError(f"{reason}. Add a Dense layer before it, or at the end of its branches")
        return None
    if isinstance(layer.input, nn.Image) and isinstance(layer, nn.Dense | nn.Flatten):
        image = layer.input
        channels_first = np.arange(image.features).reshape(image.shape).transpose(2, 0, 1).reshape(-1)
        order = channels_first if image.channels > 1 else None  # with one channel, the orders are the same
    if order is not None and isinstance(layer, nn.Dense | nn.BatchNorm | nn.LayerNorm):
        result[id(layer)] = order
    return None if isinstance(layer, nn.Dense) else order


# the module -----------------------------------------------------------------------------------------------------------


HEAD = '''"""PyTorch network generated by cupynet: images {input} to {outputs} outputs.

    from safetensors.torch import load_file

    net = network()
    net.load_state_dict(load_file("weights.safetensors"))
    net.eval()
    logits = net(prepared(images))
"""

from collections import OrderedDict

import torch
from torch import nn

INPUT_SHAPE, OUTPUTS = {shape}, {outputs}  # (height, width, channels), classes
'''

FROM_PIXELS = '''\
MEAN, STD = {mean}, {std}  # of pixels / 255, per channel


def prepared(images):
    """Convert images (N, H, W, C) of 0 to 255 to the network's input (N, C, H, W)."""
    mean, std = (torch.tensor(each, device=images.device) for each in (MEAN, STD))
    x = (images.float() / 255 - mean) / std
    return x.permute(0, 3, 1, 2)
'''

FROM_FLOATS = '''

def prepared(images):
    """Convert images (N, H, W, C), scaled as in training, to the network's input (N, C, H, W)."""
    return images.float().permute(0, 3, 1, 2)
'''

BRANCHES = '''
class Branches(nn.Module):
    """Parallel branches, each a list of (name, module); `join` combines their outputs."""

    def __init__(self, join, *branches):
        super().__init__()
        self._join, self._branches = join, [[name for name, _ in branch] for branch in branches]
        for branch in branches:
            for name, module in branch:
                self.add_module(name, module)

    def forward(self, x):
        outputs = []
        for branch in self._branches:
            y = x
            for name in branch:
                y = self._modules[name](y)
            outputs.append(y)
        return self._join(*outputs)


def concat(*outputs):
    return torch.cat(outputs, 1)
'''

CHANNEL_NORM = '''
class ChannelNorm(nn.LayerNorm):
    """Layer normalization over the channels of each pixel."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
'''

MASKED_AVG_POOL = '''
class MaskedAvgPool(nn.Module):
    """Average pooling over the pixels of each window that are not padding."""

    def __init__(self, kernel, stride, padding):
        super().__init__()
        self._pad, self._pool = nn.ZeroPad2d(padding), nn.AvgPool2d(kernel, stride)

    def forward(self, x):
        return self._pool(self._pad(x)) / self._pool(self._pad(torch.ones_like(x[:1, :1])))
'''
HELPERS = {"Branches(": BRANCHES, "ChannelNorm(": CHANNEL_NORM, "MaskedAvgPool(": MASKED_AVG_POOL}


# attributes of nn.Sequential, which no submodule may be named after
RESERVED = (
    "T_destination add_module append apply bfloat16 buffers call_super_init children compile cpu cuda double "
    "dump_patches eval extend extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half "
    "insert ipu load_state_dict modules mtia named_buffers named_children named_modules named_parameters parameters "
    "pop register_backward_hook register_buffer register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook "
    "register_load_state_dict_pre_hook register_module register_parameter register_state_dict_post_hook "
    "register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory state_dict to to_empty "
    "train training type xpu zero_grad"
)


def torch_source(model: nn.Model) -> str:
    """Return the source code of a function `network()` that creates a PyTorch module equivalent to `model`.

    Modules are named after the layers, so that `load_state_dict` accepts the weights written by `export_torch`.

    Raises:
        ConfigError: a layer has no equivalent in PyTorch or is named after an attribute of PyTorch's modules, branches
            end in flattened images, or the network is a single layer.
    """
    check_known(model.network, KNOWN, "PyTorch")
    orders(model.network)  # raises ConfigError if branches end in a flattened image
    if not isinstance(model.network, nn.Sequential):
        raise ConfigError("the network is a single layer. Wrap it in a Sequential")
    network = "".join(f"        {module},\n" for module in _inside(model.network))
    prepared = FROM_FLOATS if model.trained_on == "floats" else FROM_PIXELS
    text = (HEAD + prepared).format(
        input=model.input,
        outputs=model.output.features,
        shape=model.input.shape,
        mean=list(model.pixels.mean),
        std=list(model.pixels.std),
    )
    text += "".join(f"\n{helper}" for call, helper in HELPERS.items() if call in network)
    return f"{text}\n\ndef network():\n    return nn.Sequential(OrderedDict([\n{network}    ]))\n"


def _inside(layer: nn.Sequential) -> list[str]:
    return [module for name, child in layer.children() for module in _named(name, child)]


def _named(name: str, layer: nn.Layer) -> list[str]:
    if name in RESERVED.split():
        raise ConfigError(f"{layer.path}: PyTorch reserves the name {name!r}. Rename this layer")
    if isinstance(layer, nn.Sequential):
        modules = {"": f"nn.Sequential(OrderedDict([{', '.join(_inside(layer))}]))"}
    elif isinstance(layer, nn.Residual):
        shortcut = [] if layer.shortcut is None else _named("shortcut", layer.shortcut)
        modules = {"": f"Branches(torch.add, [{', '.join(_inside(layer.body))}], [{', '.join(shortcut)}])"}
    elif isinstance(layer, nn.Concat):
        branches = (f"[{', '.join(_named(*branch))}]" for branch in layer.branches.items())
        modules = {"": f"Branches(concat, {', '.join(branches)})"}
    else:
        modules = LAYERS[type(layer)].modules(layer)
    return [f"({name + suffix!r}, {module})" for suffix, module in modules.items()]
