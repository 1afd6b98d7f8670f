"""Chains of layers: gradients of whole networks, buffers on loan, passes in flight, names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.errors import ConfigError
from cupynet.nn import (
    INFERENCE,
    Activation,
    Context,
    Conv2D,
    Dense,
    Flat,
    Flatten,
    Image,
    MaxPool2D,
    Model,
    Params,
    Sequential,
)
from cupynet.optim import Nesterov
from tests.backends import every_backend, every_dtype
from tests.gradients import check_layer
from tests.nn.networks import SMALL, examples, gradients, lenet, small_networks, train_step

every_network = pytest.mark.parametrize("kind", small_networks())


@every_backend
@every_network
def test_gradients_of_networks(name: str, kind: str) -> None:
    check_layer(small_networks()[kind], SMALL, create_backend(name, "double"))


@every_backend
def test_gradients_of_lenet(name: str) -> None:
    check_layer(lenet((2, 3), 7, kernel=3), Image(12, 12, 1), create_backend(name, "double"), batch=3)


# buffers --------------------------------------------------------------------------------------------------------------


@every_backend
@every_dtype
@every_network
def test_a_step_gives_everything_back_and_then_allocates_nothing(name: str, dtype: str, kind: str) -> None:
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
@every_network
def test_an_inference_gives_everything_back_but_its_output(name: str, kind: str) -> None:
    backend = create_backend(name, "float")
    model = Model(small_networks()[kind], SMALL, backend)
    x, _ = examples(backend, 4)
    before = x.copy()
    allocated = []
    for _ in range(3):
        logits, _ = model.forward(x, INFERENCE)
        assert backend.workspace.on_loan == 1
        backend.give_back(logits)
        model.scores(x)
        assert backend.workspace.on_loan == 0
        allocated.append(backend.workspace.allocated_bytes)
    assert allocated == [allocated[0]] * 3
    assert bool((x == before).all()), "the input was written to"


@every_backend
@every_network
def test_training_and_inference_give_the_same_output(name: str, kind: str) -> None:
    backend = create_backend(name, "double")
    model = Model(small_networks()[kind], SMALL, backend)
    x, _ = examples(backend, 4)
    training, _ = model.forward(x, Context(train=True))
    inference, _ = model.forward(x, INFERENCE)
    np.testing.assert_array_equal(backend.to_host(training), backend.to_host(inference))


def test_a_block_never_gives_back_its_callers_input() -> None:
    """Not even in another shape: the caller would lend it out while somebody still reads it."""
    backend, params = create_backend("numpy"), Params()
    block = Sequential({"flat": Flatten(), "a": Dense(3), "b": Dense(3)})
    block.build(SMALL, params.scope("block"), backend)
    params.allocate(backend, 0)
    x = backend.borrow((2, *SMALL.shape))
    x[...] = 1
    y, _ = block.forward(x, INFERENCE)
    assert backend.workspace.on_loan == 2
    backend.give_back(x, y)
    assert backend.workspace.on_loan == 0


@every_backend
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@every_network
def test_micro_batches_in_flight_add_up_in_any_order(name: str, kind: str, order: tuple[int, int]) -> None:
    backend = create_backend(name, "double")
    model = Model(small_networks()[kind], SMALL, backend)
    batches = [examples(backend, 4, seed=1), examples(backend, 3, seed=2)]
    for batch in batches:
        train_step(model, *batch)
    expected = gradients(model)
    assert any(g.any() for g in expected.values())
    model.params.grad[...] = 0
    passes: list[Any] = []
    for x, labels in batches:
        logits, backward = model.forward(x, Context(train=True))
        passes.append((backward, model.loss(backend, logits, labels)[1]))
    for i in order:
        backward, gradient = passes[i]
        backend.give_back(backward(gradient))
    for parameter, gradient in gradients(model).items():
        np.testing.assert_allclose(gradient, expected[parameter], rtol=1e-12, atol=1e-13, err_msg=parameter)
    assert backend.workspace.on_loan == 0


# the derivative by the images is not computed ------------------------------------------------------------------------


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
    assert [spy.seen for spy in spies] == [[False], [False], [True], [True]]
    needs = [spies[0], built.layers["block"], inner["second"], inner["dense"], inner["third"], built.layers["output"]]
    assert [layer.needs_dx for layer in needs] == [False, False, False, False, True, True]


@every_backend
@pytest.mark.parametrize("layer", [Conv2D(2, 3), Dense(3)], ids=["conv", "dense"])
def test_the_first_layer_computes_no_dx(name: str, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = create_backend(name, "double")
    model = Model(Sequential({"first": layer, "output": Dense(3)}), SMALL, backend)
    asked = []
    for operation in ("conv2d_backward", "dense_backward"):
        original = getattr(backend, operation)

        def spied(*arguments: Any, original: Any = original, need_dx: bool) -> Any:
            asked.append(need_dx)
            return original(*arguments, need_dx=need_dx)

        monkeypatch.setattr(backend, operation, spied)
    train_step(model, *examples(backend, 2))
    assert asked == [True, False]


# names ----------------------------------------------------------------------------------------------------------------


def test_names_are_paths_in_order_of_declaration() -> None:
    model = Model(small_networks()["nested"], SMALL, create_backend("numpy"))
    assert [parameter for parameter, _ in model.params.named()] == [
        "block.conv.weight",
        "block.conv.bias",
        "head.inner.a.weight",
        "head.inner.a.bias",
        "head.inner.b.weight",
        "head.inner.b.bias",
        "output.weight",
        "output.bias",
    ]


def test_what_is_no_chain_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        Sequential({})
    for name in ("a.b", "", 3):
        with pytest.raises(ConfigError, match="layer name .*: must be text, not empty, without a dot"):
            Sequential({name: Flatten()})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="layer 'a' is a str, not a Layer"):
        Sequential({"a": "Dense"})  # type: ignore[dict-item]
    shared = Dense(3)
    with pytest.raises(ConfigError, match="layers 'a' and 'c' are one object: make a Dense for each"):
        Sequential({"a": shared, "b": Flatten(), "c": shared})


def test_a_layer_in_the_wrong_place_is_named_with_the_way_out() -> None:
    backend = create_backend("numpy")
    after_dense = Sequential({"dense1": Dense(500), "block": Sequential({"conv2": Conv2D(50, 5)})})
    with pytest.raises(ConfigError, match=r"^Conv2D 'block.conv2' needs an Image, got Flat\(500\): put it before the"):
        Model(after_dense, SMALL, backend)
    with pytest.raises(ConfigError, match=r"^MaxPool2D 'pool' needs an Image, got Flat\(144\): put it before the"):
        Model(Sequential({"flat": Flatten(), "pool": MaxPool2D(2)}), SMALL, backend)
    with pytest.raises(ConfigError, match=r"^Conv2D 'conv2' kernel=5 is larger than its input Image\(4, 4, 3\): use a"):
        Model(
            Sequential({"pool1": MaxPool2D(2), "conv1": Conv2D(3, 1), "conv2": Conv2D(3, 5)}), Image(8, 8, 1), backend
        )
