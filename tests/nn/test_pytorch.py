"""Layers and their gradients compared with PyTorch's, stored by tests/golden/make_layers.py."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.nn import Activation, AvgPool2D, Conv2D, Layer, MaxPool2D
from tests.support.backends import every_backend
from tests.support.passes import built, passed

FILE = Path(__file__).parents[1] / "golden" / "layers.npz"
every_precision = pytest.mark.parametrize(("dtype", "tolerance"), [("double", 1e-11), ("float", 1e-5)])

LAYERS: dict[str, Layer] = {
    "convolution/plain": Conv2D(5, 3),
    "convolution/strides": Conv2D(4, (3, 2), (2, 3), (1, 0)),
    "convolution/gaps": Conv2D(3, (3, 2), 1, (2, 3), dilation=(2, 3)),
    "convolution/gaps and strides": Conv2D(3, (2, 3), (2, 1), (0, 2), dilation=(3, 2)),
    "convolution/groups": Conv2D(6, 3, padding="same", groups=3),
    "convolution/groups, strides and gaps": Conv2D(4, 2, 2, 1, dilation=(2, 1), groups=2),
    "convolution/depthwise": Conv2D(5, 3, 1, "same", groups=5),
    "convolution/depthwise, two filters each": Conv2D(6, (3, 2), (2, 1), (2, 1), dilation=2, groups=3),
    "convolution/one pixel": Conv2D(4, 1, 2),
    "max/apart": MaxPool2D(2),
    "max/overlapping": MaxPool2D((3, 2), (1, 2)),
    "max/padded": MaxPool2D(3, 2, 1),
    "max/padded on two sides": MaxPool2D((2, 4), (2, 1), (0, 2)),
    "avg/apart": AvgPool2D(2),
    "avg/overlapping": AvgPool2D((3, 2), (1, 2)),
    "avg/padded": AvgPool2D(3, 2, 1),
    "avg/padded on two sides": AvgPool2D((2, 4), (2, 1), (0, 2)),
}


def stored() -> dict[str, dict[str, Any]]:
    """Return the file's arrays by layer, such as `convolution/groups` or `max/padded`."""
    found: dict[str, dict[str, Any]] = {}
    with np.load(FILE, allow_pickle=False) as file:
        for name in file.files:
            kind, _, array = name.rpartition("/")
            found.setdefault(kind, {})[array] = file[name]
    return found


GOLDEN = stored()
ACTIVATIONS = [kind for kind in GOLDEN if kind.startswith("activation/")]


def check(layer: Layer, expected: dict[str, Any], name: str, dtype: str, tolerance: float) -> None:
    """Compare y, dx and the weights' gradients for stored x, dy and weights."""
    layer, backend = copy.deepcopy(layer), create_backend(name, dtype)
    weights = {kind: expected[kind] for kind in ("weight", "bias") if kind in expected}
    params = built(layer, expected["x"].shape[1:], backend, **weights)
    found = dict(zip(("y", "dx"), passed(layer, expected["x"], expected["dy"]), strict=True))
    found |= {"d" + label[3]: backend.to_host(p.grad) for label, p in params.named()}  # dw, db
    for result, values in found.items():
        scale = max(1.0, float(np.abs(expected[result]).max()))
        np.testing.assert_allclose(values, expected[result], rtol=0, atol=tolerance * scale, err_msg=result)


@every_backend
@every_precision
@pytest.mark.parametrize("kind", [kind for kind in GOLDEN if kind.startswith(("convolution/", "max/", "avg/"))])
def test_convolutions_and_pools(name: str, dtype: str, tolerance: float, kind: str) -> None:
    check(LAYERS[kind], GOLDEN[kind], name, dtype, tolerance)


@every_backend
@every_precision
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(name: str, dtype: str, tolerance: float, kind: str) -> None:
    x, known = GOLDEN[""]["x"][None], GOLDEN[kind]
    expected = {"x": x, "dy": np.ones_like(x), "y": known["y"][None], "dx": known["slope"][None]}
    check(Activation(kind.removeprefix("activation/")), expected, name, dtype, tolerance)
