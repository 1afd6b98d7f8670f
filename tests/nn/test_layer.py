"""Sequential networks: gradients, buffers on loan, passes in flight, names."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupynet
from cupynet.backend import Backend, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    INFERENCE,
    Activation,
    AvgPool2D,
    Backward,
    BatchNorm,
    Concat,
    Context,
    Conv2D,
    Dense,
    Dropout,
    Flat,
    Flatten,
    GlobalAvgPool2D,
    Image,
    InputType,
    Layer,
    LayerNorm,
    MaxPool2D,
    Model,
    Residual,
    Scope,
    Sequential,
)
from tests.guides.extending.scale import Scale
from tests.support.backends import every_backend, every_compiled_backend
from tests.support.gradients import check_layer
from tests.support.networks import SMALL, Around, examples, gradients, small_networks, train_step
from tests.support.refusals import refused

every_network = pytest.mark.parametrize("kind", small_networks())


@every_network
def test_gradients_of_networks(kind: str) -> None:
    check_layer(small_networks()[kind], SMALL)


@every_compiled_backend
@pytest.mark.parametrize("kind", ["lenet", "blocks"])
def test_gradients_of_a_network_on_every_backend(name: str, kind: str) -> None:
    check_layer(small_networks()[kind], SMALL, create_backend(name, "double"))


EVERY_LAYER: dict[str, Callable[[], Layer]] = {
    "Activation": lambda: Activation("gelu"),
    "AvgPool2D": lambda: AvgPool2D(3, 2, "same"),
    "BatchNorm": BatchNorm,
    "Concat": lambda: Concat([Conv2D(2, 1), Activation("elu")]),
    "Conv2D": lambda: Conv2D(4, 3, stride=2, padding=1, groups=2, activation="tanh"),
    "Dense": lambda: Dense(5, "sigmoid"),
    "Dropout": lambda: Dropout(0.4),
    "Flatten": Flatten,
    "GlobalAvgPool2D": GlobalAvgPool2D,
    "LayerNorm": LayerNorm,
    "MaxPool2D": lambda: MaxPool2D(3, 2),
    "Residual": lambda: Residual(Conv2D(2, 3, padding="same")),
    "Sequential": lambda: Sequential([Conv2D(2, 3, activation="relu"), MaxPool2D(2), LayerNorm("features"), Dense(3)]),
}


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("kind", EVERY_LAYER)
def test_the_derivative_of_every_layer_agrees_with_differences_for_every_batch_size(kind: str, batch: int) -> None:
    check_layer(EVERY_LAYER[kind](), SMALL, batch=batch, training=True)


def test_no_public_layer_is_left_out() -> None:
    classes = {name: value for name in dir(cupynet) if isinstance(value := getattr(cupynet, name), type)}
    assert EVERY_LAYER.keys() == {name for name, value in classes.items() if issubclass(value, Layer)} - {"Layer"}


def test_gradients_of_a_users_layer() -> None:
    check_layer(Sequential([Scale(), Around(Scale()), Dense(3, "relu"), Scale()]), Image(3, 2, 2))


# buffers and passes ---------------------------------------------------------------------------------------------------


@every_backend
@every_network
def test_inference_returns_all_buffers_but_its_output(name: str, kind: str) -> None:
    backend = create_backend(name, "float")
    model = Model(small_networks()[kind], SMALL, backend)
    x, _ = examples(backend, 4)
    before = x.copy()
    logits, _ = model.forward(x, INFERENCE)
    assert backend.workspace.on_loan == 1
    del logits
    assert backend.workspace.on_loan == 0
    assert bool((x == before).all()), "the input was overwritten"


def in_flight(model: Model, seed: int) -> list[Any]:
    """Run a forward pass. Return its backward function and the gradient to call it with."""
    x, labels = examples(model.backend, 4, seed=seed)
    logits, backward = model.forward(x, Context(train=True))
    return [backward, model.loss(model.backend, logits, labels)[1]]


def finish(flight: list[Any]) -> None:
    flight.pop(0)(flight.pop())


@every_backend
@pytest.mark.parametrize("kind", ["lenet", "residual", "blocks", "begins with branches"])
def test_micro_batches_in_flight_add_up_in_any_order(name: str, kind: str) -> None:
    model = Model(small_networks()[kind], SMALL, create_backend(name, "double"))
    for seed in (1, 2):
        finish(in_flight(model, seed))
    expected = gradients(model)
    for first, second in ((0, 1), (1, 0)):
        model.params.grad[...] = 0
        flights = [in_flight(model, 1), in_flight(model, 2)]
        finish(flights[first])
        finish(flights[second])
        for parameter, gradient in gradients(model).items():
            np.testing.assert_allclose(gradient, expected[parameter], rtol=1e-12, atol=1e-13, err_msg=parameter)
        assert model.backend.workspace.on_loan == 0


class Spy(Activation):
    def __init__(self) -> None:
        super().__init__("identity")
        self.calls = 0

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y, backward = super().forward(x, context)

        def spied(dy: Any) -> Any:
            self.calls += 1
            return backward(dy)

        return y, spied


def test_layers_before_the_first_weights_compute_no_derivative() -> None:
    block = Sequential({"second": Spy(), "dense": Dense(4), "third": Spy()})
    network = Sequential({"first": Spy(), "block": block, "fourth": Spy(), "output": Dense(3)})
    model = Model(network, Image(2, 2, 1), create_backend("numpy", "double"))
    train_step(model, *examples(model.backend, 2, Image(2, 2, 1)))
    layers = [layer for _, child in model.network.children() for layer in child.walk()]
    assert [layer.calls for layer in layers if isinstance(layer, Spy)] == [0, 0, 1, 1]


# errors --------------------------------------------------------------------------------------------------------------


class Fails(Layer):
    """Borrows an array, then raises in the forward or the backward pass."""

    def __init__(self, where: str) -> None:
        self.where = where

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        return input

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y = self.backend.borrow(x.shape)
        y[...] = x
        if self.where == "forward":
            raise ZeroDivisionError

        def backward(dy: Any) -> Any:
            self.backend.borrow(x.shape)
            raise ZeroDivisionError

        return y, backward


@every_backend
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_stays_on_loan_after_an_error(name: str, where: str) -> None:
    layers = [Conv2D(3, 3, padding=1), MaxPool2D(2), Dense(4, "relu"), Fails(where), Dense(4, "relu"), Dense(3)]
    model, allocated = Model(Sequential(layers), SMALL, create_backend(name, "double")), []
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            train_step(model, *examples(model.backend, 4))
        assert model.backend.workspace.on_loan == 0
        allocated.append(model.backend.workspace.allocated_bytes)
    assert allocated == [allocated[0]] * 3, "something was neither lent nor free"


# names and places -----------------------------------------------------------------------------------------------------


def test_a_list_of_layers_is_named_by_kind_and_count() -> None:
    network = Sequential([Conv2D(2, 3), MaxPool2D(2), Conv2D(2, 1), Around(Sequential((Conv2D(2, 1),))), Dense(3)])
    assert [name for name, _ in network] == ["conv2d1", "maxpool2d1", "conv2d2", "around1", "dense1"]
    assert "around1.branch.conv2d1.weight" in Model(network, SMALL, create_backend("numpy")).weights()


@pytest.mark.parametrize("name", ["a.b", "", 3, "a\x1b[2J", "_target_"])
def test_invalid_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError):
        Sequential({name: Flatten()})


@pytest.mark.parametrize(("layers", "setting"), [({}, "layers"), (None, "layers"), ({"a": Dense}, "layers.a")])
def test_invalid_layers_are_refused(layers: Any, setting: str) -> None:
    with refused(setting):
        Sequential(layers)


def test_a_layer_in_the_wrong_place_is_named() -> None:
    network = Sequential({"dense1": Dense(500), "block": Sequential({"conv2": Conv2D(50, 5)})})
    with pytest.raises(ConfigError, match=r"block\.conv2"):
        Model(network, SMALL, create_backend("numpy"))


def test_one_layer_at_two_depths_is_refused() -> None:
    """If it were built twice, it would only keep the weights for the second position."""
    shared, backend = Dense(4), create_backend("numpy")
    with pytest.raises(ConfigError, match=r"inside\.dense1"):
        Model(Sequential({"first": shared, "inside": Sequential([shared])}), Flat(3), backend)
    Model(Sequential([shared]), Flat(3), backend)  # a layer may be used again for another model


# fusion --------------------------------------------------------------------------------------------------------------


class Doubled(Layer):
    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y, backward = super().forward(x, context)
        y *= 2
        return y, backward


class DoubledConv2D(Doubled, Conv2D):
    pass


class DoubledMaxPool2D(Doubled, MaxPool2D):
    pass


class DoubledBatchNorm(Doubled, BatchNorm):
    pass


class DoubledResidual(Doubled, Residual):
    pass


@every_backend
@pytest.mark.parametrize(
    ("layers", "changed"),
    [
        ([Conv2D(4, 3), MaxPool2D(2)], [DoubledConv2D(4, 3), MaxPool2D(2)]),
        ([Conv2D(4, 3), MaxPool2D(2)], [Conv2D(4, 3), DoubledMaxPool2D(2)]),
        ([BatchNorm(), Activation("relu")], [DoubledBatchNorm(), Activation("relu")]),
        ([Residual(BatchNorm()), Activation("relu")], [DoubledResidual(BatchNorm()), Activation("relu")]),
    ],
    ids=["convolution", "pool", "norm", "sum"],
)
def test_subclasses_of_layers_are_not_fused(name: str, layers: list[Layer], changed: list[Layer]) -> None:
    results, x = [], np.random.default_rng(1).normal(size=(3, 6, 6, 2))
    for first, second in (layers, changed):
        backend = create_backend(name, "double")
        network = Sequential({"first": first, "second": second, "output": Dense(3)})
        results.append(Model(network, Image(6, 6, 2), backend, seed=5).scores(backend.asarray(x))[1])
    np.testing.assert_allclose(results[1], 2 * results[0], rtol=1e-12)
