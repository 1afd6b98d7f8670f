"""Comparison of a model with a `.keras` archive: layers and settings that change predictions, but no weight's shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from cupynet import nn
from cupynet.core.errors import DataError
from cupynet.core.files import PathLike
from cupynet.core.wording import one_line, shown
from cupynet.nn.pool import window_on

KINDS: dict[type[nn.Layer], str] = {  # cupynet -> Keras, if names differ
    nn.BatchNorm: "BatchNormalization",
    nn.LayerNorm: "LayerNormalization",
    nn.MaxPool2D: "MaxPooling2D",
    nn.AvgPool2D: "AveragePooling2D",
    nn.GlobalAvgPool2D: "GlobalAveragePooling2D",
    nn.Residual: "Add",
    nn.Concat: "Concatenate",
}
# classes without effect on inference, and Flatten, which `Dense` includes. Classes named Random... are ignored too
IGNORED = (
    *("InputLayer", "Flatten", "Identity", "Dropout", "SpatialDropout2D", "GaussianDropout", "AlphaDropout"),
    *("GaussianNoise", "ActivityRegularization"),
)
ACTIVATIONS = {"linear": "identity", "swish": "silu"}  # Keras -> cupynet, if names differ
COMPARED = {"strides": "stride", "dilation_rate": "dilation", "groups": "groups", "epsilon": "epsilon"}


class FileLayer(NamedTuple):
    """A layer in the file, named as in the weights file."""

    kind: str
    name: str
    settings: dict[str, Any]


def keras_class(layer: nn.Layer) -> str:
    return KINDS.get(type(layer), type(layer).__name__)


def snake_case(kind: str) -> str:
    """Convert a class name to snake case as Keras does: BatchNormalization -> batch_normalization."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", kind))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def check_settings(model: nn.Model, config: Any, file_names: Mapping[str, str], path: PathLike) -> None:
    """Raise DataError if the layers in `config`, the content of config.json, differ from the model's.

    file_names: maps names of layers in the model to names in the file.
    """
    try:
        file_layers = [layer for layer in _file_layers(config) if not _only_flattens(layer, model.input.shape)]
        if file_layers and file_layers[0].kind == "Rescaling":
            _check_pixels(model, file_layers.pop(0).settings, path)
        if file_layers:
            branched = _check_steps(model, file_layers, path)
            by_name = {layer.name: layer for layer in file_layers}
            for layer in model.network.walk():
                found = by_name.get(file_names[layer.path])
                if found and not (branched and isinstance(layer, nn.MaxPool2D | nn.AvgPool2D)):  # numbered differently
                    _check_layer(layer, found, path)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: its config.json does not describe a Keras 3 model ({one_line(error)})") from error


def _check_steps(model: nn.Model, file_layers: list[FileLayer], path: PathLike) -> bool:
    """Compare classes and activations. Return True if there are branches, whose order in the file is arbitrary."""
    steps = [(step, layer.path) for layer in model.network.walk() for step in _model_steps(layer)]
    file_steps = [(step, layer.name) for layer in file_layers for step in _file_steps(layer)]
    if file_steps and file_steps[-1][0] == model.loss.applies:
        file_steps.pop()
    branched = any(step in ("Add", "Concatenate") for step, _ in (*steps, *file_steps))
    if branched:
        steps, file_steps = sorted(steps), sorted(file_steps)
    for step, file_step in zip_longest(steps, file_steps, fillvalue=("no more layers", "")):
        if step[0] != file_step[0]:
            raise DataError(
                f"{path}: the networks differ: the file has {' in '.join(file_step)}, the model has "
                f"{' in '.join(step)}. Build the same network, or save only the weights (.weights.h5)"
            )
    return branched


def _model_steps(layer: nn.Layer) -> Iterator[str]:
    """Yield the class and the activation of a layer."""
    if isinstance(layer, nn.MaxPool2D | nn.AvgPool2D):
        yield f"{keras_class(layer)} with pool_size={layer.kernel_size}"
    elif not isinstance(layer, nn.Sequential | nn.Flatten | nn.Dropout | nn.Activation):
        yield keras_class(layer)
    name = layer.name if isinstance(layer, nn.Activation) else getattr(layer, "activation", "identity")
    if name != "identity":
        yield _with_slope(name, getattr(layer, "slope", 0.01))


def _file_steps(layer: FileLayer) -> Iterator[str]:
    kind, activation = layer.kind, layer.settings.get("activation", "linear")
    if kind in ("ReLU", "LeakyReLU", "ELU", "Softmax"):
        activation = {"class_name": kind, "config": layer.settings}
    elif kind in ("MaxPooling2D", "AveragePooling2D"):
        yield f"{kind} with pool_size={tuple(layer.settings['pool_size'])}"
    elif kind != "Activation":
        yield "Conv2D" if kind == "DepthwiseConv2D" else kind
    name = _activation(activation)
    if name != "identity":
        yield name


