"""Comparison of a model with the layer settings in a `.keras` archive that affect inference."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from cupynet import nn
from cupynet.core.errors import DataError
from cupynet.core.files import PathLike
from cupynet.core.wording import listed, one_line, shown
from cupynet.nn.pool import window_on

Settings = dict[str, Any]
KINDS: dict[type[nn.Layer], str] = {
    nn.Conv2D: "Conv2D",
    nn.Dense: "Dense",
    nn.BatchNorm: "BatchNormalization",
    nn.LayerNorm: "LayerNormalization",
    nn.MaxPool2D: "MaxPooling2D",
    nn.AvgPool2D: "AveragePooling2D",
    nn.GlobalAvgPool2D: "GlobalAveragePooling2D",
    nn.Activation: "Activation",
    nn.Residual: "Add",
    nn.Concat: "Concatenate",
}
WEIGHTED = ("Conv2D", "Dense", "BatchNormalization", "LayerNormalization")
# classes without effect on inference, and Flatten, which `Dense` includes. Classes named Random... are ignored too
IGNORED = (
    *("InputLayer", "Flatten", "Identity", "Dropout", "SpatialDropout2D", "GaussianDropout", "AlphaDropout"),
    *("GaussianNoise", "ActivityRegularization"),
)
ACTIVATIONS = {"linear": "identity", "swish": "silu"}  # Keras -> cupynet, if names differ


@dataclass
class Step:
    """A layer without activation, or an activation, described as in Keras. `layer` is None for a step from the file."""

    kind: str
    name: str
    settings: Settings = field(default_factory=dict)
    layer: nn.Layer | None = None

    def __str__(self) -> str:
        kind = self.settings["activation"] if self.kind == "Activation" else self.kind
        return f"{kind} of '{self.name}'"


def snake_case(kind: str) -> str:
    """Convert a class name to snake case as Keras does: BatchNormalization -> batch_normalization."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", kind))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def check_settings(model: nn.Model, config: Any, file_names: Mapping[str, str], path: PathLike) -> None:
    """Raise DataError if the layer settings in `config`, the content of config.json, differ from the model's.

    file_names: maps names of layers in the model to names in the file.
    """
    try:
        file_steps = [step for step in _file_steps(config) if not _only_flattens(step, model.input.shape)]
        if file_steps:
            _check_steps(model, list(_model_steps(model.network)), file_steps, file_names, path)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: its config.json does not describe a Keras 3 model ({one_line(error)})") from error


def _check_steps(
    model: nn.Model, model_steps: list[Step], file_steps: list[Step], file_names: Mapping[str, str], path: PathLike
) -> None:
    _check_pixels(model, file_steps, path)
    if file_steps and file_steps[-1].settings.get("activation") == model.loss.applies is not None:
        file_steps.pop()  # the loss applies this activation
    by_name = {step.name: step for step in file_steps if step.kind != "Activation"}
    for step in model_steps:
        if step.kind in WEIGHTED and file_names.get(step.name) in by_name:
            _check_pair(step, by_name[file_names[step.name]], path)
        elif step.kind not in KINDS.values():  # a user-defined class
            file_step = by_name.get(file_names.get(step.name, ""))
            step.kind = f"custom layer {step.kind}"
            if file_step is not None:
                file_step.kind = step.kind
    if any(step.kind in ("Add", "Concatenate") for step in (*model_steps, *file_steps)):
        _check_together(model_steps, file_steps, path)
    else:
        _check_in_order(model_steps, file_steps, path)


def _only_flattens(step: Step, shape: tuple[int, ...]) -> bool:
    """Return True for a Reshape to a vector, or to the model's input shape, such as (28, 28) to (28, 28, 1)."""
    target = step.settings.get("target_shape", [])
    return step.kind == "Reshape" and (len(target) == 1 or tuple(target) == shape)


def _check_in_order(model_steps: Sequence[Step], file_steps: Sequence[Step], path: PathLike) -> None:
    for step, file_step in zip_longest(model_steps, file_steps):
        if step is None or file_step is None or step.kind != file_step.kind:
            raise DataError(
                f"{path}: the networks differ: the file has {file_step or 'no more layers'}, the model has "
                f"{step or 'no more layers'}. Build the same network, or save only the weights (.weights.h5)"
            )
        if step.kind not in WEIGHTED:
            _check_pair(step, file_step, path)


