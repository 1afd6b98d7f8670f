"""The stand-in's arrays: CuPy's shapes, precisions and refusals."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.standin import Misuse, installed
from tests.standin.errors import Overrun, Unwritten, WrongDevice
from tests.standin.planted import caught

pytestmark = pytest.mark.standin


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def test_a_swallowed_misuse_is_raised_at_the_end() -> None:
    with pytest.raises(Unwritten), installed():
        import cupy

        x = cupy.empty(3)
        with suppress(Misuse):
            x + 1


MIXED = {
    "add": lambda x, n: x + n,
    "from the left": lambda x, n: n + x,
    "in place": lambda x, n: operator.iadd(x, n),
    "assign": lambda x, n: x.__setitem__(Ellipsis, n),
    "index": lambda x, n: x[np.array([0, 1])],
    "asarray": lambda x, n: np.asarray(x),
    "a function of NumPy's": lambda x, n: np.maximum(x, 0, out=x),
}


@pytest.mark.parametrize("what", MIXED.values(), ids=MIXED)
def test_arrays_of_numpy_are_not_mixed_in(what: Any, cupy: Any) -> None:
    with caught(TypeError):
        what(cupy.ones((2, 2)), np.ones((2, 2)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_results_have_the_shapes_and_precisions_that_numpy_2_gives(dtype: str, cupy: Any) -> None:
    """CuPy 14 follows NEP 50 too; numbers of NumPy's are arrays on the device."""
    host = np.arange(12).reshape(3, 4).astype(dtype)
    x = cupy.asarray(host)
    for compute in (
        lambda a: a + 1, lambda a: 2 * a, lambda a: a * np.float32(2), lambda a: a / 3, lambda a: a - a[0],
        lambda a: a * np.float64(0.5), lambda a: a > 3, lambda a: (a + 1) ** 2, lambda a: a.T, lambda a: a[1:, ::2],
        lambda a: a.reshape(4, 3), lambda a: a.reshape(-1), lambda a: a.sum(), lambda a: a.sum(axis=0),
        lambda a: a.sum(axis=-1, keepdims=True, dtype=np.float64), lambda a: a.max(axis=1), lambda a: a.min(),
        lambda a: a[2, 1], lambda a: a[..., None], lambda a: abs(a), lambda a: a[a > 3], lambda a: (a > 3).all(axis=0),
        lambda a: a.mean(axis=1), lambda a: (a > 3).any(), lambda a: a.astype(np.float16) + a,
    ):  # fmt: skip
        found, expected = compute(x), compute(host)
        assert isinstance(found, cupy.ndarray)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(found.get(), expected, rtol=1e-3 if dtype == "float16" else 1e-7)


def test_sums_and_products_of_halves_are_made_in_float(cupy: Any) -> None:
    many = cupy.asarray(np.full(4096, 0.25, np.float16))
    assert many.sum().dtype == np.float16 and float(many.sum()) == 1024
    ones = cupy.asarray(np.ones((1, 4096), np.float16))
    assert float((ones @ ones.T)[0, 0]) == 4096 and (ones @ ones.T).dtype == np.float16


def test_reading_unwritten_memory_is_refused(cupy: Any) -> None:
    x = cupy.empty((4, 4), np.float32)
    for read in (lambda: x + 1, lambda: x.get(), lambda: x[0].sum(), lambda: x.__iadd__(1), lambda: float(x[0, 0])):
        with caught(Unwritten):
            read()
    x[:, :2] = 1
    x[:3, 2:] = 2
    assert x[:3].sum().item() == 18  # of the rest nothing is read
    with caught(Unwritten):
        x.sum()
    x[3, 2:] = 3
    assert x.sum().item() == 26
    cupy.copyto(y := cupy.zeros(3), 1, where=y == 0)
    with caught(Unwritten):
        cupy.copyto(cupy.empty(3), 1, where=y == 0)  # part of it may stay as it is


def test_an_array_is_used_on_its_own_device(cupy: Any) -> None:
    x = cupy.ones(3)
    with cupy.cuda.Device(1):
        y = cupy.ones(3)
        assert (y.device.id, x.device.id) == (1, 0) and y.data.device_id == 1
        with caught(WrongDevice):
            x + 1
        with caught(WrongDevice):
            y[...] = x
        assert (y + y).get().tolist() == [2, 2, 2]
    with caught(WrongDevice):
        y.get()


def test_an_output_may_be_an_input_and_not_a_part_of_one(cupy: Any) -> None:
    x, y = cupy.asarray(np.arange(4.0)), cupy.ones((2, 2))
    x += x
    for wrong in (
        lambda: x[1:].__iadd__(x[:-1]),
        lambda: x.__setitem__(slice(None), x[::-1]),
        lambda: cupy.matmul(y, y, out=y),
    ):
        with caught(Overrun):
            wrong()


def test_an_index_out_of_bounds_is_refused(cupy: Any) -> None:
    x = cupy.zeros((3, 2))
    for index in (3, -4):
        with caught(Overrun):
            x[cupy.arange(1), cupy.asarray(np.array([index]))]
        with caught(Overrun):
            x[cupy.asarray(np.array([index]))] = 1
