"""What can be said of the CuPy backend without a GPU: on which device and stream it asks for what. A module that stands
in for CuPy computes with NumPy and keeps, as CuPy does, a current device and stream for each thread.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend, select_backend
from cupynet.backend.cuda import probe
from tests.backend import on_host


class StandIn(ModuleType):
    """NumPy under the name of CuPy, that notes (operation, device, stream) of what makes or reads arrays."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.asked: list[tuple[str, int, Any]] = []
        current = threading.local()

        class Place:
            """A device, or a stream of the device that is current."""

            def __init__(self, number: int = 0, non_blocking: bool = False) -> None:
                self.number = self.id = number

            def use(self) -> None:
                setattr(current, type(self).__name__, self)

            def __enter__(self) -> None:
                self.before = getattr(current, type(self).__name__, None)
                self.use()

            def __exit__(self, *_: object) -> None:
                setattr(current, type(self).__name__, self.before)

            def synchronize(self) -> None:
                pass

        Device, Stream = type("Device", (Place,), {}), type("Stream", (Place,), {})
        self.cuda = SimpleNamespace(
            Device=Device,
            Stream=Stream,
            get_current_stream=lambda: getattr(current, "Stream", None) or Stream(),
            runtime=SimpleNamespace(getDeviceCount=lambda: 2),
        )

        def noted(name: str, function: Any) -> Any:
            def call(*arguments: Any) -> Any:
                device = getattr(current, "Device", None)
                self.asked.append((name, device.number if device else 0, getattr(current, "Stream", None)))
                made = function(*arguments)
                if isinstance(made, on_host.HostArray):
                    made.number = device.number if device else 0
                return made

            return call

        self.empty, self.asarray = noted("empty", on_host.empty), noted("asarray", on_host.asarray)
        self.asnumpy, self.is_available = noted("asnumpy", np.asarray), lambda: True

        class Module:
            """Kernels that are only noted."""

            def __init__(self, code: str, options: tuple[str, ...]) -> None:
                pass

            def get_function(self, name: str) -> Any:
                return noted(name, lambda *_: None)

        self.RawModule, self.ndarray = Module, on_host.HostArray

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_whatever_thread_asks_it_happens_on_the_workers_device_and_stream(cupy: StandIn) -> None:
    """A prefetcher's thread begins on device 0 and the null stream, which waits for nobody."""
    backend = create_backend("cupy", device=1)
    worker = threading.Thread(target=backend.activate)
    worker.start()
    worker.join()

    def prefetch() -> None:
        backend.load_images(np.zeros((3, 2, 2, 1), np.uint8), np.arange(2))
        backend.asarray(np.arange(2), np.int64)
        backend.allocate((2,), np.float32)
        backend.to_host(np.zeros(2))

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()
    loading = ["asarray", "empty", "load_images_float"]
    assert [name for name, _, _ in cupy.asked] == [*loading, "asarray", "empty", "asnumpy"]
    assert {device for _, device, _ in cupy.asked} == {1}
    streams = {stream for _, _, stream in cupy.asked}
    assert len(streams) == 1 and None not in streams


def test_arrays_are_on_the_backends_device_before_a_worker_is_there(cupy: StandIn) -> None:
    backend = create_backend("cupy", device=1)
    backend.asarray(np.zeros(2))
    backend.allocate((2,), np.float32)
    assert {device for _, device, _ in cupy.asked} == {1}


class CompilerError(Exception):
    """CuPy's CompileException is neither an ImportError nor a RuntimeError either."""


def test_a_cupy_that_cannot_compile_is_a_reason_and_not_a_bug(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe() == "CuPy cannot run a kernel ('numpy.ndarray' object has no attribute 'get')"

    def ones(*_: object) -> None:
        raise CompilerError("cannot open source file cuda_fp16.h\nand much more")

    monkeypatch.setattr(cupy, "ones", ones, raising=False)
    assert probe() == "CuPy cannot run a kernel (cannot open source file cuda_fp16.h)"
    name, reason = select_backend("auto")
    assert name != "cupy" and reason is not None and "cuda_fp16.h" in reason
