"""The stand-in of libcublas: results, and misuses that cuBLAS cannot detect."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.standin import Misuse
from tests.standin.cublas import GIVES, TAKES
from tests.standin.errors import BadLaunch, Overrun, Unordered, Unwritten
from tests.standin.machine import active
from tests.standin.planted import caught

pytestmark = pytest.mark.standin
OK = 0
HALF, FLOAT = 2, 0  # types
IN_FLOAT, IN_TF32 = 68, 77
SIZE = 1 << 16  # bytes in a workspace


def number(value: float) -> Any:
    return ctypes.byref(ctypes.c_float(value))


@pytest.fixture
def library(cupy: Any) -> Any:
    for name, takes in TAKES.items():
        function = getattr(active().cublas, name)
        function.argtypes, function.restype = takes, GIVES.get(name, ctypes.c_int)
    return active().cublas


def create(library: Any) -> int:
    made = ctypes.c_void_p()
    assert library.cublasCreate_v2(ctypes.byref(made)) == OK
    assert made.value is not None
    return made.value


class Product:
    """A valid call: C (2, 4) = A (2, 3) B (3, 4), all column-major."""

    def __init__(self, library: Any, dtype: str = "float32", stream: Any = None) -> None:
        import cupy

        self.library, self.workspace = library, cupy.empty(SIZE, np.uint8)
        self.handle = create(library)
        library.cublasSetStream_v2(self.handle, 0 if stream is None else stream.ptr)
        library.cublasSetWorkspace_v2(self.handle, self.workspace.data.ptr, SIZE)
        self.a, self.b = cupy.ones((3, 2), dtype), cupy.ones((4, 3), dtype)
        self.c = cupy.zeros((4, 2), dtype)
        kind = HALF if dtype == "float16" else FLOAT
        self.arguments: dict[str, Any] = {"handle": self.handle, "turn_a": 0, "turn_b": 0, "m": 2, "n": 4, "k": 3}
        self.arguments |= {"alpha": number(1), "a": self.a.data.ptr, "type_a": kind, "lda": 2}
        self.arguments |= {"b": self.b.data.ptr, "type_b": kind, "ldb": 3}
        self.arguments |= {"beta": number(0), "c": self.c.data.ptr, "type_c": kind, "ldc": 2}
        self.arguments |= {"compute": IN_FLOAT, "algorithm": -1}

    def __call__(self, **changes: Any) -> int:
        status: int = self.library.cublasGemmEx(*(self.arguments | changes).values())
        return status


def test_matrices_are_read_by_columns(library: Any) -> None:
    product, rng = Product(library), np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3)).astype("f"), rng.normal(size=(3, 4)).astype("f")
    product.a.set(np.ascontiguousarray(a.T))
    product.b.set(np.ascontiguousarray(b.T))
    assert product() == OK
    np.testing.assert_allclose(product.c.get().T, a @ b, rtol=1e-6)
    assert product(m=1, alpha=number(3)) == OK  # only the first row, so the columns have gaps
    np.testing.assert_allclose(product.c.get().T, [[3], [1]] * (a @ b), rtol=1e-6)
    product.a.set(a.reshape(3, 2))
    assert product(turn_a=1, lda=3) == OK
    np.testing.assert_allclose(product.c.get().T, a @ b, rtol=1e-6)


@pytest.mark.parametrize(("mode", "expected"), [(0, 2048), (16, 2050)])
def test_half_sums_accumulate_in_half_by_default(mode: int, expected: float, library: Any) -> None:
    product = Product(library, "float16")
    product.a.set(np.array([[1, 1], [3, 3], [0, 0]], np.float16))
    product.b.set(np.array([[1, 683, 0]] * 4, np.float16))
    assert library.cublasSetMathMode(product.handle, mode) == OK
    assert product() == OK and float(product.c[0, 0]) == expected


WRONG: dict[str, tuple[type[Misuse], Callable[[Product], Any]]] = {
    "beyond the memory": (Overrun, lambda product: product(k=4, ldb=4)),
    "the output is an input": (Overrun, lambda product: product(c=product.a.data.ptr, n=3)),
    "another precision": (BadLaunch, lambda product: product(type_a=HALF, type_b=HALF)),
    "no memory": (Misuse, lambda product: product(a=0)),
    "scalars in double": (BadLaunch, lambda product: product(alpha=ctypes.byref(ctypes.c_double(1)))),
    "a size of 33 bits": (BadLaunch, lambda product: product(m=1 << 32)),
}


@pytest.mark.parametrize(("kind", "call"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_found(kind: type[Misuse], call: Callable[[Product], Any], library: Any) -> None:
    with caught(kind):
        call(Product(library))


def test_operands_must_have_been_written(library: Any, cupy: Any) -> None:
    product, blank = Product(library), cupy.empty((4, 2), np.float32)
    with caught(Unwritten):
        product(a=blank.data.ptr)
    with caught(Unwritten):
        product(c=blank.data.ptr, beta=number(1))
    assert product(c=blank.data.ptr) == OK and float(blank.sum()) == 24


def test_a_workspace_is_set_after_the_stream(library: Any, cupy: Any) -> None:
    product = Product(library)
    library.cublasSetStream_v2(product.handle, cupy.cuda.Stream(non_blocking=True).ptr)
    with caught(Misuse):
        product()
    with caught(Overrun):
        library.cublasSetWorkspace_v2(product.handle, product.workspace.data.ptr, SIZE + 1)


def test_two_streams_do_not_share_a_workspace(library: Any, cupy: Any) -> None:
    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    first, second = (Product(library, stream=stream) for stream in (a, b))
    library.cublasSetWorkspace_v2(second.handle, first.workspace.data.ptr, SIZE)
    cupy.cuda.Device().synchronize()
    first()
    with caught(Unordered):
        second()
    cupy.cuda.Device().synchronize()
