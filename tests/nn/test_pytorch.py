"""Layers and their gradients compared with PyTorch.

With stored values (tests/golden/make_layers.py) on every backend, and with PyTorch itself if it is installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupynet.backend import Backend, create_backend
from cupynet.nn import Activation, AvgPool2D, Context, Conv2D, Flat, Image, Layer, MaxPool2D, Params
from tests.support.backends import every_backend

FILE = Path(__file__).parents[1] / "golden" / "layers.npz"
TOLERANCES = {"double": 1e-11, "float": 1e-5}
every_precision = pytest.mark.parametrize("dtype", TOLERANCES)


def kept() -> dict[str, dict[str, Any]]:
    """The arrays of the file, by what they are of: `convolution/groups`, `max/padded`."""
    found: dict[str, dict[str, Any]] = {}
    with np.load(FILE, allow_pickle=False) as file:
        for name in file.files:
            case, _, array = name.rpartition("/")
            found.setdefault(case, {})[array] = file[name]
    return found


GOLDEN = kept()
# as in make_layers.py: filters, kernel, stride, padding, activation, init, bias, dilation, groups
CONVOLUTIONS = {
    "plain": Conv2D(5, 3),
    "strides": Conv2D(4, (3, 2), (2, 3), (1, 0)),
    "gaps": Conv2D(3, (3, 2), 1, (2, 3), dilation=(2, 3)),
    "gaps and strides": Conv2D(3, (2, 3), (2, 1), (0, 2), dilation=(3, 2)),
    "groups": Conv2D(6, 3, padding="same", groups=3),
    "groups, strides and gaps": Conv2D(4, 2, 2, 1, dilation=(2, 1), groups=2),
    "depthwise": Conv2D(5, 3, 1, "same", groups=5),
    "depthwise, two filters each": Conv2D(6, (3, 2), (2, 1), (2, 1), dilation=2, groups=3),
    "one pixel": Conv2D(4, 1, 2),
}
POOLS: dict[str, tuple[Any, ...]] = {
    "apart": (2,),
    "overlapping": ((3, 2), (1, 2)),
    "padded": (3, 2, 1),
    "padded on two sides": ((2, 4), (2, 1), (0, 2)),
}


def passed(layer: Layer, backend: Backend, given: dict[str, Any]) -> dict[str, Any]:
    """What a built layer makes of x, and of dy."""

    def there(values: Any) -> Any:
        return backend.asarray(values.astype(backend.policy.storage))

    params, shape = Params(), given["x"].shape[1:]
    layer.build(Image(*shape) if len(shape) == 3 else Flat(*shape), params.scope("it"), backend)
    params.allocate(backend, 0)
    weights = dict(params.named())
    for name, p in weights.items():
        p.master[...] = there(given[name.removeprefix("it.")])
    params.publish()
    y, backward = layer.forward(there(given["x"]), Context(train=True))
    found = {"y": np.array(backend.to_host(y))}
    found["dx"] = backend.to_host(backward(there(given["dy"])))
    found |= {f"d{name[3]}": backend.to_host(p.grad) for name, p in weights.items()}
    return found


def compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float, case: str = "") -> None:
    for name, values in found.items():
        scale = max(1.0, float(np.abs(expected[name]).max()))
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=tolerance * scale, err_msg=f"{case}: {name}")


@every_backend
@every_precision
def test_convolutions(name: str, dtype: str) -> None:
    for case, layer in CONVOLUTIONS.items():
        expected = GOLDEN[f"convolution/{case}"]
        found = passed(copy.deepcopy(layer), create_backend(name, dtype), expected)
        assert found.keys() == {"y", "dx", "dw", "db"}
        compare(found, expected, TOLERANCES[dtype], case)


@every_backend
@every_precision
@pytest.mark.parametrize(("kind", "layer"), [("max", MaxPool2D), ("avg", AvgPool2D)])
def test_pools(name: str, dtype: str, kind: str, layer: Any) -> None:
    for case, arguments in POOLS.items():
        expected = GOLDEN[f"{kind}/{case}"]
        found = passed(layer(*arguments), create_backend(name, dtype), expected)
        compare(found, expected, TOLERANCES[dtype], case)


@every_backend
@every_precision
def test_activations(name: str, dtype: str) -> None:
    x = GOLDEN[""]["x"]
    given = {"x": x[None], "dy": np.ones_like(x)[None]}
    for case in (case for case in GOLDEN if case.startswith("activation/")):
        expected = GOLDEN[case]
        found = passed(Activation(case.removeprefix("activation/")), create_backend(name, dtype), given)
        compare(found, {"y": expected["y"][None], "dx": expected["slope"][None]}, TOLERANCES[dtype], case)


def test_every_layer_is_compared_with_pytorch() -> None:
    pools = {f"{kind}/{case}" for kind in ("max", "avg") for case in POOLS}
    convolutions = {f"convolution/{case}" for case in CONVOLUTIONS}
    assert {case for case in GOLDEN if not case.startswith("activation/")} == {"", *pools, *convolutions}
    assert len([case for case in GOLDEN if case.startswith("activation/")]) == 8
    assert FILE.stat().st_size < 200_000


# PyTorch itself -------------------------------------------------------------------------------------------------------

small = st.tuples(st.integers(1, 3), st.integers(1, 3))
zeros = st.tuples(st.integers(0, 2), st.integers(0, 2))
counts = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))
drawing = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@every_backend
def test_convolutions_of_all_kinds(name: str) -> None:
    pytest.importorskip("torch")
    from tests.golden.make_layers import convolution, drawn

    @drawing
    @given(small, small, zeros, small, counts, zeros, st.integers(0, 99))
    def compared(
        kernel: Any, stride: Any, padding: Any, dilation: Any, parts: tuple[int, int, int], more: Any, seed: int
    ) -> None:
        groups, each, channels = parts
        filters = groups * each
        extent = [(k - 1) * gap + 1 for k, gap in zip(kernel, dilation, strict=True)]
        height, width = (max(1, size - 2 * p) + extra for size, p, extra in zip(extent, padding, more, strict=True))
        arguments = filters, kernel, stride, padding, dilation, groups
        x, weight, bias = drawn(arguments, (height, width, channels * groups), seed)
        expected = {"x": x, "weight": weight, "bias": bias, **convolution(x, weight, bias, seed, arguments)}
        layer = Conv2D(filters, kernel, stride, padding, dilation=dilation, groups=groups)
        compare(passed(layer, create_backend(name, "double"), expected), expected, 1e-11)

    compared()


@every_backend
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pools_of_all_kinds(name: str, kind: str) -> None:
    pytest.importorskip("torch")
    from tests.golden.make_layers import pool

    @drawing
    @given(small, small, zeros, zeros, st.integers(1, 3), st.integers(0, 99))
    def compared(kernel: Any, stride: Any, padding: Any, more: Any, channels: int, seed: int) -> None:
        padding = tuple(min(p, k // 2) for p, k in zip(padding, kernel, strict=True))  # PyTorch takes no more
        height, width = (k + extra for k, extra in zip(kernel, more, strict=True))
        x = np.random.default_rng(seed).normal(size=(2, height, width, channels)) - 3
        expected = {"x": x, **pool(kind, x, seed, (kernel, stride, padding))}
        layer = (MaxPool2D if kind == "max" else AvgPool2D)(kernel, stride, padding)
        compare(passed(layer, create_backend(name, "double"), expected), expected, 1e-11)

    compared()
