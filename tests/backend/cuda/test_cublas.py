"""Products by cuBLAS, on the stand-in: compared with NumPy, refused, captured in graphs."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda import cublas
from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.cuda.cublas import Cublas, CublasError
from cupynet.backend.policy import stored_dtype
from cupynet.core.errors import ConfigError
from tests.standin.machine import active
from tests.standin.planted import together
from tests.support.backends import NO_BFLOAT16
from tests.support.pairwise import pairwise
from tests.support.refusals import refused

standin = pytest.mark.standin
KINDS = [("float16", "float16"), ("float16", "float32"), ("float32", "float32"), ("float64", "float64")]
KINDS += [] if NO_BFLOAT16 else [("bfloat16", "bfloat16"), ("bfloat16", "float32")]
real_library = cublas.library  # the stand-in puts its own in its place
CLOSE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, "float64": 1e-12}


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def matrix(shape: tuple[int, int], dtype: str, seed: int, turned: bool = False) -> tuple[Any, Any]:
    """A matrix on the device, and in double. turned: a transposed view."""
    import cupy

    host = np.random.default_rng(seed).normal(size=shape).astype(stored_dtype(dtype))
    there = cupy.asarray(np.ascontiguousarray(host.T)).T if turned else cupy.asarray(host)
    return there, host.astype(np.float64)


@standin
@pairwise(
    kind=KINDS,
    shape=((4, 6, 8), (1, 1, 1), (7, 3, 5), (1, 9, 2), (5, 1, 3), (65, 33, 1)),
    left=("as it is", "transposed"),
    right=("as it is", "transposed"),
)
def test_products_are_those_of_numpy(
    kind: tuple[str, str], shape: tuple[int, int, int], left: str, right: str, cupy: Any
) -> None:
    (factor, result), (m, k, n), own = kind, shape, Cublas(cupy)
    a, exact_a = matrix((m, k), factor, 1, left == "transposed")
    b, exact_b = matrix((k, n), factor, 2, right == "transposed")
    out = cupy.empty((m, n), stored_dtype(result))  # of arbitrary content, NaN among others
    own.gemm(a, b, out)
    product, close = exact_a @ exact_b, CLOSE[result]
    np.testing.assert_allclose(out.get().astype(np.float64), product, rtol=close, atol=close)
    own.gemm(a, b, out, beta=-2.0)
    np.testing.assert_allclose(out.get().astype(np.float64), -product, rtol=3 * close, atol=3 * close)


@standin
def test_a_result_in_float_is_not_rounded_to_half(cupy: Any) -> None:
    ones, many = cupy.asarray(np.ones((1, 2049), np.float16)), cupy.asarray(np.ones((2049, 1), np.float16))
    out = cupy.asarray(np.full((1, 1), 0.5, np.float32))
    Cublas(cupy).gemm(ones, many, out, beta=1.0)
    assert out.get().tolist() == [[2049.5]]  # half knows 2048 and 2050


@standin
def test_sums_of_halves_are_never_made_in_half(cupy: Any) -> None:
    """1 + 2049 is 2050 in half too, but 2049 alone would be 2048 there."""
    a, b = cupy.asarray(np.array([[1, 3]], np.float16)), cupy.asarray(np.array([[1], [683]], np.float16))
    out = cupy.empty((1, 1), np.float16)
    Cublas(cupy).gemm(a, b, out)
    assert float(out[0, 0]) == 2050


REFUSALS: dict[str, Any] = {
    "three axes": lambda cp, a, b, c: (a.reshape(1, 2, 3), b, c),
    "inner sizes": lambda cp, a, b, c: (b, b, c),
    "the result's rows": lambda cp, a, b, c: (a, b, cp.zeros((3, 4), "f")),
    "the result transposed": lambda cp, a, b, c: (a, b, cp.zeros((4, 2), "f")),
    "two precisions": lambda cp, a, b, c: (a, b.astype(np.float16), c),
    "a narrow result": lambda cp, a, b, c: (a, b, c.astype(np.float16)),
    "a wide result": lambda cp, a, b, c: (a, b, c.astype(np.float64)),
    "integers": lambda cp, a, b, c: (a.astype(np.int32), b.astype(np.int32), c),
    "gaps": lambda cp, a, b, c: (cp.zeros((2, 6), "f")[:, ::2], b, c),
    "rows with gaps": lambda cp, a, b, c: (a, cp.zeros((3, 5), "f")[:, :4], c),
    "columns": lambda cp, a, b, c: (a, b, cp.zeros((4, 2), "f").T),
}


@standin
@pytest.mark.parametrize("wrong", REFUSALS.values(), ids=REFUSALS)
def test_invalid_operands_are_refused(wrong: Any, cupy: Any) -> None:
    a, b, c = cupy.zeros((2, 3), np.float32), cupy.zeros((3, 4), np.float32), cupy.zeros((2, 4), np.float32)
    own = Cublas(cupy)
    own.gemm(a, b, c)
    with pytest.raises(ConfigError):
        own.gemm(*wrong(cupy, a, b, c))


@standin
def test_a_status_has_its_name(cupy: Any) -> None:
    library = cublas.library(12)
    with pytest.raises(CublasError, match="CUBLAS_STATUS_INVALID_VALUE"):
        library.call("cublasSetMathMode", library.handle(0), 1000)


# graphs, streams, threads ---------------------------------------------------------------------------------------------


@standin
@pytest.mark.parametrize("dtype", ["half", "float", "double"])
def test_a_recorded_product_is_replayed(dtype: str, cupy: Any) -> None:
    """Into the gradient, and into a result that is overwritten."""

    def work() -> list[Any]:
        backend = CupyBackend(dtype)
        backend.activate()
        stored, wide = backend.policy.storage, backend.policy.accumulate
        x = backend.asarray(np.array([[1, 2], [3, 4]]), stored)
        grad, square = backend.asarray(np.zeros((2, 2)), wide), backend.asarray(np.zeros((2, 2)), stored)
        backend._gemm(x, x, square)  # before: what allocates
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        backend._add_product(grad, x, x)
        backend._gemm(x, x.T, square)
        graph = stream.end_capture()
        results = grad, square
        found = [[backend.to_host(each).tolist() for each in results]]
        graph.launch()
        x += x
        graph.launch()
        return [*found, [backend.to_host(each).tolist() for each in results]]

    (found,) = together(work)
    assert found[0] == [[[0, 0], [0, 0]], [[7, 10], [15, 22]]]
    assert found[1] == [[[50, 70], [70, 100]], [[20, 44], [44, 100]]]


@standin
def test_each_stream_has_its_workspace_and_a_handle_is_taken_over(cupy: Any) -> None:
    """Before a worker has activated it a backend multiplies on the null stream, and after that on the worker's."""
    backend = CupyBackend("float", 1)
    with cupy.cuda.Device(1):
        x = cupy.ones((2, 2), np.float32)
        expected = backend.matmul(x, x).get()
    made = active().cublas.handles
    assert [handle.device for handle in made.values()] == [1] and backend._cublas is not None
    before = backend._cublas.stream

    def work() -> None:
        backend.activate()
        for _ in range(2):
            np.testing.assert_array_equal(backend.to_host(backend.matmul(x, x)), expected)

    backend.synchronize()
    assert together(work) == [None]
    assert len(made) == 1 and backend._cublas.stream == backend.stream() != before
    other = CupyBackend("float", 1)
    backend.synchronize()
    with cupy.cuda.Device(1):
        other.matmul(x, x)
    assert len(made) == 2  # both live
    backend._cublas = other._cublas = None
    again = [CupyBackend("float", 1) for _ in range(2)]
    with cupy.cuda.Device(1):
        for each in again:
            each.matmul(x, x)
        assert len(made) == 2
    CupyBackend("float", 0).matmul(cupy.ones((2, 2), "f"), cupy.ones((2, 2), "f"))
    assert [handle.device for handle in made.values()] == [1, 1, 0]


