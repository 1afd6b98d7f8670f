"""The stand-in of libcublas: results, statuses, and misuses that cuBLAS cannot see."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.standin import Misuse
from tests.standin.cublas import GIVES, TAKES
from tests.standin.errors import BadLaunch, Freed, InCapture, Overrun, Unordered, Unwritten, WrongDevice
from tests.standin.machine import active
from tests.standin.planted import caught, together

pytestmark = pytest.mark.standin
OK, NOT_INITIALIZED, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 7, 15
HALF, FLOAT, DOUBLE = 2, 0, 1  # types
IN_FLOAT, IN_DOUBLE, IN_TF32 = 68, 70, 77
SIZE = 1 << 16  # bytes of a workspace
ONE, NONE = ctypes.c_float(1), ctypes.c_float(0)


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture
def library() -> Any:
    """Its functions, with the parameters that they have."""
    for name, takes in TAKES.items():
        function = getattr(active().cublas, name)
        function.argtypes, function.restype = takes, GIVES.get(name, ctypes.c_int)
    return active().cublas


def handle(library: Any, stream: int = 0, workspace: Any = None) -> int:
    """On the device that is current."""
    made = ctypes.c_void_p()
    assert library.cublasCreate_v2(ctypes.byref(made)) == OK
    assert made.value is not None
    if workspace is not None:
        assert library.cublasSetStream_v2(made.value, stream) == OK
        assert library.cublasSetWorkspace_v2(made.value, workspace.data.ptr, workspace.nbytes) == OK
    return made.value


class Product:
    """A right call: C (2, 4) = A (2, 3) B (3, 4), all of them in columns."""

    def __init__(self, library: Any, cupy: Any, dtype: str = "float32", stream: Any = None) -> None:
        self.library, self.workspace = library, cupy.empty(SIZE, np.uint8)
        self.handle = handle(library, 0 if stream is None else stream.ptr, self.workspace)
        self.a, self.b = cupy.ones((3, 2), dtype), cupy.ones((4, 3), dtype)
        self.c = cupy.zeros((4, 2), dtype)
        kind = {"float16": HALF, "float32": FLOAT}[dtype]
        self.arguments = {
            "handle": self.handle, "turn_a": 0, "turn_b": 0, "m": 2, "n": 4, "k": 3, "alpha": ctypes.byref(ONE),
            "a": self.a.data.ptr, "type_a": kind, "lda": 2, "b": self.b.data.ptr, "type_b": kind, "ldb": 3,
            "beta": ctypes.byref(NONE), "c": self.c.data.ptr, "type_c": kind, "ldc": 2, "compute": IN_FLOAT,
            "algorithm": -1,
        }  # fmt: skip

    def __call__(self, **changes: Any) -> int:
        status: int = self.library.cublasGemmEx(*(self.arguments | changes).values())
        return status


def test_matrices_are_read_by_columns(library: Any, cupy: Any) -> None:
    product, rng = Product(library, cupy), np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3)).astype("f"), rng.normal(size=(3, 4)).astype("f")
    product.a.set(np.ascontiguousarray(a.T))
    product.b.set(np.ascontiguousarray(b.T))
    assert product() == OK
    np.testing.assert_allclose(product.c.get().T, a @ b, rtol=1e-6)
    product.a.set(a.reshape(3, 2))
    assert product(turn_a=1, lda=3, beta=ctypes.byref(ONE)) == OK
    np.testing.assert_allclose(product.c.get().T, 2 * (a @ b), rtol=1e-6)
    product.a.set(np.ascontiguousarray(a.T))
    assert product(m=1, alpha=ctypes.byref(ctypes.c_float(3))) == OK  # the first row alone, of columns with gaps
    np.testing.assert_allclose(product.c.get().T, np.array([[3.0], [2.0]]) * (a @ b), rtol=1e-6)


def test_tf32_rounds_its_inputs(library: Any, cupy: Any) -> None:
    product = Product(library, cupy)
    for number, rounded in ((1 + 2**-10, 1 + 2**-10), (1 + 2**-11, 1.0), (1 + 3 * 2**-11, 1 + 2**-9), (np.inf, np.inf)):
        product.a.fill(number)
        for compute, expected in ((IN_FLOAT, number), (IN_TF32, rounded)):
            assert product(compute=compute) == OK
            assert float(product.c[0, 0]) == pytest.approx(3 * expected, rel=1e-6)


def test_half_sums_accumulate_in_half_by_default(library: Any, cupy: Any) -> None:
    product = Product(library, cupy, "float16")
    product.a.set(np.array([[1, 1], [3, 3], [0, 0]], np.float16))
    product.b.set(np.array([[1, 683, 0]] * 4, np.float16))
    for mode, expected in ((0, 2048), (16, 2050)):
        assert library.cublasSetMathMode(product.handle, mode) == OK
        assert product() == OK and float(product.c[0, 0]) == expected


PLANTED: dict[str, tuple[type[Misuse], Callable[[Product], Any]]] = {
    "a part of the memory": (Overrun, lambda p: p(k=4, lda=2, ldb=4)),
    "the output is an input": (Overrun, lambda p: p(c=p.a.data.ptr, n=3)),
    "another precision": (BadLaunch, lambda p: p(type_a=HALF, type_b=HALF)),
    "an odd address": (BadLaunch, lambda p: p(a=p.a.data.ptr + 2, m=1)),
    "no memory": (Misuse, lambda p: p(a=0)),
    "scalars in double": (BadLaunch, lambda p: p(alpha=ctypes.byref(ctypes.c_double(1)))),
    "a size of 33 bits": (BadLaunch, lambda p: p(m=1 << 32)),
}


@pytest.mark.parametrize(("kind", "wrong"), PLANTED.values(), ids=PLANTED)
def test_wrong_arguments_are_found(kind: type[Misuse], wrong: Any, library: Any, cupy: Any) -> None:
    product = Product(library, cupy)
    with caught(kind):
        wrong(product)
    assert product() == OK


def test_operands_must_have_been_written(library: Any, cupy: Any) -> None:
    product, blank = Product(library, cupy), cupy.empty((4, 2), np.float32)
    for reads in ({"a": blank.data.ptr}, {"c": blank.data.ptr, "beta": ctypes.byref(ONE)}):
        with caught(Unwritten):
            product(**reads)
    assert product(c=blank.data.ptr) == OK and float(blank.sum()) == 24


# handles --------------------------------------------------------------------------------------------------------------


def test_the_workspace_comes_after_the_stream(library: Any, cupy: Any) -> None:
    product, stream = Product(library, cupy), cupy.cuda.Stream(non_blocking=True)
    library.cublasSetStream_v2(product.handle, stream.ptr)
    with caught(Misuse):
        product()
    own = handle(library)
    with caught(Misuse):
        product(handle=own)
    with caught(Misuse):
        library.cublasSetWorkspace_v2(own, product.workspace.data.ptr, 1024)
    with caught(Overrun):
        library.cublasSetWorkspace_v2(own, product.workspace.data.ptr, SIZE + 1)


def test_a_handle_is_of_one_device(library: Any, cupy: Any) -> None:
    product = Product(library, cupy)
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        with caught(WrongDevice):
            product()
        other = Product(library, cupy)
        with caught(WrongDevice):
            other(a=product.a.data.ptr)
    with caught(WrongDevice):
        library.cublasSetStream_v2(product.handle, stream.ptr)
    with caught(Misuse):
        library.cublasSetStream_v2(product.handle, 17)


def test_a_handle_is_not_for_two_threads_at_once(library: Any, cupy: Any) -> None:
    product, machine, entered = Product(library, cupy), active(), threading.Event()
    ended: list[Any] = []

    def first() -> None:
        entered.set()
        ended.append(product())  # waits for the machine with the handle in its hand

    with machine.lock:
        thread = threading.Thread(target=first)
        thread.start()
        entered.wait(10)
        while not machine.cublas.handles[product.handle].turn.locked():
            pass
        with caught(Misuse):
            product()
    thread.join(10)
    assert ended == [OK] and product() == OK
    assert together(product) == [OK]  # one after the other they may


def test_streams_keep_their_order(library: Any, cupy: Any) -> None:
    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with a:
        product = Product(library, cupy, stream=a)
        assert product() == OK
    with caught(Unordered), b:
        product.c.sum()
    other = handle(library, b.ptr, product.workspace)
    with caught(Unordered):
        product(handle=other)
    b.wait_event(a.record())
    with b:
        second = cupy.empty(SIZE, np.uint8)
        library.cublasSetWorkspace_v2(other, second.data.ptr, SIZE)
        assert product(handle=other) == OK
    with caught(Unordered):
        product()  # the first stream does not wait for the second
    a.wait_event(b.record())
    library.cublasSetWorkspace_v2(other, product.workspace.data.ptr, SIZE)
    target, third = cupy.zeros((4, 2), np.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    assert product(handle=other, c=target.data.ptr) == OK  # one workspace, and the other stream comes without waiting
    with caught(Unordered):
        product()
    cupy.cuda.Device().synchronize()
    del third


def test_a_product_is_captured_by_its_stream(library: Any, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        product = Product(library, cupy, stream=stream)
        stream.begin_capture()
        assert product(beta=ctypes.byref(ONE)) == OK
        graph = stream.end_capture()
        assert float(product.c.sum()) == 0
        graph.launch()
        graph.launch()
        assert float(product.c.sum()) == 2 * 24
        del product.workspace
        with caught(Freed):
            graph.launch()


def test_a_handle_is_not_made_while_a_stream_captures(library: Any, cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    with caught(InCapture):
        handle(library)  # on another stream, too
    with cupy.cuda.Device(1):
        handle(library)
    stream.end_capture()
    handle(library)
