"""The stand-in finds each misuse of CuPy, and accepts correct use."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.standin import Misuse
from tests.standin.errors import BadLaunch, Foreign, Freed, Overrun, Unordered, Unwritten, WrongDevice
from tests.standin.host import compiler
from tests.standin.machine import active
from tests.support import warm
from tests.support.commands import environment

pytestmark = pytest.mark.standin
Call = Callable[[Any, Any], Any]  # called with the module cupy and an array of ones (2, 2)

STUCK = """
extern "C" __global__ void stuck(float* y) {
  if (threadIdx.x == 0) return;
  __syncthreads();
  y[threadIdx.x] = 0;
}
"""


@contextmanager
def caught(kind: type[Misuse]) -> Iterator[None]:
    """Expect a misuse, and clear its record."""
    with pytest.raises(kind):
        yield
    active().misuses.clear()


def on_device_1(cupy: Any) -> Any:
    with cupy.cuda.Device(1):
        return cupy.ones((2, 2))


def send(cupy: Any, x: Any, host: Any) -> None:
    address = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(x.data.ptr, host.ctypes.data, host.nbytes, 1, address)


HOST = np.ones((2, 2))
OF_ARRAYS: dict[str, tuple[type[Misuse], Call]] = {
    "operand of NumPy": (Foreign, lambda cupy, x: x + HOST),
    "assigned from NumPy": (Foreign, lambda cupy, x: operator.setitem(x, Ellipsis, HOST)),
    "converted to NumPy": (Foreign, lambda cupy, x: np.asarray(x)),
    "unwritten operand": (Unwritten, lambda cupy, x: cupy.empty(3) + 1),
    "output overlaps an input": (Overrun, lambda cupy, x: x.__iadd__(x.T)),
    "product overlaps a factor": (Overrun, lambda cupy, x: cupy.matmul(x, x, out=x)),
    "index out of bounds": (Overrun, lambda cupy, x: operator.setitem(x, cupy.asarray(np.array([2])), 1)),
    "longer than its memory": (Overrun, lambda cupy, x: cupy.ndarray(5, memptr=cupy.cuda.alloc(16))),
    "operand on another device": (WrongDevice, lambda cupy, x: x + on_device_1(cupy)),
    "sent from ordinary memory": (BadLaunch, lambda cupy, x: send(cupy, x, HOST)),
}


@pytest.mark.parametrize(("kind", "misuse"), OF_ARRAYS.values(), ids=OF_ARRAYS)
def test_a_misuse_of_arrays_is_found(kind: type[Misuse], misuse: Call, cupy: Any) -> None:
    with caught(kind):
        misuse(cupy, cupy.ones((2, 2)))


# streams and graphs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def streams(cupy: Any) -> list[Any]:
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


@pytest.mark.smoke
def test_two_streams_that_use_the_same_memory_without_an_event_are_found(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    too_soon = a.record()
    with a:
        x = cupy.zeros(3)
    b.wait_event(too_soon)
    with b, caught(Unordered):
        x.sum()
    b.wait_event(a.record())
    with b:
        y = x.sum()
    with a, caught(Unordered):
        x[...] = 1
    cupy.cuda.Device().synchronize()
    assert float(y) == 0


def test_a_graph_launched_too_early_or_after_its_memory_was_freed_is_found(cupy: Any, streams: list[Any]) -> None:
    a, b = streams
    with a:
        x = cupy.zeros(3)
        a.begin_capture()
        cupy.exp(x, out=x)
        graph = a.end_capture()
    with caught(Unordered):
        graph.launch(b)
    a.synchronize()
    graph.launch(b)
    b.synchronize()
    assert x.get().tolist() == [1] * 3
    del x
    with caught(Freed):
        graph.launch(b)


# kernels and commands -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_barrier_that_some_threads_never_reach_is_found(cupy: Any) -> None:
    stuck = cupy.RawModule(code=STUCK).get_function("stuck")
    with caught(BadLaunch):
        stuck((1,), (8,), (cupy.zeros(8, np.float32),))


def test_a_command_on_the_standin_that_swallows_a_misuse_exits_with_70(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(
        "import cupy\nx = cupy.empty(3)\ntry:\n    x + 1\nexcept Exception:\n    print('nothing happened')\n"
    )
    done = warm.command("tests.standin", ["--devices", "1", "-m", "careless"], tmp_path, environment(), 100)
    assert done.returncode == 70 and "nothing happened" in done.stdout
    assert "Unwritten" in done.stderr and "careless.py:4" in done.stderr
