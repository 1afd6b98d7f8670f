"""Wrong arguments, impossible networks and mistakes in a user's layer: refused by name."""

import math
from typing import Any

import numpy as np
import pytest

from cupynet import nn
from cupynet.backend import create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn.init import Constant, Normal, Orthogonal, Uniform, VarianceScaling, initializer
from tests.support.networks import SMALL
from tests.support.refusals import refused

RIGHT: dict[Any, dict[str, Any]] = {
    nn.Conv2D: {"filters": 4, "kernel_size": 3},
    nn.MaxPool2D: {"kernel_size": 2},
    nn.Dense: {"units": 3},
    nn.Activation: {"name": "leaky_relu"},
    nn.Model: {"network": nn.Dense(3), "input": nn.Flat(4), "backend": create_backend("numpy")},
    nn.Image: {"height": 2, "width": 2, "channels": 2},
}


WRONG: dict[Any, dict[str, list[Any]]] = {
    nn.Conv2D: {
        "filters": [True],
        "kernel_size": [(3, 0), (3, 3, 3)],
        "stride": [0],
        "dilation": [0],
        "groups": [0],
        "padding": [-1, "full"],
        "activation": ["swish"],
        "init": ["one"],
        "bias": ["no"],
        "bias_init": [math.nan],
    },
    nn.MaxPool2D: {"kernel_size": [0], "stride": [0], "padding": [(0, 2)]},
    nn.Dense: {"units": [0], "activation": [None], "init": ["he_normal", Orthogonal], "bias_init": ["zeroes"]},
    nn.Activation: {"slope": [1]},
    nn.Dropout: {"rate": [1.0, -0.1]},
    nn.BatchNorm: {"momentum": [1.0], "epsilon": [0]},
    nn.LayerNorm: {"axis": ["rows"]},
    Normal: {"std": [0]},
    Uniform: {"limit": [0]},
    VarianceScaling: {"mode": ["fan"], "distribution": ["even"]},
    Orthogonal: {"gain": [0]},
    Constant: {"value": [math.inf]},
    nn.SoftmaxNLL: {"label_smoothing": [1.0], "class_weights": [[], np.ones((2, 2)), [1, -1], [0, 0]]},
    nn.Huber: {"delta": [0]},
    nn.Model: {
        "seed": [2**64],
        "loss": [nn.SoftmaxNLL, "categorical_crossentropy"],
        "input": [(28,)],
        "backend": ["nunba"],
        "dtype": ["half"],
    },
    nn.Image: {"width": [28.0]},
    nn.Flat: {"features": [0]},
}


@pytest.mark.parametrize(("kind", "setting"), [(kind, setting) for kind in WRONG for setting in WRONG[kind]])
def test_wrong_arguments_of_layers_models_losses_and_initializers_are_refused_by_name(kind: Any, setting: str) -> None:
    for value in WRONG[kind][setting]:
        with refused(setting):
            kind(**RIGHT.get(kind, {}) | {setting: value})


class Declares(nn.Layer):
    """A user's layer, which declares vectors."""

    def __init__(self, *names: str, init: str = "zeros") -> None:
        self.names, self.init = names, init

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        for name in self.names:
            params.add(name, input.shape, initializer(self.init))
        return input


