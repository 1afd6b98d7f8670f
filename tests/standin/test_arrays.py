"""The stand-in's arrays: CuPy's shapes, precisions and refusals."""

from __future__ import annotations

import operator
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.standin import Misuse, installed
from tests.standin.errors import Foreign, Overrun, Unwritten, WrongDevice
from tests.standin.planted import caught

pytestmark = pytest.mark.standin


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def test_the_standin_is_installed_and_removed() -> None:
    import cupy

    assert cupy.__version__ == "14.2.0" and sys.modules["cupy.cuda"] is cupy.cuda
    with installed(devices=3):
        import cupy as inner
        from cupy.cuda import nccl

        assert inner is not cupy and inner.cuda.runtime.getDeviceCount() == 3 and nccl.available
    assert sys.modules["cupy"] is cupy and cupy.cuda.runtime.getDeviceCount() == 2


def test_missing_attributes_are_named(cupy: Any) -> None:
    with pytest.raises(AttributeError, match="the stand-in has no cupy.fft: look up what CuPy does"):
        cupy.fft  # noqa: B018
    with pytest.raises(AttributeError, match="the stand-in has no cupy.cuda.profiler"):
        cupy.cuda.profiler  # noqa: B018
    with pytest.raises(AttributeError, match="the stand-in of cupy.ndarray has no 'sort'"):
        cupy.ones(3).sort()


def test_a_swallowed_misuse_is_raised_at_the_end() -> None:
    with pytest.raises(Unwritten, match="nothing or not all was written"), installed():
        import cupy

        x = cupy.empty(3)
        with suppress(Misuse):
            x + 1


MIXED = {
    "add": lambda x, n: x + n,
    "from the left": lambda x, n: n + x,
    "in place": lambda x, n: operator.iadd(x, n),
    "into NumPy's": lambda x, n: operator.iadd(n, x),
    "compare": lambda x, n: x == n,
    "product": lambda x, n: x @ n,
    "product from the left": lambda x, n: n @ x,
    "assign": lambda x, n: x.__setitem__(Ellipsis, n),
    "assign a number of NumPy's": lambda x, n: x.__setitem__(0, np.array(1.0)),
    "assign a list": lambda x, n: x.__setitem__(Ellipsis, [1.0, 2.0]),
    "fill": lambda x, n: x.fill(n),
    "NumPy's from it": lambda x, n: n.__setitem__(Ellipsis, x),
    "index": lambda x, n: x[np.array([0, 1])],
    "index by a list": lambda x, n: x[[0, 1]],
    "asarray": lambda x, n: np.asarray(x),
    "array of several": lambda x, n: np.array([x, x]),
    "a function of NumPy's": lambda x, n: np.maximum(x, 0, out=x),
    "stack": lambda x, n: np.stack([x, x]),
    "sum": lambda x, n: np.sum(x),
}


@pytest.mark.parametrize("what", MIXED.values(), ids=MIXED)
def test_arrays_of_numpy_are_not_mixed_in(what: Any, cupy: Any) -> None:
    with caught(TypeError, "Unsupported type|Implicit conversion|is no number|an index must be|use cupy"):
        what(cupy.ones((2, 2)), np.ones((2, 2)))


def test_functions_take_no_arrays_of_numpy(cupy: Any) -> None:
    x, n = cupy.ones(2), np.ones(2)
    for call in (
        lambda: cupy.maximum(x, n),
        lambda: cupy.exp(x, out=n),
        lambda: cupy.copyto(x, n),
        lambda: cupy.copyto(x, 1.0, where=np.array([True, False])),
        lambda: cupy.where(n > 0, x, x),
        lambda: cupy.matmul(x, x, out=n),
    ):
        with caught(Foreign, "Unsupported type|array of CuPy"):
            call()


def test_arrays_go_to_the_host_and_back(cupy: Any) -> None:
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = cupy.asarray(host)
    host[0, 0] = 7  # CuPy has copied it before
    assert x.get().tolist() == [[0, 1, 2], [3, 4, 5]] and cupy.asnumpy(x).dtype == np.float32
    assert float(x[1, 2]) == 5.0 and int(x[1, 1]) == 4 and bool(x[0, 1]) and x[0, 2].item() == 2
    assert cupy.asarray(x) is x and cupy.asarray(x, np.float64).dtype == np.float64
    x.set(host)
    assert float(x[0, 0]) == 7
    assert len(x) == 2 and [float(row.sum()) for row in x] == [10, 12]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int64"])
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


