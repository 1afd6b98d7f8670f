"""Conv2D: gradients for every geometry, output sizes, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Window, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import INFERENCE, Conv2D, Flat, Image, MaxPool2D, Params, Sequential
from cupynet.nn.activation import ACTIVATIONS
from cupynet.nn.pool import same_padding
from tests.support.backends import every_backend
from tests.support.gradients import check_layer
from tests.support.pairwise import pairwise
from tests.support.refusals import refused


@pairwise(
    kernel=(1, 2, 3, 5, (3, 5), (1, 4), (4, 2)),
    stride=(1, 2, (1, 2), (3, 1)),
    padding=(0, 1, 2, "same", (1, 0)),
    image=(Image(6, 7, 2), Image(5, 5, 1), Image(8, 5, 3)),
)
def test_gradients_for_every_geometry(kernel: Any, stride: Any, padding: Any, image: Image) -> None:
    check_layer(Conv2D(3, kernel, stride, padding), image)


@pytest.mark.parametrize("make", [list, tuple, np.array], ids=["list", "tuple", "numbers of NumPy"])
def test_a_pair_is_height_and_width(make: Callable[..., Any]) -> None:
    kernel, stride, padding = ([make([a, b])[0], make([a, b])[1]] for a, b in ((3, 5), (2, 1), (1, 0)))
    layer = Conv2D(np.int64(4), kernel, tuple(stride), padding)  # type: ignore[arg-type]
    assert output_of(layer, Image(9, 9, 2)) == Image((9 + 2 - 3) // 2 + 1, 9 - 5 + 1, 4)
    assert layer.weight.shape == (3, 5, 2, 4)
    assert layer.window == Window((3, 5), (2, 1), ((1, 1), (0, 0)))


@pairwise(padding=(0, 2, "same", "valid"), stride=(1, (2, 1)), dilation=(2, (1, 3), (3, 2)))
def test_gradients_of_windows_with_gaps(dilation: Any, stride: Any, padding: int | str) -> None:
    check_layer(Conv2D(3, (3, 2), stride, padding, dilation=dilation), Image(8, 7, 2))


def test_gradients_of_a_window_with_gaps_under_a_pool() -> None:
    check_layer(Sequential([Conv2D(3, 2, dilation=2, activation="relu"), MaxPool2D(2)]), Image(8, 7, 2))


@pairwise(
    sizes=((4, 6, 2), (6, 3, 3), (3, 3, 3), (3, 9, 3), (1, 4, 1)),
    kernel=(1, 2, 3, (3, 2)),
    stride=(1, 3, (2, 1)),
    padding=(0, 1, "same", (2, 0)),
    dilation=(1, 2, (2, 1)),
)
def test_gradients_in_groups(
    sizes: tuple[int, int, int], kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    channels, filters, groups = sizes
    layer = Conv2D(filters, kernel, stride, padding, "tanh", dilation=dilation, groups=groups)
    check_layer(layer, Image(7, 6, channels))


@every_backend
@pytest.mark.parametrize("groups", [2, 4])
def test_each_group_is_a_separate_convolution(name: str, groups: int) -> None:
    """And a pool behind it is not fused with it."""
    backend, params = create_backend(name, "double"), Params()
    whole = Sequential({"conv": Conv2D(8, 3, groups=groups, activation="relu"), "pool": MaxPool2D(2)})
    whole.build(Image(7, 6, 4), params.scope("whole"), backend)
    part = Sequential({"conv": Conv2D(8 // groups, 3, activation="relu"), "pool": MaxPool2D(2)})
    part.build(Image(7, 6, 4 // groups), params.scope("part"), backend)
    params.allocate(backend, 5)
    weights = dict(params.named())
    x = np.random.default_rng(1).normal(size=(2, 7, 6, 4))
    y, _ = whole.forward(backend.asarray(x), INFERENCE)
    for g in range(groups):
        own = slice(g * 8 // groups, (g + 1) * 8 // groups)
        own_weight = np.ascontiguousarray(np.array(backend.to_host(weights["whole.conv.weight"].data))[..., own])
        weights["part.conv.weight"].master[...] = backend.asarray(own_weight)
        channels = slice(g * 4 // groups, (g + 1) * 4 // groups)
        found, _ = part.forward(backend.asarray(np.ascontiguousarray(x[..., channels])), INFERENCE)
        np.testing.assert_allclose(backend.to_host(y)[..., own], backend.to_host(found), rtol=1e-12, atol=1e-12)


def test_weights_of_groups_are_drawn_like_those_of_separate_convolutions() -> None:
    """Xavier's variance is 2 / (in + out) of a unit: nine inputs, and two filters look at each."""
    backend, params, layer = create_backend("numpy", "double"), Params(), Conv2D(2000, 3, groups=1000)
    layer.build(Image(5, 5, 1000), params.scope("conv"), backend)
    params.allocate(backend, 1)
    assert layer.weight.shape == (3, 3, 1, 2000)
    assert float(layer.weight.data.var()) == pytest.approx(2 / (9 + 18), rel=0.05)
    assert layer.multiply_adds() == 9 * 2000 * 9


