"""The PyTorch module that is a model's equivalent, as the text of a Python file.

Its parts have the names that the layers have, so that `load_state_dict` takes what `export_torch` wrote. What PyTorch
has as a module of its own, an activation say, gets a name made from the layer's, and has no weights.
"""

from __future__ import annotations

from collections.abc import Callable

from cupynet.backend import Window
from cupynet.errors import ConfigError
from cupynet.exporting.torch_weights import check_known
from cupynet.layouts import orders
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

Entry = tuple[str, str]  # the name of a module, and the expression that makes it
ACTIVATIONS = {
    "relu": "ReLU()", "elu": "ELU()", "gelu": "GELU()", "silu": "SiLU()", "tanh": "Tanh()", "sigmoid": "Sigmoid()",
    "softplus": "Softplus()", "softmax": "Softmax(1)",
}  # fmt: skip

HEAD = '''"""{what}

    from safetensors.torch import load_file

    net = network()
    net.load_state_dict(load_file("weights.safetensors"))
    net.eval()
    logits = net(prepared(images))
"""

from collections import OrderedDict

import torch
from torch import nn

MEAN, DEVIATION = {mean}, {deviation}  # of pixels, in fractions of 255


def prepared(images):
    """Images (N, H, W, C) of 0 to 255 as the network takes them: (N, C, H, W)."""
    mean, deviation = (torch.tensor(each, device=images.device) for each in (MEAN, DEVIATION))
    x = (images.float() / 255 - mean) / deviation
    return x.permute(0, 3, 1, 2)
'''

WAYS = '''
class Ways(nn.Module):
    """Several ways, each a list of names and modules; what they make of x is joined."""

    def __init__(self, join, *ways):
        super().__init__()
        self._join, self._ways = join, [[name for name, _ in way] for way in ways]
        for way in ways:
            for name, module in way:
                self.add_module(name, module)

    def forward(self, x):
        made = []
        for way in self._ways:
            y = x
            for name in way:
                y = self._modules[name](y)
            made.append(y)
        return self._join(made)


def side_by_side(parts):
    return torch.cat(parts, 1)
'''

CHANNEL_NORM = '''
class ChannelNorm(nn.LayerNorm):
    """Over the channels of each pixel."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
'''

MEAN_OF_SEEN = '''
class MeanOfSeen(nn.Module):
    """The mean of those pixels of a window that the image has."""

    def __init__(self, kernel, stride, around):
        super().__init__()
        self._pad, self._sum = nn.ZeroPad2d(around), nn.AvgPool2d(kernel, stride)

    def forward(self, x):
        return self._sum(self._pad(x)) / self._sum(self._pad(torch.ones_like(x[:1, :1])))
'''


# what an nn.Sequential of PyTorch 2.13 has itself, beside register_...: no module in one may be called so
TAKEN = frozenset((
    "T_destination", "add_module", "append", "apply", "bfloat16", "buffers", "call_super_init", "children", "compile",
    "cpu", "cuda", "double", "dump_patches", "eval", "extend", "extra_repr", "float", "forward", "get_buffer",
    "get_extra_state", "get_parameter", "get_submodule", "half", "insert", "ipu", "load_state_dict", "modules",
    "mtia", "named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "pop",
    "requires_grad_", "set_extra_state", "set_submodule", "share_memory", "state_dict", "to", "to_empty", "train",
    "training", "type", "xpu", "zero_grad",
))  # fmt: skip


def torch_source(model: Model) -> str:
    """The text. ConfigError: a layer is not known there, or is called what is none's there."""
    check_known(model.network, "PyTorch")
    for layer in model.network.walk():
        if layer.path.rpartition(".")[2] in TAKEN:
            raise ConfigError(
                f"layer '{layer.path}': every module of PyTorch has something of that name: give it another one"
            )
    orders(model.network)  # refuses what PyTorch has in two orders
    entries = (
        _inside(model.network) if isinstance(model.network, Sequential) else _entries("network", model.network, ())
    )
    if isinstance(model.network, Sequential):
        made = f"nn.Sequential(OrderedDict([\n{_listed(entries, 2)}    ]))"
    elif len(entries) == 1:  # its weights have no layer's name before theirs
        made = entries[0][1]
    else:
        raise ConfigError("the network is one layer that is several modules in PyTorch: put it into a Sequential")
    pixels = model.pixels
    what = f"A network in PyTorch, made by cupynet: images {model.input} to {model.output.features} outputs."
    text = HEAD.format(what=what, mean=list(pixels.mean), deviation=list(pixels.deviation))
    for name, helper in (("Ways(", WAYS), ("ChannelNorm(", CHANNEL_NORM), ("MeanOfSeen(", MEAN_OF_SEEN)):
        text += f"\n{helper}" if name in made else ""
    return f"{text}\n\ndef network():\n    return {made}\n"


def _listed(entries: list[Entry], depth: int) -> str:
    return "".join(f"{'    ' * depth}({name!r}, {made}),\n" for name, made in entries)


def _inside(layer: Layer) -> list[Entry]:
    """The modules of all that a layer holds, one after the other."""
    children = [(name, child) for name, child in layer.children() if hasattr(child, "output")]
    names = tuple(name for name, _ in children)
    return [entry for name, child in children for entry in _entries(name, child, names)]


