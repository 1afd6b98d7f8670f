"""The stand-in's arrays: CuPy's shapes, precisions and refusals."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.standin import Misuse, installed
from tests.standin.errors import Overrun, Unwritten, WrongDevice
from tests.standin.planted import caught

pytestmark = pytest.mark.standin


def test_a_swallowed_misuse_is_raised_at_the_end() -> None:
    with pytest.raises(Unwritten), installed():
        import cupy

        x = cupy.empty(3)
        with suppress(Misuse):
            x + 1


MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "right operand": lambda x, host: x + host,
    "left operand": lambda x, host: host + x,
    "assignment": lambda x, host: operator.setitem(x, Ellipsis, host),
    "index": lambda x, host: x[np.array([0, 1])],
    "conversion": lambda x, host: np.asarray(x),
    "function of NumPy": lambda x, host: np.maximum(x, 0, out=x),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED)
def test_numpy_arrays_are_not_converted_silently(mix: Callable[[Any, Any], Any], cupy: Any) -> None:
    with caught(TypeError):
        mix(cupy.ones((2, 2)), np.ones((2, 2)))


def test_sums_and_products_of_halves_accumulate_in_float(cupy: Any) -> None:
    x = cupy.asarray(np.full((1, 4096), 0.25, np.float16))
    for total in (x.sum(), (x @ (4 * x).T)[0, 0]):
        assert total.dtype == np.float16 and float(total) == 1024


def test_unwritten_elements_cannot_be_read(cupy: Any) -> None:
    x = cupy.empty((4, 4), np.float32)
    reads: list[Callable[[], Any]] = [lambda: x + 1, lambda: x.get(), lambda: x.__iadd__(1)]
    for read in reads:
        with caught(Unwritten):
            read()
    x[:3] = 1
    assert float(x[:3].sum()) == 12
    with caught(Unwritten):
        x.sum()


def test_an_array_is_used_on_its_own_device(cupy: Any) -> None:
    x = cupy.ones(3)
    with cupy.cuda.Device(1):
        y = cupy.ones(3)
        with caught(WrongDevice):
            x + 1
        with caught(WrongDevice):
            y[...] = x
    with caught(WrongDevice):
        y.get()


def test_an_output_overlaps_no_other_operand(cupy: Any) -> None:
    x, y = cupy.asarray(np.arange(4.0)), cupy.ones((2, 2))
    x += x
    for overlap in (
        lambda: x[1:].__iadd__(x[:-1]),
        lambda: operator.setitem(x, slice(None), x[::-1]),
        lambda: cupy.matmul(y, y, out=y),
    ):
        with caught(Overrun):
            overlap()


def test_an_index_out_of_bounds_is_refused(cupy: Any) -> None:
    with caught(Overrun):
        cupy.zeros((3, 2))[cupy.asarray(np.array([3]))] = 1
