"""Convolution: gradients for every geometry, output sizes, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Window, create_backend
from cupynet.errors import ConfigError
from cupynet.nn import INFERENCE, Conv2D, Flat, Image, Params
from cupynet.nn.conv import same_padding
from tests.backends import every_backend
from tests.gradients import check_layer

PADDINGS: list[int | str] = [0, 1, 2, "same"]
SIZES = [Image(6, 7, 2), Image(5, 5, 1), Image(8, 5, 3)]


@every_backend
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_gradients_for_every_geometry(name: str, kernel: int, stride: int, padding: int | str) -> None:
    sizes = itertools.cycle(SIZES)
    for _ in range(1 + kernel % 3):
        next(sizes)
    for image in (next(sizes), next(sizes)):
        check_layer(Conv2D(3, kernel, stride, padding), image, create_backend(name, "double"))


@every_backend
@pytest.mark.parametrize("padding", [0, (1, 0), (2, 1), "same"])
@pytest.mark.parametrize("stride", [1, (1, 2), (3, 1)])
@pytest.mark.parametrize("kernel", [(3, 5), (1, 4), (4, 2)])
def test_gradients_of_windows_that_are_not_square(
    name: str, kernel: tuple[int, int], stride: int | tuple[int, int], padding: int | tuple[int, int] | str
) -> None:
    check_layer(Conv2D(3, kernel, stride, padding), Image(6, 7, 2), create_backend(name, "double"))


@pytest.mark.parametrize("make", [list, tuple, np.array], ids=["list", "tuple", "numbers of NumPy"])
def test_a_pair_is_height_and_width(make: Callable[..., Any]) -> None:
    kernel, stride, padding = ([make([a, b])[0], make([a, b])[1]] for a, b in ((3, 5), (2, 1), (1, 0)))
    layer = Conv2D(np.int64(4), kernel, tuple(stride), padding)  # type: ignore[arg-type]
    assert output_of(layer, Image(9, 9, 2)) == Image((9 + 2 - 3) // 2 + 1, 9 - 5 + 1, 4)
    assert layer.weight.shape == (3, 5, 2, 4)
    assert layer.window == Window((3, 5), (2, 1), ((1, 1), (0, 0)))
    assert layer.describe() == "3x5, 4 filters, stride 2x1, padding 1x0, identity"


@every_backend
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["identity", "relu", "softmax"])
def test_gradients_with_activation_and_bias(name: str, activation: str, bias: bool) -> None:
    layer = Conv2D(3, 3, padding=1, activation=activation, bias=bias)
    check_layer(layer, Image(5, 4, 2), create_backend(name, "double"))


@every_backend
def test_gradients_of_one_example_with_a_window_as_large_as_the_image(name: str) -> None:
    check_layer(Conv2D(4, 5), Image(5, 5, 3), create_backend(name, "double"), batch=1)


def output_of(layer: Conv2D, image: Image) -> Image:
    params = Params()
    output = layer.build(image, params.scope("conv"), create_backend("numpy"))
    assert isinstance(output, Image)
    return output


def test_windows_that_do_not_fit_are_left_out() -> None:
    assert output_of(Conv2D(4, 3, stride=2), Image(8, 9, 1)) == Image(3, 4, 4)
    assert output_of(Conv2D(4, 3, stride=2, padding=1), Image(8, 9, 1)) == Image(4, 5, 4)
    assert output_of(Conv2D(4, 1, stride=3), Image(8, 9, 1)) == Image(3, 3, 4)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_keeps_a_window_for_every_stride(size: int, kernel: int, stride: int) -> None:
    output = output_of(Conv2D(1, kernel, stride, "same"), Image(size, 5, 1))
    assert (output.height, output.width) == (-(-size // stride), -(-5 // stride))
    before, after = same_padding(size, kernel, stride)
    assert 0 <= after - before <= 1


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
    ("arguments", "message"),
    [
        ({"filters": 0, "kernel": 3}, "Conv2D filters=0: must be an integer of at least 1"),
        ({"filters": True, "kernel": 3}, "Conv2D filters=True"),
        ({"filters": 4, "kernel": 2.0}, "Conv2D kernel=2.0"),
        ({"filters": 4, "kernel": "3"}, "Conv2D kernel='3'"),
        ({"filters": 4, "kernel": 3, "stride": 0}, "Conv2D stride=0"),
        ({"filters": 4, "kernel": 3, "padding": -1}, "Conv2D padding=-1: must be an integer of at least 0"),
        (
            {"filters": 4, "kernel": 3, "padding": "valid"},
            "Conv2D padding='valid': must be an integer of at least 0, or a pair of them (height, width), or 'same'",
        ),
        ({"filters": 4, "kernel": (3, 0)}, "Conv2D kernel=(3, 0): must be an integer of at least 1, or a pair of them"),
        ({"filters": 4, "kernel": (3, 3, 3)}, "Conv2D kernel=(3, 3, 3): must be"),
        ({"filters": 4, "kernel": []}, "Conv2D kernel=[]: must be"),
        ({"filters": 4, "kernel": 3, "padding": None}, "Conv2D padding=None"),
        ({"filters": 4, "kernel": 3, "activation": "tanh"}, "activation=tanh: must be one of identity, relu, softmax"),
        ({"filters": 4, "kernel": 3, "init": "one"}, "init=one: must be one of xavier"),
        ({"filters": 4, "kernel": 3, "bias": "no"}, "Conv2D bias='no': must be true or false"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Conv2D(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_what_cannot_be_convolved_is_refused_by_name() -> None:
    scope, backend = Params().scope("conv2"), create_backend("numpy")
    with pytest.raises(ConfigError, match=r"Conv2D 'conv2' needs an Image, got Flat\(500\): put it before the first"):
        Conv2D(4, 3).build(Flat(500), scope, backend)
    with pytest.raises(
        ConfigError, match=r"'conv2' kernel=9 is larger than its input Image\(8, 12, 1\): use a smaller"
    ):
        Conv2D(4, 9).build(Image(8, 12, 1), scope, backend)
    assert output_of(Conv2D(4, 9, padding=1), Image(8, 12, 1)) == Image(2, 6, 4)
