"""The stand-in's kernels: results, and refusals of what CuPy would pass on unchecked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.standin.errors import BadLaunch, Overrun, Unordered, Unwritten, WrongDevice
from tests.standin.host import compiler
from tests.standin.planted import caught

pytestmark = [pytest.mark.standin, pytest.mark.skipif(compiler() is None, reason="no C++ compiler")]

TEXT = """
extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}

extern "C" __global__ void fill(float* y, int from, int to) {
  int i = from + blockIdx.x * blockDim.x + threadIdx.x;
  if (i < to) y[i] = 1;
}

extern "C" __global__ void reversed(const float* x, float* y) {
  __shared__ float kept[64];
  kept[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void stuck(float* y) {
  if (threadIdx.x == 0) return;
  __syncthreads();
  y[threadIdx.x] = 0;
}
"""


@pytest.fixture
def kernels(cupy: Any) -> Any:
    return cupy.RawModule(code=TEXT, options=("-std=c++17",)).get_function


@pytest.fixture
def arguments(cupy: Any) -> list[Any]:
    """Those of `scale`."""
    return [cupy.ones(8, np.float32), cupy.empty(8, np.float32), np.float32(2), np.int32(8)]


def test_a_kernel_computes(cupy: Any, kernels: Any) -> None:
    x, y = cupy.asarray(np.arange(100, dtype=np.float32)), cupy.empty(100, np.float32)
    kernels("scale")((4,), (32,), (x, y, np.float32(2), np.int32(100)))
    np.testing.assert_array_equal(y.get(), 2 * np.arange(100))
    kernels("reversed")((1,), (64,), (x, y))
    np.testing.assert_array_equal(y[:64].get(), np.arange(64)[::-1])


WRONG = {
    "a float of Python": (2, 2.0),
    "another precision": (2, np.float64(2)),
    "a NumPy array": (0, np.ones(8, np.float32)),
    "an address": (0, 4096),
}


@pytest.mark.parametrize(("position", "value"), WRONG.values(), ids=WRONG)
def test_an_argument_must_be_what_the_kernel_takes(
    position: int, value: Any, arguments: list[Any], kernels: Any
) -> None:
    arguments[position] = value
    with caught(BadLaunch):
        kernels("scale")((1,), (8,), arguments)


def test_an_array_must_be_what_the_kernel_takes(cupy: Any, arguments: list[Any], kernels: Any) -> None:
    scale, rest = kernels("scale"), arguments[1:]
    for wrong in (cupy.ones(8), cupy.ones(16, np.float32)[::2]):
        with caught(BadLaunch):
            scale((1,), (8,), (wrong, *rest))
    with caught(Unwritten):
        scale((1,), (8,), (cupy.empty(8, np.float32), *rest))
    with cupy.cuda.Device(1), caught(WrongDevice):
        scale((1,), (8,), arguments)


@pytest.mark.parametrize(("start", "stop"), [(-1, 0), (0, 11)])
def test_a_write_outside_an_array_is_found(start: int, stop: int, cupy: Any, kernels: Any) -> None:
    whole, part = cupy.zeros(10, np.float32), cupy.zeros(30, np.float32)[10:20]
    for y in (whole, part):
        with caught(Overrun):
            kernels("fill")((1,), (16,), (y, np.int32(start), np.int32(stop)))


def test_memory_a_kernel_left_alone_stays_unwritten(cupy: Any, kernels: Any) -> None:
    y = cupy.empty(8, np.float32)
    kernels("fill")((1,), (8,), (y, np.int32(0), np.int32(5)))
    assert y[:5].get().tolist() == [1] * 5
    with caught(Unwritten):
        y.sum()


def test_kernels_are_ordered_like_all_operations(cupy: Any, arguments: list[Any], kernels: Any) -> None:
    x, y, *_ = arguments
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        kernels("scale")((1,), (8,), arguments)
    with cupy.cuda.Stream(non_blocking=True):
        assert float(x.sum()) == 8
        with caught(Unordered):
            y.sum()
        with caught(Unordered):
            x[...] = 1
    cupy.cuda.Device().synchronize()


def test_a_barrier_that_some_threads_never_reach_is_found(cupy: Any, kernels: Any) -> None:
    with caught(BadLaunch):
        kernels("stuck")((1,), (8,), (cupy.zeros(8, np.float32),))
    x, y = cupy.asarray(np.arange(8, dtype=np.float32)), cupy.empty(8, np.float32)
    kernels("reversed")((1,), (8,), (x, y))  # no thread continues in the next kernel
    np.testing.assert_array_equal(y.get(), np.arange(8)[::-1])