ONE = nn.Conv2D(3, 1)
IMAGE = nn.Image(6, 5, 3)
IMPOSSIBLE: dict[str, tuple[nn.Layer, nn.InputType, str]] = {  # network, input, and what the error names
    "a convolution of features": (nn.Conv2D(4, 3), nn.Flat(500), ""),
    "a window larger than the image": (nn.Conv2D(4, 9), nn.Image(8, 12, 1), ""),
    "gaps wider than the image": (nn.Conv2D(4, 3, dilation=(4, 1)), nn.Image(8, 12, 1), ""),
    "groups of five filters": (nn.Conv2D(5, 3, groups=2), nn.Image(8, 8, 4), "groups=2"),
    "groups of three channels": (nn.Conv2D(4, 3, groups=2), nn.Image(8, 8, 3), "groups=2"),
    "a pool of features": (nn.MaxPool2D(2), nn.Flat(9), ""),
    "a pool larger than the image": (nn.MaxPool2D(5), nn.Image(4, 6, 1), ""),
    "a mean of features": (nn.GlobalAvgPool2D(), nn.Flat(3), ""),
    "a vector initialized like a matrix": (Declares("bias", init="xavier"), nn.Flat(3), ""),
    "a weight declared twice": (Declares("bias", "bias"), nn.Flat(3), "bias"),
    "a branch of another size": (nn.Residual(nn.Conv2D(8, 3, 2, "same")), IMAGE, ""),
    "a shortcut of another size": (nn.Residual(nn.Conv2D(8, 1), nn.Conv2D(8, 1, 2)), IMAGE, ""),
    "branches of different sizes": (nn.Concat({"a": nn.Conv2D(2, 1), "b": nn.Conv2D(2, 3)}), IMAGE, ""),
    "features beside an image": (nn.Concat([nn.Dense(2), nn.Conv2D(1, 1)]), IMAGE, ""),
    "a layer named like the shortcut": (nn.Residual({"shortcut": nn.Conv2D(3, 1)}, nn.Conv2D(3, 1)), IMAGE, ""),
    "one layer as branch and shortcut": (nn.Residual(ONE, ONE), IMAGE, ""),
    "one layer in two branches": (nn.Concat([ONE, ONE]), IMAGE, ""),
    "one layer at two depths": (nn.Sequential([ONE, nn.Sequential({"inside": ONE})]), IMAGE, "inside"),
    "softmax before its loss": (nn.Sequential({"a": nn.Dense(4), "output": nn.Dense(3, "softmax")}), SMALL, ""),
    "softmax in a block": (nn.Sequential([nn.Sequential([nn.Dense(3), nn.Activation("softmax")])]), SMALL, ""),
    "a layer in the wrong place": (
        nn.Sequential({"dense1": nn.Dense(500), "block": nn.Sequential({"conv2": nn.Conv2D(50, 5)})}),
        SMALL,
        r"block\.conv2",
    ),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_impossible_networks_are_refused(kind: str) -> None:
    network, input, named = IMPOSSIBLE[kind]
    with pytest.raises(ConfigError, match=named or None):
        nn.Model(network, input, create_backend("numpy"))


@pytest.mark.parametrize("name", ["a.b", "", 3, "a\x1b[2J", "_target_"])
def test_invalid_names_of_layers_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError):
        nn.Sequential({name: nn.Dense(3)})


@pytest.mark.parametrize(("layers", "setting"), [({}, "layers"), (None, "layers"), ({"a": nn.Dense}, "layers.a")])
def test_invalid_layers_are_refused(layers: Any, setting: str) -> None:
    with refused(setting):
        nn.Sequential(layers)


@pytest.mark.parametrize(("wrong", "right"), [({"pool_size": 2}, "kernel_size"), ({"strides": 2}, "stride")], ids=str)
def test_an_unknown_argument_is_refused_with_the_right_name(wrong: dict[str, int], right: str) -> None:
    with pytest.raises(TypeError, match=f"MaxPool2D.*'{[*wrong][0]}'.*'{right}'"):
        nn.MaxPool2D(**{"kernel_size": 2} | wrong if right == "stride" else wrong)


class Scaled(nn.Layer):
    """A factor for each feature. `slip` names the mistake."""

    def __init__(self, slip: str) -> None:
        self.slip = slip

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        self.factor = params.add("factor", input.shape, "ones")
        return {"no type": None, "a shape": input.shape}.get(self.slip, input)

    def forward(self, x: Any, context: nn.Context) -> Any:
        def backward(dy: Any) -> Any:
            if self.slip == "gradient replaced":
                self.factor.grad = (dy * x).sum(axis=0)
            self.factor.grad += (dy * x).sum(axis=0)
            return {"no derivative": None, "a number": 0.0}.get(self.slip, dy * self.factor.data)

        y = x * self.factor.data
        pairs: dict[str, Any] = {"only y": y, "nothing": None, "three values": (y, backward, y), "two arrays": (y, y)}
        return pairs.get(self.slip, ({"another shape": y[:, :1], "a list": y.tolist()}.get(self.slip, y), backward))


def step(slip: str, *before: nn.Layer) -> None:
    backend = create_backend("numpy", "double")
    model = nn.Model(nn.Sequential([*before, Scaled(slip)]), nn.Image(2, 2, 1), backend, 1)
    y, backward = model.forward(backend.asarray([[[[1.0], [2.0]], [[3.0], [4.0]]]]), nn.Context(train=True))
    backward(y)


def test_a_layer_that_replaces_its_gradient_is_refused() -> None:
    step("none")
    with pytest.raises(AttributeError):
        step("gradient replaced")


def test_a_layer_that_returns_no_derivative_is_refused_if_it_is_needed() -> None:
    step("no derivative")  # no layer before it has weights
    with pytest.raises(ConfigError):
        step("no derivative", nn.Dense(3))


@pytest.mark.parametrize("slip", ["only y", "nothing", "three values", "two arrays", "a number"])
def test_a_forward_or_backward_with_other_results_is_refused_with_the_name_of_the_layer(slip: str) -> None:
    with pytest.raises(ConfigError, match="'scaled1'"):
        step(slip, nn.Dense(3))


@pytest.mark.parametrize("slip", ["no type", "a shape", "another shape", "a list"])
def test_a_wrong_output_or_type_of_a_layer_is_refused_with_the_name_of_the_layer(slip: str) -> None:
    with pytest.raises(ConfigError, match="'scaled1'"):
        step(slip)
