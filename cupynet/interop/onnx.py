"""Export to ONNX, with operators of opset 20 (2023).

Inside the graph, images are (N, C, H, W). They are flattened in the order H, W, C, so that the weights of dense layers
do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from cupynet import nn
from cupynet.backend import Window
from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.core.files import PathLike, write_output
from cupynet.core.wording import shown
from cupynet.interop.matching import check_known

OPSET, IR_VERSION = 20, 9  # as in onnx 1.15
INPUTS = ("uint8", "float")
BOUND = 1e-5  # largest acceptable result of `difference` in float
BATCH_SIZE = 100  # in `difference`
PROBABILITIES: dict[type[Any], tuple[str, dict[str, Any]]] = {
    nn.SoftmaxNLL: ("Softmax", {"axis": -1}),
    nn.BinaryCrossEntropy: ("Sigmoid", {}),
}
SIMPLE: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name.capitalize(), {}) for name in ("relu", "elu", "gelu", "tanh", "sigmoid", "softplus")},
    "softmax": ("Softmax", {"axis": 1}),  # over the channels of images, or the features of vectors
}


def export_onnx(
    model: nn.Model, path: PathLike, *, input: str = "uint8", metadata: Mapping[str, str] | None = None
) -> None:
    """Write the model to an ONNX file. Requires onnx (the extra `onnx`).

    The graph is for inference, in float, and includes the scaling and normalization of pixels. Its input is `images`
    (N, H, W, C) with any N. Its outputs are `logits` (N, O) and, if the loss defines them, `probabilities`.

    Args:
        input: dtype of `images`: `uint8` (0 to 255) or `float` (0 to 1). For a model trained on floating-point images,
            use `float` with images scaled as in training.
        metadata: names and strings to store in the file's metadata.

    Raises:
        ConfigError: onnx is not installed, a layer has no equivalent in ONNX, `input` does not match the images of the
            training, or a value of `metadata` is not a string.
        OutputError: the file cannot be written.
    """
    write_output(path, onnx_graph(model, input=input, metadata=metadata))


def onnx_graph(model: nn.Model, *, input: str = "uint8", metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the model as the content of an ONNX file (see `export_onnx`)."""
    checks.one_of("input", input, INPUTS)
    if input == "uint8" and model.trained_on == "floats":
        reason = "the model was trained on floating-point images, whose scaling it does not know. Use float"
        raise ConfigError(reason, "input", "uint8")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping) or not all(isinstance(each, str) for each in chain(*metadata.items())):
        raise ConfigError("must be a dictionary of strings", "metadata", shown(metadata))
    check_known(model.network, LAYERS, "ONNX")
    weights = {name: np.asarray(weight, np.float32) for name, weight in model.weights().items()}
    return _Graph(weights).of(model, input, metadata)


