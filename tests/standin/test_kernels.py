"""The stand-in's kernels: results, and refusals of what CuPy would pass on unchecked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.standin.errors import BadLaunch, Overrun, Unordered, Unwritten, WrongDevice
from tests.standin.host import compiler
from tests.standin.machine import active
from tests.standin.planted import caught

pytestmark = [pytest.mark.standin, pytest.mark.skipif(compiler() is None, reason="no C++ compiler")]

TEXT = """
#include <cuda_fp16.h>

extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}

extern "C" __global__ void careless(const float* x, float* y, int from, int n) {
  int i = from + blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[0];
}

extern "C" __global__ void halves(const half* x, half* y, long long n, double factor, bool negative) {
  int i = threadIdx.x;
  if (i < n) y[i] = __float2half((negative ? -1 : 1) * static_cast<float>(factor) * __half2float(x[i]));
}

extern "C" __global__ void halfway(float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = i;
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
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def kernels(cupy: Any) -> Any:
    return cupy.RawModule(code=TEXT, options=("-std=c++17",)).get_function


def test_a_kernel_computes(cupy: Any, kernels: Any) -> None:
    x, y = cupy.asarray(np.arange(100, dtype=np.float32)), cupy.empty(100, np.float32)
    kernels("scale")((4,), (32,), (x, y, np.float32(2), np.int32(100)))
    np.testing.assert_array_equal(y.get(), 2 * np.arange(100))
    kernels("reversed")((1,), (64,), (x, y))
    np.testing.assert_array_equal(y[:64].get(), np.arange(64)[::-1])
    h = cupy.asarray(np.arange(4, dtype=np.float16))
    kernels("halves")((1, 1, 1), (4, 1, 1), (h, h, 4, 0.5, True))  # as CuPy passes numbers of Python
    np.testing.assert_array_equal(h.get(), [0, -0.5, -1, -1.5])
    assert active().launches == {"scale": 1, "reversed": 1, "halves": 1}


def arguments(cupy: Any) -> list[Any]:
    return [cupy.ones(8, np.float32), cupy.empty(8, np.float32), np.float32(2), np.int32(8)]


WRONG = {
    "a float of Python's": (2, 2.0),
    "an int of Python's": (3, 8),
    "another precision": (2, np.float64(2)),
    "a NumPy array": (0, np.ones(8, np.float32)),
    "an address": (0, 4096),
}


@pytest.mark.parametrize(("position", "value"), WRONG.values(), ids=WRONG)
def test_an_argument_must_be_what_the_kernel_takes(position: int, value: Any, cupy: Any, kernels: Any) -> None:
    given = arguments(cupy)
    given[position] = value
    with caught(BadLaunch):
        kernels("scale")((1,), (8,), given)


def test_an_array_must_be_what_the_kernel_takes(cupy: Any, kernels: Any) -> None:
    scale, (x, y, factor, n) = kernels("scale"), arguments(cupy)
    with caught(BadLaunch):
        scale((1,), (8,), (cupy.ones(8), y, factor, n))
    wide = cupy.ones(16, np.float32)
    with caught(BadLaunch):
        scale((1,), (8,), (wide[::2], y, factor, n))
    scale((1,), (8,), (wide[::2].data, y, factor, n))  # the kernel's own affair
    with caught(BadLaunch):
        scale((1,), (8,), (x, y, factor))
    with cupy.cuda.Device(1), caught(WrongDevice):
        scale((1,), (8,), (x, y, factor, n))
    with caught(Unwritten):
        scale((1,), (8,), (cupy.empty(8, np.float32), y, factor, n))


def test_a_kernel_that_writes_outside_its_array_is_named(cupy: Any, kernels: Any) -> None:
    careless, x, y = kernels("careless"), cupy.ones(1, np.float32), cupy.zeros(10, np.float32)
    careless((1,), (10,), (x, y, np.int32(0), np.int32(10)))
    with caught(Overrun):
        careless((1,), (11,), (x, y, np.int32(0), np.int32(11)))
    with caught(Overrun):
        careless((1,), (1,), (x, y, np.int32(-1), np.int32(0)))
    flat = cupy.zeros(30, np.float32)
    with caught(Overrun):
        careless((1,), (11,), (x, flat[10:20], np.int32(0), np.int32(11)))  # into the neighbour of a view


def test_memory_a_kernel_left_alone_stays_unwritten(cupy: Any, kernels: Any) -> None:
    y = cupy.empty(8, np.float32)
    kernels("halfway")((1,), (8,), (y, np.int32(5)))
    assert y[:5].get().tolist() == [0, 1, 2, 3, 4]
    with caught(Unwritten):
        y.sum()


def test_kernels_are_ordered_like_all_operations(cupy: Any, kernels: Any) -> None:
    scale, (x, y, factor, n) = kernels("scale"), arguments(cupy)
    cupy.cuda.Device().synchronize()
    a, b = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with a:
        scale((1,), (8,), (x, y, factor, n))
    with b:
        assert float(x.sum()) == 8
        with caught(Unordered):
            y.sum()
        with caught(Unordered):
            x[...] = 1
    a.synchronize()
    y[...] = 0


def test_a_barrier_that_some_threads_never_reach_is_found(cupy: Any, kernels: Any) -> None:
    with caught(BadLaunch):
        kernels("stuck")((1,), (8,), (cupy.zeros(8, np.float32),))
    x, y = cupy.asarray(np.arange(8, dtype=np.float32)), cupy.empty(8, np.float32)
    kernels("reversed")((1,), (8,), (x, y))  # and they do not go on in the next kernel
    np.testing.assert_array_equal(y.get(), np.arange(8)[::-1])
