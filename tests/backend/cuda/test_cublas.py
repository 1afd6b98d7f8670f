"""Products by cuBLAS on the stand-in: precision, rejected arguments, handles, TF32, and the library that is loaded.

tests/backend/test_operations.py compares products with NumPy.
"""

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda import cublas
from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.cuda.cublas import Cublas, CublasError
from cupynet.core.errors import ConfigError
from tests.standin.machine import active
from tests.standin.planted import together
from tests.support.refusals import refused

pytestmark = pytest.mark.standin
real_library = cublas.library  # the stand-in replaces it


def test_sums_of_halves_accumulate_in_float(cupy: Any) -> None:
    """In half, 1 + 2049 is 2050 too, but 2049 itself would be 2048."""
    a, b = cupy.asarray(np.array([[1, 3]], np.float16)), cupy.asarray(np.array([[1], [683]], np.float16))
    out = cupy.empty((1, 1), np.float16)
    Cublas(cupy).gemm(a, b, out)
    assert out.get().tolist() == [[2050]]


INVALID: dict[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]] = {
    "three axes": lambda a, b, c: (a.reshape(1, 2, 3), b, c),
    "inner sizes": lambda a, b, c: (b, b, c),
    "the result's size": lambda a, b, c: (a, b, c.reshape(4, 2)),
    "two precisions": lambda a, b, c: (a, b.astype(np.float16), c),
    "a narrow result": lambda a, b, c: (a, b, c.astype(np.float16)),
    "integers": lambda a, b, c: (a.astype(np.int32), b.astype(np.int32), c),
    "gaps": lambda a, b, c: (a, b[:, ::2], c.reshape(4, 2)[:2]),
    "columns": lambda a, b, c: (a, b, c.reshape(4, 2).T),
}


@pytest.mark.parametrize("invalid", INVALID.values(), ids=INVALID)
def test_products_of_invalid_operands_are_refused(invalid: Any, cupy: Any) -> None:
    a, b, c = (cupy.zeros(shape, np.float32) for shape in ((2, 3), (3, 4), (2, 4)))
    with pytest.raises(ConfigError):
        Cublas(cupy).gemm(*invalid(a, b, c))


def test_a_cublas_error_names_its_status(cupy: Any) -> None:
    library = cublas.library(12)
    with pytest.raises(CublasError, match="CUBLAS_STATUS_INVALID_VALUE"):
        library.call("cublasSetMathMode", library.handle(0), 1000)


# streams and threads --------------------------------------------------------------------------------------------------


def test_a_worker_takes_over_the_cublas_handle_with_its_stream(cupy: Any) -> None:
    """Until a worker activates its backend, products run on the null stream."""
    backend = CupyBackend("float", 1)
    with cupy.cuda.Device(1):
        x = cupy.ones((2, 2), np.float32)
        backend.matmul(x, x)
    assert backend._cublas is not None
    before = backend._cublas.stream
    backend.synchronize()

    def work() -> list[Any]:
        backend.activate()
        return [backend.to_host(backend.matmul(x, x)).tolist() for _ in range(2)]

    assert together(work) == [[[[2, 2], [2, 2]]] * 2]
    assert [handle.device for handle in active().cublas.handles.values()] == [1]
    assert backend._cublas.stream == backend.stream() != before


def test_cublas_handles_are_used_again_after_their_backend_has_ended(cupy: Any) -> None:
    x = cupy.ones((2, 2), np.float32)
    for _ in range(2):
        backends = [CupyBackend("float") for _ in range(2)]
        for backend in backends:
            backend.matmul(x, x)
        assert len(active().cublas.handles) == 2
        for backend in backends:
            backend._cublas = None


# the backend ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["half", "float"])
def test_strided_operands_of_products_are_copied(dtype: str) -> None:
    backend, host = CupyBackend(dtype), np.arange(12.0).reshape(3, 4)
    x = backend.asarray(host, backend.policy.storage)
    found = backend.matmul(x[:, ::2], x[:, 1::2], transpose_b=True).get()
    np.testing.assert_array_equal(found, host[:, ::2] @ host[:, 1::2].T)
    assert backend.workspace.on_loan == 0


def test_a_gradient_is_added_without_a_copy_of_the_activations() -> None:
    backend = CupyBackend("half")
    x, dy = (backend.asarray(np.ones((300, size)), np.float16) for size in (20, 30))
    weight, grad = backend.asarray(np.ones((20, 30)), np.float16), backend.asarray(np.ones((20, 30)), np.float32)
    backend.dense_backward(dy, x, weight, grad, None, need_dx=False)
    assert backend.to_host(grad).tolist() == [[301.0] * 30] * 20
    assert backend.workspace.allocated_bytes == 0


@pytest.mark.parametrize(("tf32", "factor"), [(False, 1 + 2.0**-11), (True, 1.0)])
def test_tf32_rounds_products_only_if_it_is_turned_on(tf32: bool, factor: float) -> None:
    """1 + 2**-11 has 11 bits of mantissa, one more than TF32. Replicas keep the choice."""
    options = create_backend("cupy", tf32=tf32).options
    backend = create_backend("cupy", "float", 0, **options)
    x = backend.asarray(np.full((2, 2), 1 + 2.0**-11, np.float32))
    found = backend.to_host(backend.matmul(x, x))
    np.testing.assert_array_equal(found, np.full((2, 2), 2 * factor**2, np.float32))


@pytest.mark.parametrize(("name", "dtype"), [("cupy", "half"), ("numpy", "float")])
def test_tf32_is_refused_except_for_float_on_gpus(name: str, dtype: str) -> None:
    with refused("tf32"):
        create_backend(name, dtype, tf32=True)
    assert not create_backend(name, dtype, tf32=False).options.get("tf32")


# the library ----------------------------------------------------------------------------------------------------------


LIBRARIES: dict[str, tuple[str | Exception, str]] = {  # the wheels' library, or why there is none; and the loaded path
    "wheel": ("/wheel/libcublas.so", "/wheel/libcublas.so"),
    "no pathfinder": (ImportError("no pathfinder"), "libcublas.so.13"),
    "no wheel": (RuntimeError("no wheel"), "libcublas.so.13"),
}


@pytest.mark.parametrize(("wheel", "path"), LIBRARIES.values(), ids=LIBRARIES)
def test_cublas_is_loaded_from_the_wheels_of_nvidia_or_from_the_system(
    wheel: str | Exception, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Mock(side_effect=[SimpleNamespace(abs_path=wheel) if isinstance(wheel, str) else wheel] * 2)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", SimpleNamespace(load_nvidia_dynamic_lib=find))
    monkeypatch.setattr(cublas, "Library", lambda opened: opened)
    monkeypatch.setattr(ctypes, "CDLL", lambda opened: opened)
    opened: object = real_library.__wrapped__(13)
    assert opened == path
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("cannot open shared object file")))
    with pytest.raises(ConfigError, match="cannot open"):
        real_library.__wrapped__(13)