def difference(content: bytes, model: nn.Model, images: int = 1000, input: str = "uint8") -> float | None:
    """Return the largest difference of logits on random images, relative to their range; None without onnxruntime."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(0).integers(0, 256, (images, *model.input.shape), np.uint8)
    inputs = pixels if input == "uint8" else pixels.astype(np.float32) / np.float32(255)
    parts = np.array_split(inputs, -(-images // BATCH_SIZE))
    logits = np.concatenate([session.run(["logits"], {"images": part})[0] for part in parts])
    x = model.backend.load_images(pixels, np.arange(images), model.pixels)
    expected = model.scores(x)[1].astype(np.float64)
    return float(np.abs(logits - expected).max() / (np.ptp(expected) or 1.0))


class _Graph:
    def __init__(self, weights: Mapping[str, Any]) -> None:
        try:
            import onnx
        except ImportError as error:
            raise ConfigError("ONNX export requires onnx. Install it with pip install 'cupynet[onnx]'") from error
        self.onnx, self.weights = onnx, weights
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def of(self, model: nn.Model, input: str, metadata: Mapping[str, str]) -> bytes:
        make, kinds = self.onnx.helper, self.onnx.TensorProto
        kind = kinds.UINT8 if input == "uint8" else kinds.FLOAT
        output = self.layer(model.network, self.images(model, input))
        if isinstance(model.output, nn.Image):
            output = self.add("Transpose", output, at="output", perm=[0, 2, 3, 1])  # channels last
        logits = self.add("Identity", output, made="logits")
        outputs = [logits]
        if type(model.loss) in PROBABILITIES:
            operator, attributes = PROBABILITIES[type(model.loss)]
            outputs.append(self.add(operator, logits, made="probabilities", **attributes))
        shapes = [make.make_tensor_value_info(name, kinds.FLOAT, ["N", *model.output.shape]) for name in outputs]
        images = make.make_tensor_value_info("images", kind, ["N", *model.input.shape])
        constants = [self.onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = make.make_graph(self.nodes, "cupynet", [images], shapes, constants)
        file = make.make_model(
            graph, opset_imports=[make.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="cupynet"
        )
        for name, text in metadata.items():
            file.metadata_props.add(key=name, value=text)
        self.onnx.checker.check_model(file, full_check=True)
        content: bytes = file.SerializeToString(deterministic=True)
        return content

    def add(self, operator: str, *inputs: str, at: str = "", made: str = "", **attributes: Any) -> str:
        """Add a node. Return the name of the node and of its output: `made`, or `at`/`operator`."""
        made = made or f"{at}/{operator}"
        self.nodes.append(self.onnx.helper.make_node(operator, list(inputs), [made], name=made, **attributes))
        return made

    def constant(self, name: str, value: Any) -> str:
        self.constants[name] = np.ascontiguousarray(value, np.float32)
        return name

    def weight(self, layer: nn.Layer, weight_name: str, axes: tuple[int, ...] | None = None) -> str:
        name = f"{layer.path}.{weight_name}" if layer.path else weight_name
        return self.constant(name, self.weights[name].transpose(axes) if axes else self.weights[name])

    def images(self, model: nn.Model, input: str) -> str:
        """Scale the pixels, and move channels first. Names such as images/Mul never clash with names of layers."""
        per_pixel = 255.0 if input == "float" else 1.0
        scale = self.constant("images/scale", np.array(model.pixels.scale) * per_pixel)
        x = "images"
        if input == "uint8":
            x = self.add("Cast", x, at="images", to=self.onnx.TensorProto.FLOAT)
        x = self.add("Mul", x, scale, at="images")
        x = self.add("Add", x, self.constant("images/shift", model.pixels.shift), at="images")
        vectors = not isinstance(model.input, nn.Image)
        return x if vectors else self.add("Transpose", x, at="images", perm=[0, 3, 1, 2])

    def layer(self, layer: nn.Layer, x: str) -> str:
        return LAYERS[type(layer)](self, layer, x)

    def activation(self, kind: str, x: str, name: str, slope: float = 0.01) -> str:
        if kind == "identity":
            return x
        if kind == "leaky_relu":
            return self.add("LeakyRelu", x, at=name, alpha=slope)
        if kind == "silu":
            return self.add("Mul", x, self.add("Sigmoid", x, at=name), at=name)
        operator, attributes = SIMPLE[kind]
        return self.add(operator, x, at=name, **attributes)

    def flat(self, layer: nn.Layer, x: str) -> str:
        if not isinstance(layer.input, nn.Image):
            return x
        name = _name(layer)
        x = self.add("Transpose", x, at=name, perm=[0, 2, 3, 1])
        return self.add("Flatten", x, at=name, axis=1)


def _name(layer: nn.Layer) -> str:
    return f"/{layer.path or 'network'}"


def _window(window: Window) -> dict[str, Any]:
    (top, bottom), (left, right) = window.padding
    return {
        "kernel_shape": list(window.kernel),
        "strides": list(window.stride),
        "pads": [top, left, bottom, right],
    }


def _sequential(graph: _Graph, layer: Any, x: str) -> str:
    for _, inner in layer.children():
        x = graph.layer(inner, x)
    return x


def _residual(graph: _Graph, layer: Any, x: str) -> str:
    body = _sequential(graph, layer.body, x)
    shortcut = x if layer.shortcut is None else graph.layer(layer.shortcut, x)
    return graph.add("Add", body, shortcut, at=_name(layer))


def _concat(graph: _Graph, layer: Any, x: str) -> str:
    parts = [graph.layer(branch, x) for branch in layer.branches.values()]
    return graph.add("Concat", *parts, at=_name(layer), axis=1)


def _conv(graph: _Graph, layer: Any, x: str) -> str:
    weights = [graph.weight(layer, "weight", (3, 2, 0, 1)), *([graph.weight(layer, "bias")] if layer.use_bias else [])]
    arguments = {"dilations": list(layer.dilation), "group": layer.groups}
    y = graph.add("Conv", x, *weights, at=_name(layer), **_window(layer.window), **arguments)
    return graph.activation(layer.activation, y, _name(layer))


def _dense(graph: _Graph, layer: Any, x: str) -> str:
    weights = [graph.weight(layer, "weight"), *([graph.weight(layer, "bias")] if layer.use_bias else [])]
    y = graph.add("Gemm", graph.flat(layer, x), *weights, at=_name(layer))
    return graph.activation(layer.activation, y, _name(layer))


def _batch_norm(graph: _Graph, layer: Any, x: str) -> str:
    weights = [graph.weight(layer, name) for name in ("scale", "shift", "mean", "variance")]
    return graph.add("BatchNormalization", x, *weights, at=_name(layer), epsilon=layer.epsilon)


def _layer_norm(graph: _Graph, layer: Any, x: str) -> str:
    name, image = _name(layer), isinstance(layer.input, nn.Image)
    by_channel = image and layer.axis == "channels"
    axes = (2, 0, 1) if image and not by_channel else None
    weights = [graph.weight(layer, weight_name, axes) for weight_name in ("scale", "shift")]
    if by_channel:  # the ONNX operator normalizes over the last axes
        x = graph.add("Transpose", x, perm=[0, 2, 3, 1], made=f"{name}/Last")
    settings = {"axis": -1 if by_channel else 1, "epsilon": layer.epsilon}
    y = graph.add("LayerNormalization", x, *weights, at=name, **settings)
    return graph.add("Transpose", y, made=f"{name}/First", perm=[0, 3, 1, 2]) if by_channel else y


def _max_pool(graph: _Graph, layer: Any, x: str) -> str:
    return graph.add("MaxPool", x, at=_name(layer), **_window(layer.window))


def _avg_pool(graph: _Graph, layer: Any, x: str) -> str:
    return graph.add("AveragePool", x, at=_name(layer), count_include_pad=0, **_window(layer.window))


def _global_avg_pool(graph: _Graph, layer: Any, x: str) -> str:
    mean = graph.add("GlobalAveragePool", x, at=_name(layer))
    return graph.add("Flatten", mean, at=_name(layer), axis=1)


LAYERS: dict[type[nn.Layer], Callable[[_Graph, Any, str], str]] = {
    nn.Sequential: _sequential,
    nn.Residual: _residual,
    nn.Concat: _concat,
    nn.Conv2D: _conv,
    nn.Dense: _dense,
    nn.BatchNorm: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.MaxPool2D: _max_pool,
    nn.AvgPool2D: _avg_pool,
    nn.GlobalAvgPool2D: _global_avg_pool,
    nn.Activation: lambda graph, layer, x: graph.activation(layer.name, x, _name(layer), layer.slope),
    nn.Flatten: lambda graph, layer, x: graph.flat(layer, x),
    nn.Dropout: lambda graph, layer, x: x,
}
