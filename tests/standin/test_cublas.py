"""The stand-in of libcublas: the precision of sums, and misuses that cuBLAS cannot detect."""

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
HALF, FLOAT = 2, 0  # types
SIZE = 1 << 16  # bytes in a workspace


def number(value: float) -> Any:
    return ctypes.byref(ctypes.c_float(value))


class Product:
    """A valid call: C (2, 4) = A (2, 3) B (3, 4), all column-major."""

    def __init__(self, cupy: Any, dtype: str = "float32", stream: int = 0) -> None:
        self.library, self.workspace, made = active().cublas, cupy.empty(SIZE, np.uint8), ctypes.c_void_p()
        for name, takes in TAKES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = takes, GIVES.get(name, ctypes.c_int)
        self.library.cublasCreate_v2(ctypes.byref(made))
        self.handle = made.value
        self.library.cublasSetStream_v2(self.handle, stream)
        self.library.cublasSetWorkspace_v2(self.handle, self.workspace.data.ptr, SIZE)
        self.a, self.b, self.c = (cupy.ones(shape, dtype) for shape in ((3, 2), (4, 3), (4, 2)))
        self.blank = cupy.empty((4, 2), np.float32)
        kind = HALF if dtype == "float16" else FLOAT
        self.arguments: dict[str, Any] = {"handle": self.handle, "turn_a": 0, "turn_b": 0, "m": 2, "n": 4, "k": 3}
        self.arguments |= {"alpha": number(1), "a": self.a.data.ptr, "type_a": kind, "lda": 2}
        self.arguments |= {"b": self.b.data.ptr, "type_b": kind, "ldb": 3}
        self.arguments |= {"beta": number(0), "c": self.c.data.ptr, "type_c": kind, "ldc": 2}
        self.arguments |= {"compute": 68, "algorithm": -1}

    def __call__(self, **changes: Any) -> int:
        status: int = self.library.cublasGemmEx(*(self.arguments | changes).values())
        return status


@pytest.mark.parametrize(("mode", "expected"), [(0, 2048), (16, 2050)])
def test_half_sums_accumulate_in_half_by_default(mode: int, expected: float, cupy: Any) -> None:
    product = Product(cupy, "float16")
    product.a.set(np.array([[1, 1], [3, 3], [0, 0]], np.float16))
    product.b.set(np.array([[1, 683, 0]] * 4, np.float16))
    product.library.cublasSetMathMode(product.handle, mode)
    product()
    assert float(product.c[0, 0]) == expected


def after_another_stream(product: Product) -> None:
    product.library.cublasSetStream_v2(product.handle, 0)
    product()


def set_workspace(product: Product, size: int) -> None:
    product.library.cublasSetWorkspace_v2(product.handle, product.workspace.data.ptr, size)


WRONG: dict[str, tuple[type[Misuse], Callable[[Product], Any]]] = {
    "beyond the memory": (Overrun, lambda product: product(k=4, ldb=4)),
    "the output is an input": (Overrun, lambda product: product(c=product.a.data.ptr, n=3)),
    "an unwritten factor": (Unwritten, lambda product: product(a=product.blank.data.ptr)),
    "an unwritten sum": (Unwritten, lambda product: product(c=product.blank.data.ptr, beta=number(1))),
    "another precision": (BadLaunch, lambda product: product(type_a=HALF, type_b=HALF)),
    "no memory": (Misuse, lambda product: product(a=0)),
    "scalars in double": (BadLaunch, lambda product: product(alpha=ctypes.byref(ctypes.c_double(1)))),
    "a size of 33 bits": (BadLaunch, lambda product: product(m=1 << 32)),
    "no workspace after the stream": (Misuse, after_another_stream),
    "a workspace beyond its memory": (Overrun, lambda product: set_workspace(product, SIZE + 1)),
}


@pytest.mark.parametrize(("kind", "call"), WRONG.values(), ids=WRONG)
def test_wrong_calls_are_found(kind: type[Misuse], call: Callable[[Product], Any], cupy: Any) -> None:
    with caught(kind):
        call(Product(cupy))


def test_two_streams_do_not_share_a_workspace(cupy: Any) -> None:
    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    first, second = (Product(cupy, stream=stream.ptr) for stream in (a, b))
    second.workspace = first.workspace
    set_workspace(second, SIZE)
    cupy.cuda.Device().synchronize()
    first()
    with caught(Unordered):
        second()
    cupy.cuda.Device().synchronize()