@standin
def test_products_from_any_thread_use_the_workers_device_and_stream(cupy: Any) -> None:
    backend = CupyBackend("float", 1)

    def work() -> Any:
        backend.activate()
        return backend.asarray(np.ones((2, 2)), np.float32)

    (x,) = together(work)
    assert together(lambda: backend.to_host(backend.matmul(x, x)).tolist()) == [[[2, 2], [2, 2]]]
    (handle,) = active().cublas.handles.values()
    assert handle.device == 1 and handle.line.number == backend.stream() != 0


@standin
@pytest.mark.parametrize(
    ("capability", "size"), [("75", 4 << 20), ("89", 4 << 20), ("90", 32 << 20), ("100", 32 << 20)]
)
def test_the_workspace_is_as_large_as_the_architecture_wants(
    capability: str, size: int, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cupy.cuda.Device, "compute_capability", capability)
    before = cupy.get_default_memory_pool().used_bytes()
    own = Cublas(cupy)
    assert cupy.get_default_memory_pool().used_bytes() - before == size
    del own


# the backend ----------------------------------------------------------------------------------------------------------


@standin
@pytest.mark.parametrize("dtype", ["half", "float"])
def test_strided_operands_are_copied(dtype: str, cupy: Any) -> None:
    backend = CupyBackend(dtype)
    host = np.arange(12.0).reshape(3, 4)
    x = backend.asarray(host, backend.policy.storage)
    found = backend.matmul(x[:, ::2], x[:, 1::2], transpose_b=True)
    np.testing.assert_array_equal(found.get(), host[:, ::2] @ host[:, 1::2].T)
    del found
    assert backend.workspace.on_loan == 0