def _check_together(model_steps: Sequence[Step], file_steps: Sequence[Step], path: PathLike) -> None:
    """Compare networks with branches regardless of the order of steps, which is arbitrary in the file."""
    remaining = list(file_steps)
    for step in model_steps:
        candidates = [file_step for file_step in remaining if file_step.kind == step.kind]
        match = next(
            (file_step for file_step in candidates if step.kind in WEIGHTED or not _differences(step, file_step)), None
        )
        if match is None:
            if candidates:
                _check_pair(step, candidates[0], path)
            raise DataError(f"{path}: the model has {step}, but the file does not. Build the same network")
        remaining.remove(match)
    if remaining:
        raise DataError(f"{path}: the file has {remaining[0]}, but the model does not. Build the same network")


def _check_pair(step: Step, file_step: Step, path: PathLike) -> None:
    differences = _differences(step, file_step)
    if differences:
        texts = [
            f"{name} is {shown(value)}, but {shown(file_value)} in the file" for name, value, file_value in differences
        ]
        raise DataError(
            f"{path}: layer '{step.name}' ({file_step.name!r} in the file): {listed(texts, 'and')}. "
            "Change the model to match the file"
        )


def _differences(step: Step, file_step: Step) -> list[tuple[str, Any, Any]]:
    """Return the name, the value in the model and the value in the file of each setting that differs."""
    assert step.layer is not None
    expected = _resolved(file_step.settings, step.layer)
    return [(name, step.settings[name], value) for name, value in expected.items()
            if name in step.settings and value is not None and not _equal(step.settings[name], value)]  # fmt: skip


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float) and not isinstance(other, bool):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _check_pixels(model: nn.Model, file_steps: list[Step], path: PathLike) -> None:
    """Remove an initial Rescaling from `file_steps`. Raise DataError if it differs from the model's pixel scaling."""
    if file_steps[0].kind != "Rescaling":
        return
    settings, pixels = file_steps.pop(0).settings, model.pixels
    scale, offset = (
        np.atleast_1d(np.array(settings.get(name, default), float)) for name, default in (("scale", 1), ("offset", 0))
    )
    same = np.allclose(pixels.scale, scale, rtol=1e-6, atol=0) and np.allclose(pixels.shift, offset, rtol=1e-6)
    if not same:
        with np.errstate(divide="ignore", invalid="ignore"):
            mean, std = 0 - offset / (255 * scale), 1 / (255 * scale)
        like_it = f"PixelScale.of({mean.round(6).tolist()}, {std.round(6).tolist()})"
        raise DataError(
            f"{path}: its Rescaling has scale={scale.tolist()} and offset={offset.tolist()}, but the model scales "
            f"pixels differently. Set model.pixels = cupynet.backend.{like_it}"
        )


# the model ------------------------------------------------------------------------------------------------------------


def _model_steps(network: nn.Layer) -> Iterator[Step]:
    for layer in network.walk():
        if isinstance(layer, nn.Sequential | nn.Flatten | nn.Dropout):
            continue
        kind = KINDS.get(type(layer), type(layer).__name__)
        if kind != "Activation":
            yield Step(kind, layer.path, _settings_of(layer), layer)
        name = layer.name if isinstance(layer, nn.Activation) else getattr(layer, "activation", "identity")
        if name != "identity":
            slope = {"negative_slope": getattr(layer, "slope", 0.01)} if name == "leaky_relu" else {}
            yield Step("Activation", layer.path, {"activation": name, **slope}, layer)


def _settings_of(layer: nn.Layer) -> Settings:
    settings: Settings = {"data_format": "channels_last"}
    if isinstance(layer, nn.Conv2D | nn.MaxPool2D | nn.AvgPool2D):
        size = "kernel_size" if isinstance(layer, nn.Conv2D) else "pool_size"
        settings |= {size: layer.kernel_size, "strides": layer.stride, "padding": layer.window.padding}
    if isinstance(layer, nn.Conv2D):
        settings |= {"filters": layer.filters, "dilation_rate": layer.dilation, "groups": layer.groups}
    elif isinstance(layer, nn.Dense):
        settings |= {"units": layer.units}
    elif isinstance(layer, nn.Concat):
        settings["axis"] = (-1,)
    elif isinstance(layer, nn.BatchNorm | nn.LayerNorm):
        axes = len(layer.input.shape) if isinstance(layer, nn.LayerNorm) and layer.axis == "features" else 1
        settings |= {"epsilon": layer.epsilon, "axis": tuple(range(-axes, 0)), "rms_scaling": False}
    if isinstance(layer, nn.Conv2D | nn.Dense):
        settings["use_bias"] = layer.use_bias
    return settings


