"""Residual and Concat: gradients, ownership of arrays, names."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.nn import (
    INFERENCE,
    Activation,
    AvgPool2D,
    BatchNorm,
    Concat,
    Conv2D,
    Dense,
    Dropout,
    Flatten,
    Image,
    Layer,
    Loss,
    MaxPool2D,
    Model,
    Residual,
    Sequential,
)
from cupynet.nn.branches import ResidualReLU
from tests.support.backends import every_backend
from tests.support.gradients import check_layer
from tests.support.networks import Around
from tests.support.pairwise import pairwise
from tests.support.passes import built, inferred, passed

INPUT = Image(6, 5, 3)
TOLERANCES = {"half": 2e-2, "float": 1e-5, "double": 1e-10}
LAYERS: dict[str, Callable[[], Layer]] = {
    "around two": lambda: Residual([Conv2D(4, 3, padding=1, activation="relu"), Conv2D(3, 1)]),
    "a shortcut": lambda: Residual([Conv2D(4, 3, 2, "same", activation="tanh"), Conv2D(4, 1)], Conv2D(4, 1, 2)),
    "a shortcut without weights": lambda: Residual(Conv2D(3, 2, 2, activation="gelu"), MaxPool2D(2)),
    "one in the other": lambda: Residual({"a": Residual(Conv2D(3, 1)), "b": Residual([Activation("elu")])}),
    "only a view": lambda: Residual(Flatten(), Flatten()),
    "channels": lambda: Concat([Conv2D(2, 1), Conv2D(3, 3, padding="same", activation="relu")]),
    "of features": lambda: Sequential([Dense(4), Residual([Dense(7, "relu"), Dense(4)])]),
    "features": lambda: Concat([Dense(2, "tanh"), [Dense(5, "relu"), Dense(1)], Flatten()]),
    "of itself": lambda: Concat([Activation("identity"), Conv2D(1, 1)]),
    "both": lambda: Residual(Concat([Conv2D(1, 1), AvgPool2D(3, 1, 1)]), Concat([Conv2D(4, 1)])),
    "dropout": lambda: Residual(Dropout(0.5)),
    "dropout and what reads it": lambda: Residual(Around(Dropout(0.5)), MaxPool2D(3, 1, 1)),
    "dropout side by side": lambda: Concat([Dropout(0.5), AvgPool2D(3, 1, 1), Dropout(0)]),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_residual_and_concat_equal_finite_differences(kind: str) -> None:
    check_layer(LAYERS[kind](), INPUT, training=True)


BEFORE_A_RELU: dict[str, Callable[[], Residual]] = {
    "around layers": lambda: Residual(
        [Conv2D(6, 1, bias=False), BatchNorm(), Activation("relu"), Conv2D(3, 1, bias=False), BatchNorm()]
    ),
    "only a norm": lambda: Residual(BatchNorm()),
    "a shortcut": lambda: Residual([Conv2D(6, 3, 2, "same", bias=False), BatchNorm()], Conv2D(6, 1, 2, bias=False)),
    "a shortcut with a norm": lambda: Residual(
        [Conv2D(6, 1, bias=False), BatchNorm()], Sequential([Conv2D(6, 1, bias=False), BatchNorm()])
    ),
    "a shortcut without weights": lambda: Residual([Conv2D(3, 2, 2, bias=False), BatchNorm()], MaxPool2D(2)),
    "one in the other": lambda: Residual({"a": Residual(BatchNorm()), "b": Activation("relu"), "c": BatchNorm()}),
}


def results_of(network: Sequential, backend: Backend, frozen: bool) -> list[Any]:
    """Return y and dx of a training pass, the output of inference, and the gradients and buffers."""
    params = built(network, INPUT.shape, backend, scale=np.float32(0.75), shift=np.float32(0.5))
    for _, parameter in params.named():
        parameter.frozen = frozen
    rng = np.random.default_rng(1)
    x, dy = (rng.normal(size=(3, *input.shape)) for input in (INPUT, network.output))
    y, dx = passed(network, x, dy)
    changed = [*(p.grad for _, p in params.named()), *(b.data for _, b in params.named_buffers())]
    return [y, dx, inferred(network, x), *(np.array(backend.to_host(array), np.float64) for array in changed)]


@every_backend
@pairwise(kind=list(BEFORE_A_RELU), dtype=("half", "float", "double"), frozen=(False, True))
def test_a_fused_norm_sum_and_relu_equals_separate_layers(name: str, kind: str, dtype: str, frozen: bool) -> None:
    fused = Sequential({"block": BEFORE_A_RELU[kind](), "relu": Activation("relu")})
    separate = Sequential({"block": BEFORE_A_RELU[kind](), "relu": Sequential([Activation("relu")])})
    found, expected = (results_of(each, create_backend(name, dtype), frozen) for each in (fused, separate))
    assert [type(step) for _, step in fused.steps] == [ResidualReLU] and len(separate.steps) == 2
    for one, other in zip(found, expected, strict=True):
        scale = max(1.0, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize(
    ("body", "following"),
    [
        (BatchNorm(), Activation("tanh")),
        ([BatchNorm(), Activation("relu")], Activation("relu")),
        (Conv2D(3, 1), Activation("relu")),
        (Sequential([Sequential([BatchNorm()])]), Activation("relu")),
    ],
)
def test_sums_without_a_norm_before_or_a_relu_after_them_are_not_fused(body: Any, following: Activation) -> None:
    network = Sequential({"block": Residual(body), "after": following})
    built(network, INPUT.shape, create_backend("numpy"))
    assert network.together() == [["block"], ["after"]]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Residual([Dropout(0.5), Sequential([Dropout(0)])], Sequential([Dropout(0.5)])), lambda v: 2 * v),
        (Residual([Flatten(), Dropout(0.5)], Flatten()), lambda v: 2 * v.reshape(len(v), -1)),
        (
            Concat([Residual(Dropout(0.5)), Concat([Dropout(0.2)]), Around(Sequential([Dropout(0)]))]),
            lambda v: np.concatenate([2 * v, v, 2 * v], axis=-1),
        ),
    ],
    ids=["sequences", "views", "nested"],
)
def test_an_identity_branch_does_not_return_its_input_to_the_workspace(layer: Layer, expected: Any) -> None:
    """If it were returned twice, the array would be lent again while another branch reads it."""
    backend = create_backend("numpy", "double")
    model = Model(Sequential({"first": Activation("tanh"), "it": layer}), INPUT, backend, loss=Loss())
    x = np.random.default_rng(1).normal(size=(3, *INPUT.shape))
    for _ in range(3):
        y, _ = model.forward(x, INFERENCE)
        np.testing.assert_allclose(y, expected(np.tanh(x)), rtol=1e-12)
        del y
        assert backend.workspace.on_loan == 0
        passed(model.network, x)


def test_weights_in_branches_are_named_by_their_blocks() -> None:
    block = Residual({"conv1": Conv2D(4, 1), "conv2": Conv2D(4, 1)}, Conv2D(4, 1))
    mixed = Concat({"narrow": Conv2D(2, 1), "wide": Sequential({"conv1": Conv2D(2, 1), "pool": MaxPool2D(3, 1, 1)})})
    model = Model(Sequential({"block1": block, "mixed": mixed, "out": Dense(2)}), INPUT, create_backend("numpy"))
    names = "block1.conv1 block1.conv2 block1.shortcut mixed.narrow mixed.wide.conv1 out"
    assert [each for each in model.weights() if "bias" not in each] == [f"{name}.weight" for name in names.split()]
