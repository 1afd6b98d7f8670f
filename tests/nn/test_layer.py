"""Sequential networks: gradients, buffers on loan, passes in flight, names."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import (
    Activation,
    Backward,
    BatchNorm,
    Context,
    Conv2D,
    Dense,
    Image,
    Layer,
    MaxPool2D,
    Model,
    Residual,
    Sequential,
)
from tests.support.backends import every_backend, every_compiled_backend
from tests.support.gradients import check_layer
from tests.support.networks import SMALL, Around, examples, gradients, small_networks, train_step
from tests.support.training import Identity


@pytest.mark.parametrize("kind", small_networks())
def test_gradients_of_networks_equal_finite_differences(kind: str) -> None:
    check_layer(small_networks()[kind], SMALL)


@every_compiled_backend
@pytest.mark.parametrize("kind", ["lenet", "blocks"])
def test_gradients_of_a_network_equal_finite_differences_on_every_backend(name: str, kind: str) -> None:
    check_layer(small_networks()[kind], SMALL, create_backend(name, "double"))


def in_flight(model: Model, seed: int) -> Callable[[], object]:
    """Run a forward pass, and return its backward pass."""
    x, labels = examples(model.backend, 4, seed=seed)
    logits, backward = model.forward(x, Context(train=True))
    return partial(backward, model.loss(model.backend, logits, labels)[1])


@every_backend
@pytest.mark.parametrize("kind", ["lenet", "residual", "blocks", "begins with branches"])
def test_micro_batches_in_flight_add_up_in_any_order(name: str, kind: str) -> None:
    model = Model(small_networks()[kind], SMALL, create_backend(name, "double"))
    for seed in (1, 2):
        in_flight(model, seed)()
    expected = gradients(model)
    for order in ((0, 1), (1, 0)):
        model.params.grad[...] = 0
        flights = [in_flight(model, 1), in_flight(model, 2)]
        for flight in order:
            flights[flight]()
        for parameter, gradient in gradients(model).items():
            np.testing.assert_allclose(gradient, expected[parameter], rtol=1e-12, atol=1e-13, err_msg=parameter)
        del flights
        assert model.backend.workspace.on_loan == 0


class Fails(Identity):
    """Borrows an array, then raises in the forward or the backward pass."""

    def __init__(self, where: str) -> None:
        self.where = where

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        def fail(_: Any) -> Any:
            self.backend.borrow(x.shape)
            raise ZeroDivisionError

        return fail(x) if self.where == "forward" else x, fail


@every_backend
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_buffer_stays_on_loan_after_an_error_in_a_pass(name: str, where: str) -> None:
    layers = [Conv2D(3, 3, padding=1), MaxPool2D(2), Dense(4, "relu"), Fails(where), Dense(4, "relu"), Dense(3)]
    model, allocated = Model(Sequential(layers), SMALL, create_backend(name, "double")), []
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            train_step(model, *examples(model.backend, 4))
        assert model.backend.workspace.on_loan == 0
        allocated.append(model.backend.workspace.allocated_bytes)
    assert allocated == [allocated[0]] * 3, "something was neither lent nor free"


def test_a_list_of_layers_is_named_by_kind_and_count() -> None:
    network = Sequential([Conv2D(2, 3), MaxPool2D(2), Conv2D(2, 1), Around(Sequential((Conv2D(2, 1),))), Dense(3)])
    assert [name for name, _ in network] == ["conv2d1", "maxpool2d1", "conv2d2", "around1", "dense1"]
    assert "around1.branch.conv2d1.weight" in Model(network, SMALL, create_backend("numpy")).weights()


class Doubled(Layer):
    """A user's layer, which multiplies the output of its base class by two."""

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        y, backward = super().forward(x, context)
        y *= 2
        return y, backward


def doubled(kind: type[Layer], *arguments: Any) -> Any:
    return type(f"Doubled{kind.__name__}", (Doubled, kind), {})(*arguments)


@every_backend
@pytest.mark.parametrize(
    ("layers", "changed"),
    [
        ([Conv2D(3, 3), MaxPool2D(2)], [doubled(Conv2D, 3, 3), MaxPool2D(2)]),
        ([Conv2D(3, 3), MaxPool2D(2)], [Conv2D(3, 3), doubled(MaxPool2D, 2)]),
        ([BatchNorm(), Activation("relu")], [doubled(BatchNorm), Activation("relu")]),
        ([Residual(BatchNorm()), Activation("relu")], [doubled(Residual, BatchNorm()), Activation("relu")]),
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


FORMS: dict[str, Callable[[Any], Any]] = {
    "copied": lambda x: x.copy(),
    "double": lambda x: x.astype("float64"),
    "strided": lambda x: x[::-1].copy()[::-1],
}


class Converts(Identity):
    """Returns its input and its gradient in another form."""

    def __init__(self, form: str) -> None:
        self.form = form

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        return FORMS[self.form](x), FORMS[self.form]


@every_compiled_backend
@pytest.mark.parametrize("dtype", ["half", "float"])
@pytest.mark.parametrize("form", ["double", "strided"])
def test_a_layer_may_return_another_dtype_or_a_strided_array(name: str, dtype: str, form: str) -> None:
    def gradient(form: str) -> Any:
        network = [Conv2D(3, 3), Converts(form), Conv2D(3, 3), Converts(form), Dense(3)]
        model = Model(network, SMALL, create_backend(name, dtype))
        train_step(model, *examples(model.backend, 4))
        return model.backend.to_host(model.params.grad)

    np.testing.assert_array_equal(gradient(form), gradient("copied"))