# the network in the file ----------------------------------------------------------------------------------------------


def _file_steps(config: Any, prefix: str = "") -> Iterator[Step]:
    """Yield the steps of the model in the file, including nested models, named as in the weights file."""
    counts: Counter[str] = Counter()
    padding: Any = None  # a ZeroPadding2D to merge into the next convolution
    for layer in config.get("config", {}).get("layers", []):
        kind, settings = str(layer["class_name"]), dict(layer.get("config", {}))
        name = snake_case(kind)
        counts[name] += 1
        name = f"{prefix}{name}_{counts[name] - 1}" if counts[name] > 1 else f"{prefix}{name}"
        if "layers" in settings:
            yield from _file_steps(layer, f"{name}/layers/")
        elif kind == "ZeroPadding2D" and padding is None:
            padding = Step(kind, name, settings)
        elif kind not in IGNORED and not kind.startswith("Random"):
            if padding is not None and kind in ("Conv2D", "DepthwiseConv2D") and settings.get("padding") == "valid":
                settings["padding"] = padding.settings["padding"]
            elif padding is not None:
                yield padding
            padding = None
            yield from _steps(kind, name, settings)
    if padding is not None:
        yield padding


def _steps(kind: str, name: str, settings: Settings) -> Iterator[Step]:
    activation = settings.pop("activation", "linear")
    if kind in ("ReLU", "LeakyReLU", "ELU", "Softmax"):
        activation = {"class_name": kind, "config": settings}
    elif kind != "Activation":
        yield Step("Conv2D" if kind == "DepthwiseConv2D" else kind, name, settings)
    activation_settings = _activation(activation)
    if activation_settings["activation"] != "identity":
        yield Step("Activation", name, activation_settings)


def _activation(value: Any) -> Settings:
    """Return cupynet's name for an activation, and its slope if any. Keras stores a name, a function or a layer."""
    if isinstance(value, Mapping):
        kind, settings = str(value.get("class_name")), value.get("config")
        if not isinstance(settings, Mapping):
            return _activation(settings)
        slope = settings.get("negative_slope") or 0.0
        if kind in ("ReLU", "LeakyReLU") and not settings.get("max_value") and not settings.get("threshold"):
            return {"activation": "leaky_relu", "negative_slope": slope} if slope else {"activation": "relu"}
        known = (kind == "ELU" and settings.get("alpha", 1) == 1) or (kind == "Softmax" and settings.get("axis") == -1)
        return {"activation": kind.lower() if known else f"{kind} {dict(settings)}"}
    name = "linear" if value is None else str(value)
    slope_of = {"negative_slope": 0.2} if name == "leaky_relu" else {}
    return {"activation": ACTIVATIONS.get(name, name), **slope_of}


def _resolved(settings: Settings, layer: nn.Layer) -> Settings:
    """Convert settings from the file to the form of `_settings_of`, with sizes as pairs and padding in pixels."""
    resolved = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if "depth_multiplier" in resolved:  # DepthwiseConv2D
        channels = layer.input.shape[-1]
        resolved |= {"groups": channels, "filters": channels * resolved.pop("depth_multiplier")}
    if isinstance(resolved.get("axis"), int):
        resolved["axis"] = (resolved["axis"],)
    if "axis" in resolved:
        axes = len(layer.input.shape) + 1
        resolved["axis"] = tuple(sorted(axis - axes if axis > 0 else axis for axis in resolved["axis"]))
    padding = resolved.get("padding")
    if isinstance(layer, nn.Conv2D | nn.MaxPool2D | nn.AvgPool2D) and padding is not None:
        if padding in ("same", "valid"):
            dilation = layer.dilation if isinstance(layer, nn.Conv2D) else (1, 1)
            amount = None if padding == "same" else (0, 0)
            resolved["padding"] = window_on(layer.input, layer.kernel_size, layer.stride, amount, dilation).padding
        else:
            resolved["padding"] = tuple(map(tuple, padding))
    if not isinstance(layer.input, nn.Image):
        resolved.pop("data_format", None)
    return resolved
