"""Layers and their gradients compared with PyTorch's: stored by tests/golden/make_layers.py, and random ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    """The arrays of the file, by layer: `convolution/groups`, `max/padded`."""
    found: dict[str, dict[str, Any]] = {}
    with np.load(FILE, allow_pickle=False) as file:
        for name in file.files:
            kind, _, array = name.rpartition("/")
            found.setdefault(kind, {})[array] = file[name]
    return found


GOLDEN = stored()
ACTIVATIONS = [kind for kind in GOLDEN if kind.startswith("activation/")]


def check(layer: Layer, expected: dict[str, Any], name: str, dtype: str, tolerance: float) -> None:
    """Compare y, dx and the gradients of the weights, for stored x, dy and weights."""
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
@pytest.mark.parametrize("kind", LAYERS)
def test_convolutions_and_pools(name: str, dtype: str, tolerance: float, kind: str) -> None:
    check(LAYERS[kind], GOLDEN[kind], name, dtype, tolerance)


@every_backend
@every_precision
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(name: str, dtype: str, tolerance: float, kind: str) -> None:
    x, known = GOLDEN[""]["x"][None], GOLDEN[kind]
    expected = {"x": x, "dy": np.ones_like(x), "y": known["y"][None], "dx": known["slope"][None]}
    check(Activation(kind.removeprefix("activation/")), expected, name, dtype, tolerance)


def test_every_layer_is_compared() -> None:
    assert GOLDEN.keys() == {"", *LAYERS, *ACTIVATIONS} and len(ACTIVATIONS) == 8


# random layers, compared with PyTorch itself where it is installed ----------------------------------------------------

sizes = st.tuples(st.integers(1, 3), st.integers(1, 3))
extras = st.tuples(st.integers(0, 2), st.integers(0, 2))
divisions = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))  # groups, filters and channels of each
drawing = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@every_backend
def test_random_convolutions(name: str) -> None:
    pytest.importorskip("torch")
    from tests.golden.make_layers import convolution, drawn

    @drawing
    @given(sizes, sizes, extras, sizes, divisions, extras, st.integers(0, 99))
    def compared(
        kernel: Any, stride: Any, padding: Any, dilation: Any, divided: tuple[int, int, int], more: Any, seed: int
    ) -> None:
        groups, each, channels = divided
        extent = [(k - 1) * gap + 1 for k, gap in zip(kernel, dilation, strict=True)]
        height, width = (max(1, size - 2 * p) + extra for size, p, extra in zip(extent, padding, more, strict=True))
        arguments = groups * each, kernel, stride, padding, dilation, groups
        x, weight, bias = drawn(arguments, (height, width, channels * groups), seed)
        expected = {"x": x, "weight": weight, "bias": bias, **convolution(x, weight, bias, seed, arguments)}
        layer = Conv2D(groups * each, kernel, stride, padding, dilation=dilation, groups=groups)
        check(layer, expected, name, "double", 1e-11)

    compared()


@every_backend
@pytest.mark.parametrize(("kind", "layer"), [("max", MaxPool2D), ("avg", AvgPool2D)])
def test_random_pools(name: str, kind: str, layer: Any) -> None:
    pytest.importorskip("torch")
    from tests.golden.make_layers import pool

    @drawing
    @given(sizes, sizes, extras, extras, st.integers(1, 3), st.integers(0, 99))
    def compared(kernel: Any, stride: Any, padding: Any, more: Any, channels: int, seed: int) -> None:
        padding = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))  # PyTorch takes no more
        height, width = (k + extra for k, extra in zip(kernel, more, strict=True))
        x = np.random.default_rng(seed).normal(size=(2, height, width, channels)) - 3
        expected = {"x": x, **pool(kind, x, seed, (kernel, stride, padding))}
        check(layer(kernel, stride, padding), expected, name, "double", 1e-11)

    compared()
