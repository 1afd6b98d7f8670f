"""Sequential networks: gradients, buffers on loan, passes in flight, names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    INFERENCE,
    Activation,
    Backward,
    BatchNorm,
    Context,
    Conv2D,
    Dense,
    Flat,
    Flatten,
    Image,
    InputType,
    Layer,
    MaxPool2D,
    Model,
    Params,
    Scope,
    Sequential,
)
from cupynet.optim import Nesterov
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


# buffers --------------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float") for kind in small_networks()), ("lenet", "half"), ("blocks", "double")]
)
def test_a_step_returns_all_buffers_and_then_allocates_nothing(name: str, dtype: str, kind: str) -> None:
    backend = create_backend(name, dtype)
    model = Model(small_networks()[kind], SMALL, backend)
    optimizer = Nesterov(0.01)
    optimizer.init(model.params, backend)
    allocated = []
    for iteration, size in enumerate([6, 6, 2, 6, 1, 6, 6]):  # with the short last batch of an epoch now and then
        train_step(model, *examples(backend, size), optimizer, iteration)
        assert backend.workspace.on_loan == 0
        allocated.append(backend.workspace.allocated_bytes)
    assert allocated == [allocated[0]] * len(allocated)


@every_backend
def test_inference_returns_all_buffers_but_its_output(name: str) -> None:
    for kind, network in small_networks().items():
        backend = create_backend(name, "float")
        model = Model(network, SMALL, backend)
        x, _ = examples(backend, 4)
        before = x.copy()
        allocated = []
        for _ in range(3):
            logits, _ = model.forward(x, INFERENCE)
            assert backend.workspace.on_loan == 1, kind
            del logits
            model.scores(x)
            assert backend.workspace.on_loan == 0, kind
            allocated.append(backend.workspace.allocated_bytes)
        assert allocated == [allocated[0]] * 3, kind
        assert bool((x == before).all()), f"{kind}: the input was written to"


@every_backend
@pytest.mark.parametrize("kind", ["lenet", "residual", "blocks", "begins with branches"])
def test_micro_batches_in_flight_add_up_in_any_order(name: str, kind: str) -> None:
    backend = create_backend(name, "double")
    model = Model(small_networks()[kind], SMALL, backend)
    batches = [examples(backend, 4, seed=1), examples(backend, 3, seed=2)]
    for batch in batches:
        train_step(model, *batch)
    expected = gradients(model)
    assert any(g.any() for g in expected.values())
    for order in ((0, 1), (1, 0)):
        model.params.grad[...] = 0
        passes: list[Any] = []
        for x, labels in batches:
            logits, backward = model.forward(x, Context(train=True))
            passes.append((backward, model.loss(backend, logits, labels)[1]))
        del logits, backward
        for i in order:
            backward, gradient = passes[i]
            backward(gradient)
        del backward, gradient
        passes.clear()
        for parameter, gradient in gradients(model).items():
            np.testing.assert_allclose(gradient, expected[parameter], rtol=1e-12, atol=1e-13, err_msg=parameter)
        assert backend.workspace.on_loan == 0


# the derivative with respect to the images is not computed ------------------------------------------------------------


class Spy(Activation):
    """Remembers what its derivative was asked and gave."""

    def __init__(self) -> None:
        super().__init__("identity")
        self.seen: list[bool] = []

    def forward(self, x: Any, context: Context) -> Any:
        y, backward = super().forward(x, context)

        def spied(dy: Any) -> Any:
            self.seen.append(dy is not None)
            return backward(dy)

        return y, spied


def test_layers_before_the_first_weights_compute_no_derivative() -> None:
    backend = create_backend("numpy", "double")
    network = Sequential(
        {
            "first": Spy(),
            "block": Sequential({"second": Spy(), "dense": Dense(4), "third": Spy()}),
            "fourth": Spy(),
            "output": Dense(3),
        }
    )
    model = Model(network, Flat(5), backend)
    x, labels = examples(backend, 2, Image(1, 1, 5))
    logits, backward = model.forward(x.reshape(2, 5), Context(train=True))
    assert backward(model.loss(backend, logits, labels)[1]) is None
    built: Any = model.network
    inner: Any = built.layers["block"].layers
    spies = [built.layers["first"], inner["second"], inner["third"], built.layers["fourth"]]
    assert [spy.seen for spy in spies] == [[], [], [True], [True]]
    needs = [spies[0], built.layers["block"], inner["second"], inner["dense"], inner["third"], built.layers["output"]]
    assert [layer.needs_dx for layer in needs] == [False, False, False, False, True, True]


@every_network
def test_a_stage_behind_another_gives_its_derivative(kind: str) -> None:
    """Whatever it begins with; and the gradients of its weights are those that it has as the first stage."""
    backend, found = create_backend("numpy", "double"), []
    for needs_dx in (False, True):
        params, network = Params(), small_networks()[kind]
        output = network.build(SMALL, params.scope(needs_dx=needs_dx), backend)
        params.allocate(backend, seed=1)
        x, _ = examples(backend, 3)
        y, backward = network.forward(x, Context(train=True))
        dy = backend.borrow((3, *output.shape))
        dy[...] = 1
        dx = backward(dy)
        assert dx is not None or not needs_dx
        assert dx is None or dx.shape == x.shape
        found.append(np.array(backend.to_host(params.grad)))
        del y, backward, dy, dx
        assert backend.workspace.on_loan == 0
    np.testing.assert_array_equal(*found)


# layers of users ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("input", [Flat(4), Image(3, 2, 2)], ids=str)
def test_gradients_of_a_users_layer(input: InputType) -> None:
    check_layer(Scale(), input)
    check_layer(Sequential([Scale(), Around(Scale()), Dense(3, "relu"), Scale()]), input)


# errors --------------------------------------------------------------------------------------------------------------


class Fails(Layer):
    """Borrows an array, then raises, forwards or backwards, while `armed`."""

    armed = True

    def __init__(self, where: str) -> None:
        self.where = where

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        return input

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y = self.backend.borrow(x.shape)
        y[...] = x
        if self.where == "forward" and self.armed:
            raise ZeroDivisionError

        def backward(dy: Any) -> Any:
            self.backend.borrow(x.shape)
            if self.armed:
                raise ZeroDivisionError
            return dy

        return y, backward


@every_backend
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_stays_on_loan_after_an_error(name: str, where: str) -> None:
    backend = create_backend(name, "float")
    layers = [Conv2D(3, 3, padding=1), MaxPool2D(2), Dense(4, "relu"), Fails(where), Dense(4, "relu"), Dense(3)]
    model = Model(Sequential(layers), SMALL, backend)
    allocated = []
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            train_step(model, *examples(backend, 4))
        assert backend.workspace.on_loan == 0
        allocated.append(backend.workspace.allocated_bytes)
    assert allocated == [allocated[0]] * 3, "something was neither lent nor free"
    if where == "forward":
        for predict in (model.predict, model.scores):
            with pytest.raises(ZeroDivisionError):
                predict(abs(examples(backend, 4)[0]) / 8)  # fractions
            assert backend.workspace.on_loan == 0


@every_backend
def test_an_error_leaves_other_passes_alone(name: str) -> None:
    backend = create_backend(name, "double")
    network = Sequential([Conv2D(3, 3), MaxPool2D(2), Dense(4, "relu"), Fails("backward"), Dense(3)])
    model = Model(network, SMALL, backend)
    failing: Any = dict(model.network.children())["fails1"]
    passes: list[Any] = []
    for seed in (1, 2):
        x, labels = examples(backend, 4, seed=seed)
        logits, backward = model.forward(x, Context(train=True))
        passes.append((backward, model.loss(backend, logits, labels)[1]))
    del logits, backward
    on_loan = backend.workspace.on_loan
    failed, gradient = passes[0]
    with pytest.raises(ZeroDivisionError):
        failed(gradient)
    passes[0] = failed = gradient = None
    assert backend.workspace.on_loan == on_loan // 2
    failing.armed = False
    model.params.grad[...] = 0
    passes[1][0](passes[1][1])
    found = gradients(model)
    model.params.grad[...] = 0
    train_step(model, *examples(backend, 4, seed=2))
    for parameter, expected in gradients(model).items():
        np.testing.assert_array_equal(found[parameter], expected)


# names ----------------------------------------------------------------------------------------------------------------


def test_a_list_of_layers_is_named_by_kind_and_count() -> None:
    network = Sequential([Conv2D(2, 3), MaxPool2D(2), Conv2D(2, 1), Around(Sequential((Conv2D(2, 1),))), Dense(3)])
    assert [name for name, _ in network] == ["conv2d1", "maxpool2d1", "conv2d2", "around1", "dense1"]
    model = Model(network, SMALL, create_backend("numpy"))
    assert "around1.branch.conv2d1.weight" in model.weights()
    named = Model(Sequential(dict(network)), SMALL, create_backend("numpy"))
    assert all((value == named.weights()[name]).all() for name, value in model.weights().items())


def test_invalid_layers_are_refused() -> None:
    wrong: list[Any] = [{"a.b": Flatten()}, {"": Flatten()}, {3: Flatten()}, {"a\x1b[2J": Flatten()}]
    for layers in wrong:
        with pytest.raises(ConfigError):
            Sequential(layers)
    empty: list[Any] = [{}, [], None]
    for layers in empty:
        with refused("layers"):
            Sequential(layers)
    strange: list[Any] = ["Dense", Dense]
    for layer in strange:
        with refused("layers.a"):
            Sequential({"a": layer})


def test_a_layer_in_the_wrong_place_is_named_with_the_way_out() -> None:
    backend = create_backend("numpy")
    after_dense = Sequential({"dense1": Dense(500), "block": Sequential({"conv2": Conv2D(50, 5)})})
    with pytest.raises(ConfigError, match=r"'block\.conv2'"):
        Model(after_dense, SMALL, backend)
    with pytest.raises(ConfigError, match="'pool'"):
        Model(Sequential({"flat": Flatten(), "pool": MaxPool2D(2)}), SMALL, backend)
    with pytest.raises(ConfigError, match="'conv2'"):
        Model(Sequential({"pool1": MaxPool2D(2), "conv2": Conv2D(3, 5)}), Image(8, 8, 1), backend)


def test_one_layer_at_two_depths_is_refused() -> None:
    """Built twice, it would keep the weights of the second place only."""
    shared = Dense(4)
    network = Sequential({"first": shared, "inside": Sequential([shared]), "output": Dense(2)})
    with pytest.raises(ConfigError, match=r"'first'.*'inside\.dense1'"):
        Model(network, Flat(3), create_backend("numpy"))
    Model(Sequential([shared]), Flat(3), create_backend("numpy"))  # a description may be used again, for another model
    Model(Sequential([shared]), Flat(3), create_backend("numpy"))


class Halved(Conv2D):
    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y, backward = super().forward(x, context)
        y *= 0.5
        return y, backward


class Doubled(MaxPool2D):
    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y, backward = super().forward(x, context)
        y *= 2
        return y, backward


class Quartered(BatchNorm):
    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y, backward = super().forward(x, context)
        y *= 0.25
        return y, backward


@every_backend
def test_subclasses_of_layers_are_not_fused(name: str) -> None:
    """Also where the backend would make one operation of the layer it is made from and the next."""
    x = np.random.default_rng(1).normal(size=(3, 6, 6, 2))

    def computed(**layers: Layer) -> Any:
        backend, params = create_backend(name, "double"), Params()
        network = Sequential(layers)
        network.build(Image(6, 6, 2), params.scope(), backend)
        params.allocate(backend, 5)
        with backend.here():
            return backend.to_host(network.forward(backend.asarray(x), INFERENCE)[0]).copy()

    plain = computed(conv=Conv2D(4, 3), pool=MaxPool2D(2))
    np.testing.assert_allclose(computed(conv=Halved(4, 3), pool=MaxPool2D(2)), plain / 2)
    np.testing.assert_allclose(computed(conv=Conv2D(4, 3), pool=Doubled(2)), plain * 2)
    plain = computed(norm=BatchNorm(), relu=Activation("relu"))
    np.testing.assert_allclose(computed(norm=Quartered(), relu=Activation("relu")), plain / 4)
