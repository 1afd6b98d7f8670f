"""The stand-in finds each misuse of CuPy, and accepts correct use."""

import ctypes
import operator
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.standin import Misuse, installed
from tests.standin.errors import BadLaunch, Foreign, Freed, InCapture, Overrun, Unordered, Unwritten, WrongDevice
from tests.standin.host import compiler, host_library
from tests.standin.machine import active
from tests.standin.planted import caught, kept

pytestmark = pytest.mark.standin
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

KERNELS = """
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


def test_a_swallowed_misuse_is_raised_at_the_end() -> None:
    with pytest.raises(Unwritten), installed():
        import cupy

        x = cupy.empty(3)
        with suppress(Misuse):
            x + 1


HOST = np.ones((2, 2))
# with x an array of ones (2, 2)
OF_ARRAYS: dict[str, tuple[type[Misuse], Callable[[Any, Any], Any]]] = {
    "operand of NumPy": (Foreign, lambda cupy, x: x + HOST),
    "left operand of NumPy": (Foreign, lambda cupy, x: HOST + x),
    "assigned from NumPy": (Foreign, lambda cupy, x: operator.setitem(x, Ellipsis, HOST)),
    "converted to NumPy": (Foreign, lambda cupy, x: np.asarray(x)),
    "function of NumPy": (Foreign, lambda cupy, x: np.maximum(x, 0, out=x)),
    "unwritten operand": (Unwritten, lambda cupy, x: cupy.empty(3) + 1),
    "unwritten, to the host": (Unwritten, lambda cupy, x: cupy.empty(3).get()),
    "output overlaps an input": (Overrun, lambda cupy, x: x.__iadd__(x.T)),
    "product overlaps a factor": (Overrun, lambda cupy, x: cupy.matmul(x, x, out=x)),
    "index out of bounds": (Overrun, lambda cupy, x: operator.setitem(x, cupy.asarray(np.array([2])), 1)),
    "longer than its memory": (Overrun, lambda cupy, x: cupy.ndarray(5, memptr=cupy.cuda.MemoryPool().malloc(16))),
}


@pytest.mark.parametrize(("kind", "misuse"), OF_ARRAYS.values(), ids=OF_ARRAYS)
def test_misuses_of_arrays(kind: type[Misuse], misuse: Callable[[Any, Any], Any], cupy: Any) -> None:
    with caught(kind):
        misuse(cupy, cupy.ones((2, 2)))


def test_an_array_is_used_on_its_own_device(cupy: Any) -> None:
    x = cupy.ones(3)
    with cupy.cuda.Device(1):
        y = cupy.ones(3)
        for misuse in (lambda: x + 1, lambda: operator.setitem(y, Ellipsis, x)):
            with caught(WrongDevice):
                misuse()


@pytest.mark.parametrize("byte", [-1, 24, 530])
def test_writes_outside_a_block_are_found_when_it_is_freed(byte: int, cupy: Any) -> None:
    x = cupy.zeros(3)
    with kept(Overrun):
        ctypes.c_uint8.from_address(x.data.ptr + byte).value = 1
        del x


def test_sums_and_products_of_halves_accumulate_in_float(cupy: Any) -> None:
    x = cupy.asarray(np.full((1, 4096), 0.25, np.float16))
    for total in (x.sum(), (x @ (4 * x).T)[0, 0]):
        assert total.dtype == np.float16 and float(total) == 1024


# streams --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def streams(cupy: Any) -> list[Any]:
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


@pytest.mark.smoke
def test_what_one_stream_uses_is_not_written_by_another(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    with a:
        x = cupy.zeros(3)
    with b, caught(Unordered):
        x.sum()
    b.wait_event(a.record())
    with b:
        y = x.sum()
    with a, caught(Unordered):
        x[...] = 1
    cupy.cuda.Device().synchronize()
    assert float(y) == 0


def test_an_event_that_was_recorded_too_soon_orders_nothing(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    event = a.record()
    with a:
        x = cupy.zeros(3)
    b.wait_event(event)
    with b, caught(Unordered):
        x.sum()
    a.synchronize()


def test_memory_in_use_by_another_stream_is_not_freed(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    for waits in (False, True):
        with a:
            arrays = [cupy.zeros(3)]
        b.wait_event(a.record())
        with b:
            y = arrays[0] + 1
        if waits:
            a.wait_event(b.record())
            arrays.clear()
        else:
            with kept(Unordered):
                arrays.clear()
        b.synchronize()
        del y
    assert active().misuses == []


def test_a_lost_device_refuses_all_calls(cupy: Any) -> None:
    """A lost device is not a misuse by the program."""
    machine, runtime = active(), cupy.cuda.runtime
    x = cupy.zeros(3)
    machine.lose(0, after=1)
    x += 1  # the device's last operation
    for call in (x.get, lambda: cupy.zeros(1 << 20), cupy.cuda.Stream, cupy.cuda.Stream.null.synchronize):
        with pytest.raises(runtime.CUDARuntimeError):
            call()
    with cupy.cuda.Device(1):
        assert float(cupy.zeros(3).sum()) == 0
    assert machine.misuses == []


# graphs ---------------------------------------------------------------------------------------------------------------


NOT_CAPTURED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a copy to the host": lambda cupy, x, stream: x.get(),
    "a synchronization": lambda cupy, x, stream: stream.synchronize(),
    "a wait": lambda cupy, x, stream: stream.wait_event(cupy.cuda.Event()),
    "an allocation": lambda cupy, x, stream: cupy.empty(3),
}


@pytest.mark.parametrize("call", NOT_CAPTURED.values(), ids=NOT_CAPTURED)
def test_calls_that_cannot_be_captured_are_refused(call: Callable[[Any, Any, Any], Any], cupy: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.ones((2, 2))
        stream.begin_capture()
        with caught(InCapture):
            call(cupy, x, stream)
        stream.end_capture()
        call(cupy, x, stream)


def test_a_launch_is_ordered_and_uses_memory_in_use(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    with a:
        arrays = [cupy.zeros(3)]
        a.begin_capture()
        cupy.exp(arrays[0], out=arrays[0])
        graph = a.end_capture()
    with caught(Unordered):
        graph.launch(b)
    a.synchronize()
    graph.launch(b)
    b.synchronize()
    assert arrays[0].get().tolist() == [1] * 3
    arrays.clear()
    with caught(Freed):
        graph.launch(b)


# kernels --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(cupy: Any) -> Any:
    return cupy.RawModule(code=KERNELS, options=("-std=c++17",)).get_function


WRONG: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "a float of Python": (2, lambda cupy: 2.0),
    "a number in another precision": (2, lambda cupy: np.float64(2)),
    "a NumPy array": (0, lambda cupy: np.ones(8, np.float32)),
    "an array in another precision": (0, lambda cupy: cupy.ones(8)),
    "an array with gaps": (0, lambda cupy: cupy.ones(16, np.float32)[::2]),
}


@needs_compiler
@pytest.mark.parametrize(("position", "value"), WRONG.values(), ids=WRONG)
def test_an_argument_must_be_what_a_kernel_takes(
    position: int, value: Callable[[Any], Any], cupy: Any, kernels: Any
) -> None:
    arguments = [cupy.ones(8, np.float32), cupy.empty(8, np.float32), np.float32(2), np.int32(8)]
    kernels("scale")((2,), (4,), arguments)
    assert arguments[1].get().tolist() == [2] * 8
    arguments[position] = value(cupy)
    with caught(BadLaunch):
        kernels("scale")((2,), (4,), arguments)


@needs_compiler
@pytest.mark.parametrize(("start", "stop"), [(-1, 0), (0, 11)])
def test_a_kernel_writes_only_its_arrays(start: int, stop: int, cupy: Any, kernels: Any) -> None:
    whole, part = cupy.zeros(10, np.float32), cupy.zeros(30, np.float32)[10:20]
    for y in (whole, part):
        with caught(Overrun):
            kernels("fill")((1,), (16,), (y, np.int32(start), np.int32(stop)))


@needs_compiler
def test_memory_that_a_kernel_left_alone_stays_unwritten(cupy: Any, kernels: Any) -> None:
    y = cupy.empty(8, np.float32)
    kernels("fill")((1,), (8,), (y, np.int32(0), np.int32(5)))
    assert y[:5].get().tolist() == [1] * 5
    with caught(Unwritten):
        y.sum()


@needs_compiler
def test_a_barrier_that_some_threads_never_reach_is_found(cupy: Any, kernels: Any) -> None:
    with caught(BadLaunch):
        kernels("stuck")((1,), (8,), (cupy.zeros(8, np.float32),))
    x, y = cupy.asarray(np.arange(8, dtype=np.float32)), cupy.empty(8, np.float32)
    kernels("reversed")((1,), (8,), (x, y))  # threads do not carry over to the next kernel
    np.testing.assert_array_equal(y.get(), np.arange(8)[::-1])


@needs_compiler
def test_a_changed_header_is_compiled_again(tmp_path: Path) -> None:
    path, header = tmp_path / "put.cu", tmp_path / "value.cuh"
    path.write_text('#include "value.cuh"\nextern "C" __global__ void put(float* y) { y[0] = VALUE; }')
    for value in (2, 3):
        header.write_text(f"#define VALUE {value}\n")
        host_library.cache_clear()
        y = np.zeros(1, np.float32)
        host_library(path)["put"]((1,), (1,), (y,))
        assert y[0] == value


# pinned memory --------------------------------------------------------------------------------------------------------


def send(cupy: Any, x: Any, host: Any) -> None:
    address = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(x.data.ptr, host.ctypes.data, host.nbytes, 1, address)


def test_pinned_memory_is_not_changed_while_it_is_sent(cupy: Any) -> None:
    hosts = [np.frombuffer(cupy.cuda.alloc_pinned_memory(16), np.float64, 2)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.empty(2)
        hosts[0][...] = 1
        send(cupy, x, hosts[0])
        stream.record().synchronize()
        hosts[0][...] = 2
        send(cupy, x, hosts[0])
        hosts[0][...] = 3
        with caught(Unordered):
            stream.synchronize()
        assert x.get().tolist() == [2, 2]
        send(cupy, x, hosts[0])
        with kept(Unordered):
            hosts.clear()


def test_ordinary_memory_is_not_sent_by_address(cupy: Any) -> None:
    with caught(BadLaunch):
        send(cupy, cupy.empty(3), np.ones(3))


# arithmetic -----------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("arithmetic", [(), ("flushed",)])
def test_subnormal_floats_are_zero_if_they_are_flushed(arithmetic: tuple[str, ...]) -> None:
    with installed(arithmetic=arithmetic):
        import cupy

        x, y = cupy.asarray(np.full(8, 1e-30, np.float32)), cupy.empty(8, np.float32)
        scale = cupy.RawModule(code=KERNELS).get_function("scale")
        scale((1,), (8,), (x, y, np.float32(1e-10), np.int32(8)))
        for found in (y, x * np.float32(1e-10)):
            assert bool((found == 0).all()) == bool(arithmetic)