def test_groups_that_do_not_divide_are_refused() -> None:
    for filters, channels in ((5, 4), (4, 3)):
        with refused("groups", "2"):
            Conv2D(filters, 3, groups=2).build(Image(8, 8, channels), Params().scope("conv2"), create_backend("numpy"))
    with refused("groups"):
        Conv2D(4, 3, groups=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_with_activation_and_bias(activation: str) -> None:
    for bias in (True, False):
        check_layer(Conv2D(3, 3, padding=1, activation=activation, bias=bias), Image(5, 4, 2))


def output_of(layer: Conv2D, image: Image) -> Image:
    params = Params()
    output = layer.build(image, params.scope("conv"), create_backend("numpy"))
    assert isinstance(output, Image)
    return output


def test_windows_that_do_not_fit_are_left_out() -> None:
    assert output_of(Conv2D(4, 3, stride=2), Image(8, 9, 1)) == Image(3, 4, 4)
    assert output_of(Conv2D(4, 3, stride=2, padding=1), Image(8, 9, 1)) == Image(4, 5, 4)
    assert output_of(Conv2D(4, 1, stride=3), Image(8, 9, 1)) == Image(3, 3, 4)


def test_same_keeps_a_window_for_every_stride() -> None:
    for size, kernel, stride in itertools.product(range(1, 9), (1, 2, 3, 5), (1, 2, 3)):
        output = output_of(Conv2D(1, kernel, stride, "same"), Image(size, 5, 1))
        assert (output.height, output.width) == (-(-size // stride), -(-5 // stride)), (size, kernel, stride)
        before, after = same_padding(size, kernel, stride)
        assert 0 <= after - before <= 1, (size, kernel, stride)


@every_backend
def test_same_puts_the_odd_zero_after_the_image(name: str) -> None:
    backend, params, layer = create_backend(name, "double"), Params(), Conv2D(1, 2, padding="same", init="zeros")
    layer.build(Image(1, 3, 1), params.scope("conv"), backend)
    params.allocate(backend, seed=0)
    layer.weight.master[0, :, 0, 0] = backend.asarray(np.array([1.0, 10.0]))
    params.publish()
    y, _ = layer.forward(backend.asarray(np.array([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)), INFERENCE)
    np.testing.assert_array_equal(backend.to_host(y).ravel(), [21, 32, 3])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("filters", 0),
        ("filters", True),
        ("kernel", 2.0),
        ("kernel", "3"),
        ("kernel", (3, 0)),
        ("kernel", (3, 3, 3)),
        ("kernel", []),
        ("stride", 0),
        ("dilation", 0),
        ("padding", -1),
        ("padding", "full"),
        ("padding", None),
        ("activation", "swish"),
        ("init", "one"),
        ("bias", "no"),
    ],
)
def test_arguments_are_checked(setting: str, value: Any) -> None:
    arguments: dict[str, Any] = {"filters": 4, "kernel": 3, setting: value}
    with refused(setting):
        Conv2D(**arguments)


def test_inputs_that_cannot_be_convolved_are_refused() -> None:
    scope, backend = Params().scope("conv2"), create_backend("numpy")
    for layer, input in (
        (Conv2D(4, 3), Flat(500)),
        (Conv2D(4, 9), Image(8, 12, 1)),
        (Conv2D(4, 3, dilation=(4, 1)), Image(8, 12, 1)),
    ):
        with pytest.raises(ConfigError, match="'conv2'"):
            layer.build(input, scope, backend)
    assert output_of(Conv2D(4, 9, padding=1), Image(8, 12, 1)) == Image(2, 6, 4)