@standin
def test_a_gradient_is_added_without_a_copy_of_the_activations() -> None:
    backend = CupyBackend("half")
    x, dy = (backend.asarray(np.ones((300, size)), np.float16) for size in (20, 30))
    weight, grad = backend.asarray(np.ones((20, 30)), np.float16), backend.asarray(np.ones((20, 30)), np.float32)
    backend.dense_backward(dy, x, weight, grad, None, need_dx=False)
    assert backend.to_host(grad).tolist() == [[301.0] * 30] * 20
    assert backend.workspace.allocated_bytes == 0


@standin
def test_tf32_is_a_choice(cupy: Any) -> None:
    """1 + 2**-11 has 11 bits behind the point: one more than TF32."""
    host = np.full((2, 2), 1 + 2.0**-11, np.float32)
    found = {}
    for tf32 in (False, True):
        backend = create_backend("cupy", tf32=tf32)
        other = create_backend(backend.name, "float", 0, **backend.options)
        x = other.asarray(host)
        found[tf32] = other.to_host(other.matmul(x, x)).tolist()
    np.testing.assert_array_equal(found[False], host @ host)
    np.testing.assert_array_equal(found[True], [[2, 2]] * 2)


@standin
@pytest.mark.parametrize("dtype", ["half", "double"])
def test_tf32_is_for_floats(dtype: str) -> None:
    with refused("tf32", "true"):
        create_backend("cupy", dtype, tf32=True)
    assert create_backend("cupy", dtype, tf32=False).options["tf32"] is False
    assert create_backend("cupy", "float32", tf32=True).options["tf32"] is True


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_tf32_is_for_gpus(name: str) -> None:
    wrong: tuple[Any, ...] = (True, 1)
    for tf32 in wrong:
        with refused("tf32"):
            create_backend(name, tf32=tf32)
    assert create_backend(name, tf32=False).name == name


# the library ----------------------------------------------------------------------------------------------------------


class Loaded:
    """A library with what is asked of it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Any:
        function = SimpleNamespace()
        setattr(self, name, function)
        return function


def paths(monkeypatch: pytest.MonkeyPatch, found: Any, there: set[str]) -> list[str]:
    """Make the search of NVIDIA's wheels end in `found`, and these paths loadable; returns the paths that are tried."""
    tried = []

    def load(path: str) -> Any:
        tried.append(path)
        if path not in there:
            raise OSError(f"{path}: cannot open shared object file")
        return Loaded(path)

    def search(name: str) -> Any:
        assert name == "cublas"
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(abs_path=found)

    pathfinder: Any = ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = search
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None if found is None else pathfinder)
    monkeypatch.setattr(ctypes, "CDLL", load)
    return tried


@pytest.mark.parametrize("cuda", [12, 13])
def test_the_library_is_cupys_or_the_systems(cuda: int, monkeypatch: pytest.MonkeyPatch) -> None:
    soname = f"libcublas.so.{cuda}"
    load = real_library.__wrapped__
    for found, there, expected in (
        ("/wheel/libcublas.so.12", {"/wheel/libcublas.so.12"}, ["/wheel/libcublas.so.12"]),
        (None, {soname}, [soname]),  # no cuda-pathfinder
        (RuntimeError("not found"), {soname}, [soname]),
    ):
        with monkeypatch.context() as patch:
            tried = paths(patch, found, there)
            assert isinstance(load(cuda), cublas.Library)
        assert tried == expected


def test_a_library_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        paths(patch, RuntimeError("not found"), set())
        with pytest.raises(ConfigError) as refused:
            real_library.__wrapped__(13)
    assert str(refused.value) == (
        "cuBLAS cannot be loaded (libcublas.so.13: cannot open shared object file): "
        "pip install 'cupy-cuda13x[ctk]', or name the folder of the toolkit's libraries in LD_LIBRARY_PATH"
    )
