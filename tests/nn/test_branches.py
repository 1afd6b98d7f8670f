"""Residual and Concat: gradients, ownership of arrays, names, refusals."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    INFERENCE,
    Activation,
    AvgPool2D,
    Concat,
    Context,
    Conv2D,
    Dense,
    Dropout,
    Flat,
    Flatten,
    Image,
    InputType,
    Layer,
    Loss,
    MaxPool2D,
    Model,
    Params,
    Residual,
    Sequential,
)
from tests.support.backends import every_backend
from tests.support.gradients import check_layer
from tests.support.networks import Around, train_step

INPUT = Image(6, 5, 3)


def described() -> dict[str, tuple[Layer, InputType]]:
    """Branches of every kind, each with what it is fed."""
    return {
        "around one layer": (Residual(Conv2D(3, 3, padding="same", activation="relu")), INPUT),
        "around two": (Residual([Conv2D(4, 3, padding=1, activation="relu"), Conv2D(3, 1)]), INPUT),
        "a shortcut": (
            Residual({"a": Conv2D(4, 3, 2, "same", activation="tanh"), "b": Conv2D(4, 1)}, Conv2D(4, 1, 2)),
            INPUT,
        ),
        "a shortcut without weights": (Residual(Conv2D(3, 2, 2, activation="gelu"), MaxPool2D(2)), INPUT),
        "vectors": (Residual([Dense(7, "relu"), Dense(4)]), Flat(4)),
        "one in the other": (Residual({"a": Residual(Conv2D(3, 1)), "b": Residual([Activation("elu")])}), INPUT),
        "only a view": (Residual(Flatten(), Flatten()), INPUT),
        "channels": (Concat({"a": Conv2D(2, 1), "b": Conv2D(3, 3, padding="same", activation="relu")}), INPUT),
        "features": (Concat([Dense(2, "tanh"), [Dense(5, "relu"), Dense(1)], Flatten()]), INPUT),
        "of itself": (Concat([Activation("identity"), Conv2D(1, 1)]), INPUT),
        "both": (Residual(Concat([Conv2D(1, 1), AvgPool2D(3, 1, 1)]), Concat([Conv2D(4, 1)])), INPUT),
    }


@pytest.mark.parametrize("case", described())
def test_gradients(case: str) -> None:
    check_layer(*described()[case])


@every_backend
def test_no_buffer_stays_on_loan_wherever_a_block_is(name: str) -> None:
    """At the beginning of a network, which needs no derivative of its images, and behind weights."""
    for layer, input in described().values():
        check_loans(create_backend(name), layer, input)


def check_loans(backend: Backend, layer: Layer, input: InputType) -> None:
    weights: dict[str, Layer] = {"before": Conv2D(3, 1) if isinstance(input, Image) else Dense(4)}
    endings: list[dict[str, Layer]] = [{"flat": Flatten()}, {"out": Dense(3)}]
    for first, ending in product(({}, weights), endings):
        network: dict[str, Layer] = {**first, "it": layer, **ending}
        model = Model(Sequential(network), input, backend)
        x = backend.asarray(np.random.default_rng(1).normal(size=(3, *input.shape)).astype(np.float32))
        for _ in range(2):
            y, _ = model.forward(x, INFERENCE)
            del y
            assert backend.workspace.on_loan == 0
            train_step(model, x, backend.asarray(np.array([0, 1, 0])))
            assert backend.workspace.on_loan == 0
    before_step = backend.workspace.allocated_bytes
    train_step(model, x, backend.asarray(np.array([0, 1, 0])))
    assert backend.workspace.allocated_bytes == before_step


def passing() -> dict[str, Layer]:
    """Branches that outside training, or in it, are x itself."""
    return {
        "dropout": Residual(Dropout(0.5)),
        "dropout of nothing": Residual(Dropout(0)),
        "both ways": Residual(Dropout(0.3), Dropout(0)),
        "in a sequence": Residual([Dropout(0.5), Sequential([Dropout(0)])], Sequential([Dropout(0.5)])),
        "views": Residual([Flatten(), Dropout(0.5)], [Flatten()][0]),
        "beside what reads it": Residual(Around(Dropout(0.5)), MaxPool2D(3, 1, 1)),
        "side by side": Concat([Dropout(0.5), AvgPool2D(3, 1, 1), Dropout(0)]),
        "one in the other": Concat([Residual(Dropout(0.5)), Concat([Dropout(0.2)]), Around(Sequential([Dropout(0)]))]),
    }


@pytest.mark.parametrize("case", passing())
def test_gradients_of_an_identity_branch(case: str) -> None:
    check_layer(passing()[case], INPUT, training=True)


EXPECTED: dict[str, Any] = {
    **dict.fromkeys(["dropout", "dropout of nothing", "both ways", "in a sequence"], lambda v: 2 * v),
    "views": lambda v: 2 * v.reshape(len(v), -1),
    "beside what reads it": lambda v: 2 * v + pooled(v, np.max),
    "side by side": lambda v: np.concatenate([v, pooled(v, np.nanmean), v], axis=-1),
    "one in the other": lambda v: np.concatenate([2 * v, v, 2 * v], axis=-1),
}


def pooled(v: Any, of: Any) -> Any:
    """Of each 3 x 3 pixels; there is nothing around the image."""
    filled = np.pad(v, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf if of is np.max else np.nan)
    return of(np.lib.stride_tricks.sliding_window_view(filled, (3, 3), axis=(1, 2)), axis=(-2, -1))


@pytest.mark.parametrize("case", passing())
def test_an_identity_branch_does_not_return_its_input_to_the_workspace(case: str) -> None:
    """Given back twice, the array would be lent again while another branch reads it."""
    backend = create_backend("numpy", "double")
    model = Model(Sequential({"first": Activation("tanh"), "it": passing()[case]}), INPUT, backend, loss=Loss())
    x = np.random.default_rng(1).normal(size=(3, *INPUT.shape))
    for _ in range(3):
        y, _ = model.forward(backend.asarray(x), INFERENCE)
        np.testing.assert_allclose(backend.to_host(y), EXPECTED[case](np.tanh(x)), rtol=1e-12)
        dy = backend.borrow(y.shape)
        del y
        assert backend.workspace.on_loan == 1
        dy[...] = 1
        _, backward = model.forward(backend.asarray(x), Context(train=True))
        del _
        backward(dy)
        del backward, dy
        assert backend.workspace.on_loan == 0


def test_names_are_those_of_the_blocks() -> None:
    network = Sequential(
        {
            "block1": Residual(
                {"conv1": Conv2D(4, 3, padding="same"), "conv2": Conv2D(4, 3, padding="same")}, Conv2D(4, 1)
            ),
            "mixed": Concat(
                {"narrow": Conv2D(2, 1), "wide": {"conv1": Conv2D(2, 3, padding="same"), "pool": MaxPool2D(3, 1, 1)}}
            ),
            "out": Dense(2),
        }
    )
    model = Model(network, INPUT, create_backend("numpy"))
    weights = [each for each in model.weights() if each.endswith("weight")]
    assert weights == [
        "block1.conv1.weight",
        "block1.conv2.weight",
        "block1.shortcut.weight",
        "mixed.narrow.weight",
        "mixed.wide.conv1.weight",
        "out.weight",
    ]
    layers = dict(model.network.children())
    work = {each: sum(layer.multiply_adds() for layer in layers[each].walk()) for each in ("block1", "mixed")}
    assert work == {"block1": 30 * (27 * 4 + 36 * 4 + 3 * 4), "mixed": 30 * (4 * 2 + 36 * 2)}


@pytest.mark.parametrize(
    "layer",
    [
        Residual(Conv2D(8, 3, 2, "same")),
        Residual(Dense(4)),
        Residual(Conv2D(8, 1), Conv2D(8, 1, 2)),
        Concat({"a": Conv2D(2, 1), "b": Conv2D(2, 3)}),
        Concat([Dense(2), Conv2D(1, 1)]),
    ],
)
def test_branches_of_different_sizes_are_refused(layer: Layer) -> None:
    with pytest.raises(ConfigError, match="'it'"):
        layer.build(INPUT, Params().scope("it"), create_backend("numpy"))


def test_no_layer_has_the_name_of_the_shortcut() -> None:
    with pytest.raises(ConfigError, match="it.shortcut.weight"):
        Residual({"shortcut": Conv2D(3, 1)}, Conv2D(3, 1)).build(INPUT, Params().scope("it"), create_backend("numpy"))


def test_one_layer_object_in_two_branches_is_refused() -> None:
    one = Conv2D(3, 1)
    with pytest.raises(ConfigError, match="Conv2D"):
        Residual(one, one).build(INPUT, Params().scope("it"), create_backend("numpy"))
    with pytest.raises(ConfigError, match="Conv2D"):
        Concat([one, one]).build(INPUT, Params().scope("it"), create_backend("numpy"))
