"""Conv2D: gradients for every geometry and batch size, groups, padding."""

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Conv2D, Image
from tests.support.backends import every_backend
from tests.support.gradients import check_layer
from tests.support.pairwise import pairwise
from tests.support.passes import built, inferred


@pairwise(
    sizes=((2, 3, 1), (1, 3, 1), (4, 6, 2), (3, 3, 3), (3, 9, 3)),  # channels, filters, groups
    kernel=(1, 2, 3, (3, 5), [1, 4], (4, 2)),
    stride=(1, 2, (1, 2), (3, 1)),
    padding=(0, 2, "same", "valid", (2, 0)),
    dilation=(1, 2, (2, 1), (1, 2)),
    image=((12, 13), (11, 11)),
    batch=(1, 2, 5),
)
def test_gradients_of_convolutions_of_every_geometry_equal_finite_differences(
    sizes: tuple[int, int, int],
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    image: tuple[int, int],
    batch: int,
) -> None:
    channels, filters, groups = sizes
    layer = Conv2D(filters, kernel, stride, padding, "tanh", dilation=dilation, groups=groups)
    check_layer(layer, Image(*image, channels), batch=batch)


def test_weights_of_groups_are_drawn_like_weights_of_separate_convolutions() -> None:
    """Xavier's variance is 2 / (in + out) of a unit, which has nine inputs here. Two filters read each input."""
    layer = Conv2D(2000, 3, groups=1000)
    built(layer, (5, 5, 1000), create_backend("numpy", "double"))
    assert layer.weight.shape == (3, 3, 1, 2000)
    assert float(layer.weight.data.var()) == pytest.approx(2 / (9 + 18), rel=0.05)
    assert layer.multiply_adds() == 9 * 2000 * 9


@every_backend
def test_padding_same_puts_the_odd_zero_after_the_image(name: str) -> None:
    layer, weight = Conv2D(1, (1, 2), padding="same"), np.array([1.0, 10.0]).reshape(1, 2, 1, 1)
    built(layer, (1, 3, 1), create_backend(name), weight=weight)
    assert inferred(layer, np.array([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1)).ravel().tolist() == [21, 32, 3]