def _activation(value: Any) -> str:
    """Return cupynet's name for an activation, with its slope if any. Keras stores a name, a function or a layer."""
    if isinstance(value, Mapping):
        kind, settings = str(value.get("class_name")), value.get("config")
        if not isinstance(settings, Mapping):
            return _activation(settings)
        slope = settings.get("negative_slope") or 0.0
        if kind in ("ReLU", "LeakyReLU") and not settings.get("max_value") and not settings.get("threshold"):
            return _with_slope("leaky_relu", slope) if slope else "relu"
        known = (kind == "ELU" and settings.get("alpha", 1) == 1) or (kind == "Softmax" and settings.get("axis") == -1)
        return kind.lower() if known else f"{kind} {dict(settings)}"
    name = "linear" if value is None else str(value)
    return _with_slope(ACTIVATIONS.get(name, name), 0.2)


def _with_slope(name: str, slope: float) -> str:
    return f"{name} with negative_slope={slope:.6g}" if name == "leaky_relu" else name


def _check_layer(layer: nn.Layer, found: FileLayer, path: PathLike) -> None:
    settings = found.settings
    if settings.get("data_format") == "channels_first" and isinstance(layer.input, nn.Image):
        raise DataError(f"{path}: {found.name!r} has data_format channels_first, which is not supported")
    values = {name: getattr(layer, attribute, None) for name, attribute in COMPARED.items()}
    if isinstance(layer, nn.Conv2D | nn.MaxPool2D | nn.AvgPool2D):
        values["padding"] = layer.window.padding
        if settings["padding"] in ("same", "valid"):
            amount = None if settings["padding"] == "same" else (0, 0)
            dilation = layer.dilation if isinstance(layer, nn.Conv2D) else (1, 1)
            window = window_on(layer.input, layer.kernel_size, layer.stride, amount, dilation)
            settings["padding"] = window.padding
    for name, value in values.items():
        stored = settings.get(name)
        if value is not None and stored is not None and not np.allclose(value, stored, rtol=1e-6, atol=0):
            raise DataError(
                f"{path}: layer '{layer.path}' ({found.name!r} in the file): {name} is {shown(value)}, but "
                f"{shown(stored)} in the file. Change the model to match the file"
            )


def _check_pixels(model: nn.Model, settings: Mapping[str, Any], path: PathLike) -> None:
    """Raise DataError if an initial Rescaling differs from the model's pixel scaling."""
    scale, offset = (np.array(settings.get(name, default), float) for name, default in (("scale", 1), ("offset", 0)))
    pixels = model.pixels
    if not (np.allclose(pixels.scale, scale, rtol=1e-6, atol=0) and np.allclose(pixels.shift, offset, rtol=1e-6)):
        raise DataError(
            f"{path}: its Rescaling has scale={scale.tolist()} and offset={offset.tolist()}, but the model scales "
            "pixels differently. Set model.pixels = cupynet.backend.PixelScale.of([-offset / (255 * scale)], "
            "[1 / (255 * scale)])"
        )


def _file_layers(config: Any, prefix: str = "") -> Iterator[FileLayer]:
    """Yield the layers in the file that affect inference, including layers of nested models."""
    counts: Counter[str] = Counter()
    padding: Any = None  # a ZeroPadding2D to merge into the next convolution
    for layer in config.get("config", {}).get("layers", []):
        kind, settings = str(layer["class_name"]), dict(layer.get("config", {}))
        name = snake_case(kind)
        counts[name] += 1
        name = f"{prefix}{name}_{counts[name] - 1}" if counts[name] > 1 else f"{prefix}{name}"
        if "layers" in settings:
            yield from _file_layers(layer, f"{name}/layers/")
        elif kind == "ZeroPadding2D" and padding is None:
            padding = FileLayer(kind, name, settings)
        elif kind not in IGNORED and not kind.startswith("Random"):
            if padding is not None and kind in ("Conv2D", "DepthwiseConv2D") and settings.get("padding") == "valid":
                settings["padding"] = padding.settings["padding"]
            elif padding is not None:
                yield padding
            padding = None
            yield FileLayer(kind, name, settings)
    if padding is not None:
        yield padding


def _only_flattens(layer: FileLayer, shape: tuple[int, ...]) -> bool:
    """Return True for a Reshape to a vector, or to the model's input shape, such as (28, 28) to (28, 28, 1)."""
    target = layer.settings.get("target_shape", [])
    return layer.kind == "Reshape" and (len(target) == 1 or tuple(target) == shape)
