"""CupyBackend on CuPy's stand-in: each operation's device and stream, pools, and reasons why CuPy cannot be used.

The stand-in (tests/standin) detects arrays of another device, and operations that are not ordered.
"""

import sys
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend, select_backend
from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.cuda.gpus import Pool, limit_pools, pool, probe, trim_pools
from cupynet.core.errors import ConfigError
from tests.standin.planted import together

pytestmark = pytest.mark.standin


@pytest.mark.smoke
def test_calls_from_any_thread_use_the_workers_device_and_stream(cupy: Any) -> None:
    """A prefetcher's thread starts on device 0 and the null stream, which does not wait for non-blocking streams."""
    backend = create_backend("cupy", device=1)

    def work() -> Any:
        backend.activate()
        return cupy.cuda.get_current_stream()

    def prefetch() -> list[Any]:
        images = backend.load_images(np.ones((3, 2, 2, 1), np.uint8), np.arange(2))
        labels = backend.asarray(np.arange(2), np.int64)
        assert cupy.cuda.Device().id == 0 and cupy.cuda.get_current_stream() == cupy.cuda.Stream.null
        return [images, labels, backend.allocate((2,), np.float32)]

    (stream,), (arrays,) = together(work), together(prefetch)
    for array in arrays:
        assert array.device.id == 1 and array.data.mem.chunk.line is stream.line_on(1)
    assert together(lambda: backend.to_host(arrays[1]).tolist()) == [[0, 1]]


def test_a_worker_stays_on_its_stream(cupy: Any) -> None:
    """The end of `with stream` restores the stream entered before it, not one that `use` made current."""
    backend = CupyBackend(device=1)

    def work() -> list[Any]:
        backend.activate()
        backend.to_host(backend.asarray(np.zeros(2)))
        backend.load_images(np.zeros((1, 2, 2, 1), np.uint8), np.zeros(1, np.int64))
        return [cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr]

    assert together(work) == [[1, backend.stream()]]


def test_buffers_of_the_null_stream_are_not_lent_on_the_workers(cupy: Any) -> None:
    backend = create_backend("cupy")
    borrowed = [backend.borrow((4, 3))]
    borrowed[0][...] = 1
    workspace = backend.workspace
    backend.activate()
    borrowed.clear()
    assert backend.workspace is not workspace and workspace.on_loan == 0
    after = backend.borrow((4, 3))
    assert after.data.mem.chunk.line is cupy.cuda.get_current_stream().line_on(0)
    backend.deactivate()


def test_the_memory_pool_of_each_device_is_limited(cupy: Any) -> None:
    limit_pools([0, 1], None)
    with cupy.cuda.Device(1):
        kept = cupy.zeros(100)
        cupy.zeros(1000)
        cupy.get_default_memory_pool().set_limit(size=1 << 22)
    assert pool(0).limit is None
    assert pool(1) == Pool(1024, 1024 + 8192, 1 << 22)
    limit_pools([1], 0.25)
    assert pool(1) == Pool(1024, 1024, 1 << 28) and kept.size


def test_memory_pools_are_trimmed_above_a_threshold(cupy: Any) -> None:
    pinned = cupy.get_default_pinned_memory_pool()
    for device in (0, 1):
        with cupy.cuda.Device(device):
            cupy.asarray(np.zeros(2000))
    for bytes_above, blocks_above, held, blocks in ((1 << 20, 1, 16384, 1), (0, None, 0, 1), (None, 0, 0, 0)):
        trim_pools([0, 1], bytes_above, blocks_above)
        assert [pool(device).held for device in (0, 1)] == [held] * 2 and pinned.n_free_blocks() == blocks


def test_selecting_cupy_tries_only_the_device_of_the_process() -> None:
    """Trying a device takes memory on it, and fails if another process uses it exclusively."""
    assert select_backend("auto", device=3) == ("cupy", None)  # the machine has two
    assert [pool(device).held > 0 for device in (0, 1)] == [False, True]


def test_cupy_is_not_selected_if_it_cannot_compile(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's CompileException is neither an ImportError nor a RuntimeError."""

    def ones(*_: object) -> None:
        raise LookupError("cannot open source file cuda_fp16.h\nand much more")

    monkeypatch.setattr(cupy, "ones", ones)
    name, reason = select_backend("auto")
    assert name != "cupy" and reason is not None and "cuda_fp16.h" in reason and "\n" not in reason


@pytest.mark.parametrize(("version", "works"), [("13.6.0", False), ("14.0.0rc1", True), ("15.1.0", True)])
def test_an_old_cupy_is_refused(version: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cupy"], "__version__", version)
    assert (probe() is None) == works


def test_a_gradient_with_gaps_is_refused_after_a_relu() -> None:
    """The kernel would apply the derivative to a copy."""
    backend = create_backend("cupy", "float")
    y = backend.asarray(np.ones((4, 6), np.float32))
    dy, bias_grad = backend.asarray(np.ones((8, 6), np.float32))[::2], backend.asarray(np.zeros(6, np.float32))
    with pytest.raises(ConfigError):
        backend._relu_and_bias_backward(dy, y, bias_grad)