def _entries(name: str, layer: Layer, names: tuple[str, ...]) -> list[Entry]:
    """The modules that a layer is; names: of those beside it, which theirs must not be."""

    def beside(what: str) -> str:
        found = f"{name}_{what}"
        while found in names:
            found += "_"
        return found

    if isinstance(layer, Sequential):
        return [(name, f"nn.Sequential(OrderedDict([{_on_a_line(_inside(layer))}]))")]
    if isinstance(layer, Residual):
        whole = tuple(inner for inner, _ in layer.children())
        around = [] if layer.shortcut is None else _entries("shortcut", layer.shortcut, whole)
        through = [entry for inner, child in layer.body.children() for entry in _entries(inner, child, whole)]
        return [(name, f"Ways(sum, [{_on_a_line(through)}], [{_on_a_line(around)}])")]
    if isinstance(layer, Concat):
        whole = tuple(layer.branches)
        ways = [_on_a_line(_entries(inner, branch, whole)) for inner, branch in layer.branches.items()]
        return [(name, f"Ways(side_by_side, {', '.join(f'[{way}]' for way in ways)})")]
    return _of_one(name, layer, beside)


def _on_a_line(entries: list[Entry]) -> str:
    return ", ".join(f"({name!r}, {made})" for name, made in entries)


def _of_one(name: str, layer: Layer, beside: Callable[[str], str]) -> list[Entry]:
    """The modules of a layer that holds no others."""
    if isinstance(layer, Conv2D):
        channels, pad, padding = layer.input.shape[-1], _around(layer.window), ""
        before = [] if pad is None else [(beside("pad"), f"nn.ZeroPad2d({pad})")]
        if pad is None and layer.window.pads:
            padding = f", padding={tuple(each[0] for each in layer.window.padding)}"
        more = f", stride={layer.stride}" * (layer.stride != (1, 1)) + padding
        more += f", dilation={layer.dilation}" * layer.window.dilates + f", groups={layer.groups}" * (layer.groups > 1)
        bias = "" if layer.use_bias else ", bias=False"
        conv = (name, f"nn.Conv2d({channels}, {layer.filters}, {layer.kernel}{more}{bias})")
        return [*before, conv, *_activation(beside("activation"), layer.activation)]
    if isinstance(layer, Dense):
        before = [(beside("flatten"), "nn.Flatten()")] if isinstance(layer.input, Image) else []
        bias = "" if layer.use_bias else ", bias=False"
        linear = (name, f"nn.Linear({layer.input.features}, {layer.units}{bias})")
        return [*before, linear, *_activation(beside("activation"), layer.activation)]
    if isinstance(layer, BatchNorm):
        kind = "BatchNorm2d" if isinstance(layer.input, Image) else "BatchNorm1d"
        momentum = f"eps={layer.epsilon!r}, momentum={1 - layer.momentum!r}"
        return [(name, f"nn.{kind}({layer.input.shape[-1]}, {momentum})")]
    if isinstance(layer, LayerNorm):
        *pixels, channels = layer.input.shape
        if layer.axis == "channels" and pixels:
            return [(name, f"ChannelNorm({channels}, eps={layer.epsilon!r})")]
        return [(name, f"nn.LayerNorm({[channels, *pixels]}, eps={layer.epsilon!r})")]
    if isinstance(layer, MaxPool2D | AvgPool2D):
        return _pool(name, layer, beside("pad"))
    if isinstance(layer, Activation):
        return _activation(name, layer.name, layer.slope)
    if isinstance(layer, Dropout):
        return [(name, f"nn.Dropout({layer.rate!r})")]
    pooled = [(beside("mean"), "nn.AdaptiveAvgPool2d(1)")] if isinstance(layer, GlobalAvgPool2D) else []
    assert pooled or isinstance(layer, Flatten), "the others were refused"
    return [*pooled, (name, "nn.Flatten()")]


def _pool(name: str, layer: MaxPool2D | AvgPool2D, pad_name: str) -> list[Entry]:
    """PyTorch's pools take padding that is even, of at most half a window: else it is made before."""
    window, pad = layer.window, _around(layer.window, half=True)
    size = f"{window.kernel}, {window.stride}"
    padding = f", {tuple(each[0] for each in window.padding)}" if pad is None and window.pads else ""
    if isinstance(layer, MaxPool2D):
        before = [] if pad is None else [(pad_name, f"nn.ConstantPad2d({pad}, float('-inf'))")]
        return [*before, (name, f"nn.MaxPool2d({size}{padding})")]
    if pad is not None:
        return [(name, f"MeanOfSeen({size}, {pad})")]
    return [(name, f"nn.AvgPool2d({size}{padding}, count_include_pad=False)")]


def _around(window: Window, *, half: bool = False) -> tuple[int, int, int, int] | None:
    """Columns left and right, rows above and below, where they are no argument of PyTorch's; None where they are.

    half: whether it takes at most half a window.
    """
    (top, bottom), (left, right) = window.padding
    fits = not half or (2 * top <= window.kernel[0] and 2 * left <= window.kernel[1])
    return None if top == bottom and left == right and fits else (left, right, top, bottom)


def _activation(name: str, kind: str, slope: float = 0.01) -> list[Entry]:
    if kind == "identity":
        return []
    return [(name, f"nn.LeakyReLU({slope!r})" if kind == "leaky_relu" else f"nn.{ACTIVATIONS[kind]}")]