def test_operations_write_to_out(cupy: Any) -> None:
    x = cupy.asarray(np.arange(6.0).reshape(2, 3))
    y = cupy.empty((2, 3))
    assert cupy.maximum(x, 2, out=y) is y and y.get().tolist() == [[2, 2, 2], [3, 4, 5]]
    x[:, 0] = 9
    x[1] -= 1
    x[:, 1:] *= x[:, 1:]
    assert x.get().tolist() == [[9, 1, 4], [8, 9, 16]]
    rows, columns = cupy.arange(2), cupy.asarray(np.array([2, 0]))
    x[rows, columns] -= 4
    assert x.get().tolist() == [[9, 1, 0], [4, 9, 16]] and x[rows, columns].get().tolist() == [0, 4]
    x[x > 5] = 0.5
    cupy.copyto(x, 7, where=x == 1)
    assert x.get().tolist() == [[0.5, 7, 0], [4, 0.5, 0.5]]
    assert cupy.where(x > 1, x, 0).get().tolist() == [[0, 7, 0], [4, 0, 0]]
    with pytest.raises(TypeError, match="same_kind"):
        cupy.arange(3).__iadd__(0.5)
    with pytest.raises(ValueError, match="could not broadcast"):
        x[...] = cupy.ones((3, 2))


def test_reading_unwritten_memory_is_refused(cupy: Any) -> None:
    x = cupy.empty((4, 4), np.float32)
    for read in (lambda: x + 1, lambda: x.get(), lambda: x[0].sum(), lambda: x.__iadd__(1), lambda: float(x[0, 0])):
        with caught(Unwritten, r"reads 64 bytes of device 0, allocated at .*test_arrays.py:\d+"):
            read()
    x[:, :2] = 1
    x[:3, 2:] = 2
    assert x[:3].sum().item() == 18  # of the rest nothing is read
    with caught(Unwritten, "test_arrays.py"):
        x.sum()
    x[3, 2:] = 3
    assert x.sum().item() == 26
    cupy.copyto(y := cupy.zeros(3), 1, where=y == 0)
    with caught(Unwritten, "test_arrays.py"):
        cupy.copyto(cupy.empty(3), 1, where=y == 0)  # part of it may stay as it is


def test_memory_is_new_each_time_it_is_allocated(cupy: Any) -> None:
    x = cupy.ones(100)
    del x
    again = cupy.empty(100)
    assert cupy.get_default_memory_pool().n_free_blocks() == 0  # the same block
    with caught(Unwritten, "reads 800 bytes"):
        again.sum()


def test_an_array_is_used_on_its_own_device(cupy: Any) -> None:
    x = cupy.ones(3)
    with cupy.cuda.Device(1):
        y = cupy.ones(3)
        assert (y.device.id, x.device.id) == (1, 0) and y.data.device_id == 1
        with caught(WrongDevice, "on device 1 is given an array of 24 bytes of device 0"):
            x + 1
        with caught(WrongDevice, "is given an array of"):
            y[...] = x
        assert (y + y).get().tolist() == [2, 2, 2]
    with caught(WrongDevice, "a copy to the host .* on device 0"):
        y.get()


def test_an_output_may_be_an_input_and_not_a_part_of_one(cupy: Any) -> None:
    x, y = cupy.asarray(np.arange(4.0)), cupy.ones((2, 2))
    x += x
    for wrong in (
        lambda: x[1:].__iadd__(x[:-1]),
        lambda: x.__setitem__(slice(None), x[::-1]),
        lambda: cupy.matmul(y, y, out=y),
    ):
        with caught(Overrun, "the output overlaps an input"):
            wrong()


def test_an_index_out_of_bounds_is_refused(cupy: Any) -> None:
    x = cupy.zeros((3, 2))
    for index in (3, -4):
        with caught(Overrun, "out of bounds.*CuPy would go round"):
            x[cupy.arange(1), cupy.asarray(np.array([index]))]
        with caught(Overrun, "out of bounds.*CuPy would go round"):
            x[cupy.asarray(np.array([index]))] = 1


def test_products_are_of_matrices_and_go_where_they_fit(cupy: Any) -> None:
    a, b = cupy.ones((2, 3)), cupy.ones((3, 4))
    assert (a @ b).get().tolist() == [[3] * 4] * 2 and float(cupy.ones(3) @ cupy.ones(3)) == 3
    with pytest.raises(ValueError, match="vectors and matrices only"):
        cupy.ones((2, 3, 4)) @ cupy.ones((2, 4, 3))
    with pytest.raises(ValueError, match="not aligned"):
        a @ a
    for out in (cupy.empty((2, 4), np.float32), cupy.empty((4, 2)).T, cupy.empty((4, 2))):
        with pytest.raises(ValueError, match="is no output for"):
            cupy.matmul(a, b, out=out)


def test_an_array_of_a_machine_that_was_switched_off_is_not_used() -> None:
    with installed():
        import cupy

        x = cupy.ones(3)
        with installed(), caught(Misuse, "a machine that was switched off"):
            x + 1


def test_empty_arrays_are_no_work(cupy: Any) -> None:
    x = cupy.empty((0, 3))
    assert x.data.ptr == 0 and (x + 1).shape == (0, 3) and x.get().shape == (0, 3) and float(x.sum()) == 0
    x[...] = cupy.empty((0, 3))
    with pytest.raises(ValueError, match="zero-size array"):
        x.max()
